"""The one error a user can cause. Commands turn it into one line on stderr and exit code 2."""

import contextlib
from collections.abc import Iterator


class InputError(ValueError):
    """Something the user gave cannot be used; the message names the value, the limit and the place."""


@contextlib.contextmanager
def bad_input(place: str = "") -> Iterator[None]:
    """Turns errors of the code inside, which only looks at what the user gave, into InputError.

    Args:
        place: put before the message when not empty.
    """
    try:
        yield
    except InputError:
        raise
    except (ValueError, NotImplementedError, OSError, MemoryError) as error:
        text = str(error) or type(error).__name__
        if isinstance(error, OSError) and error.strerror:
            text = f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."
        raise InputError(f"{place}: {text}" if place else text) from error
