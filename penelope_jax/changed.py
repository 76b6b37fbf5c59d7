"""Changed copies of immutable values, for what happens to each request in every step."""

from typing import Any


def changed[T](value: T, **changes: Any) -> T:
    """Returns a frozen dataclass with some fields changed: `dataclasses.replace` in a fifth of the time.

    Args:
        value: of a class without slots and without `__post_init__`, which is not called.
        changes: new values by field name.
    """
    assert changes.keys() <= value.__dict__.keys(), f"{type(value).__name__} has no such fields: {sorted(changes)}"
    made = object.__new__(type(value))
    made.__dict__.update(value.__dict__)
    made.__dict__.update(changes)
    return made
