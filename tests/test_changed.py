"""Changed copies of frozen dataclasses."""

import dataclasses

import pytest

from penelope_jax.changed import changed


@dataclasses.dataclass(frozen=True)
class _Point:
    x: int
    y: int = 2


def test_a_changed_copy_is_what_replace_makes():
    point = _Point(1)
    assert changed(point, y=5) == dataclasses.replace(point, y=5) == _Point(1, 5)
    assert point == _Point(1, 2)
    assert hash(changed(point, x=3)) == hash(_Point(3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        changed(point, x=3).x = 4  # type: ignore[misc]


def test_a_field_that_is_not_there_is_refused():
    with pytest.raises(TypeError, match=r"^_Point has no such fields: \['z'\]\.$"):
        changed(_Point(1), x=3, z=4)
