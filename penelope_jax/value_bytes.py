"""Plain values as bytes and back: equal values give equal bytes, in every process and on every machine.

A value is None, a bool, an int, a float, a string, a numpy array, a tuple, a member of an enum, or a dataclass of such
values. A dataclass is its name and its fields by name, so bytes can be read after a field was added. A named tuple is
a tuple and comes back as one.
"""

import dataclasses
import enum
import functools
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

_FLOAT = struct.Struct("<d")
_NOTHING = object()

# Metadata of a dataclass field that came to its class after values of it had been written. Its bytes are left out while
# it has its default, so values that do not use it keep the bytes they always had. The default can never change: bytes
# from before the field was there are read with it anyway.
ADDED = {"added": True}


class _Field(NamedTuple):
    name: str
    key: bytes
    default: Any
    added: bool


@functools.cache
def _fields(cls: type) -> tuple[_Field, ...]:
    fields = []
    for field in dataclasses.fields(cls):
        key = bytearray()
        put_text(key, field.name)
        default = _NOTHING if field.default is dataclasses.MISSING else field.default
        fields.append(_Field(field.name, bytes(key), default, field.metadata.get("added", False)))
    return tuple(fields)


def put_count(out: bytearray, number: int) -> None:
    """Appends an int >= 0; small ones take one byte."""
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)


def put_text(out: bytearray, text: str) -> None:
    """Appends a string; any string, also one that is no valid Unicode."""
    data = text.encode("utf-8", "surrogatepass")
    put_count(out, len(data))
    out += data


def put(out: bytearray, value: Any, *, brief: bool = False) -> None:
    """Appends a value.

    Args:
        out: bytes so far.
        value: the value.
        brief: leave out fields that have their default. Such bytes do not change when a field is added that nobody
            uses, but they change their meaning when a default does, so they are for comparing, not for reading back.

    Raises:
        TypeError: it is not made of the types named above.
    """
    kind = type(value)
    if kind is int or isinstance(value, np.integer):
        out += b"i"
        number = int(value)
        put_count(out, number * 2 if number >= 0 else -number * 2 - 1)
    elif value is None:
        out += b"n"
    elif kind is bool or isinstance(value, np.bool_):
        out += b"y" if value else b"z"
    elif isinstance(value, (float, np.floating)):
        out += b"f" + _FLOAT.pack(value)
    elif kind is str:
        out += b"s"
        put_text(out, value)
    elif isinstance(value, np.ndarray):
        out += b"a"
        put_array(out, value)
    elif isinstance(value, enum.Enum):
        out += b"e"
        put_text(out, kind.__name__)
        put_text(out, value.name)
    elif isinstance(value, (int, str)):  # of a subclass
        put(out, int(value) if isinstance(value, int) else str.__str__(value))
    elif isinstance(value, tuple):
        out += b"t"
        put_count(out, len(value))
        for item in value:
            put(out, item, brief=brief)
    elif dataclasses.is_dataclass(value):
        out += b"r"
        put_text(out, kind.__name__)
        put_fields(out, value, brief=brief)
    else:
        raise TypeError(f"{kind.__name__} {value!r} cannot be written as bytes.")


def put_fields(out: bytearray, value: Any, *, brief: bool = False, without: tuple[str, ...] = ()) -> None:
    """Appends the fields of a dataclass by name, and an end mark.

    Args:
        out: bytes so far.
        value: the dataclass.
        brief: see `put`.
        without: fields left out.
    """
    for name, key, default, was_added in _fields(type(value)):
        item = getattr(value, name)
        if (brief or was_added) and _same(item, default) or name in without:
            continue
        out += key
        put(out, item, brief=brief)
    out.append(0)


def _same(item: Any, default: Any) -> bool:
    if item is default:
        return True
    return type(item) is type(default) and not dataclasses.is_dataclass(item) and bool(item == default)


def put_array(out: bytearray, array: np.ndarray) -> None:
    """Appends dtype, shape and elements, little endian."""
    if array.dtype.hasobject:
        raise TypeError(f"an array of {array.dtype} cannot be written as bytes.")
    if array.dtype.str.startswith(">"):
        array = array.astype(array.dtype.newbyteorder("<"))
    put_text(out, array.dtype.str)
    put_count(out, array.ndim)
    for size in array.shape:
        put_count(out, size)
    out += array.tobytes()


def brief_bytes(value: Any) -> bytes:
    """Returns the bytes of a value, for comparing; see `put`."""
    out = bytearray()
    put(out, value, brief=True)
    return bytes(out)


class ByteReader:
    """Reads back, in order, what the functions above wrote.

    Every method raises ValueError when the bytes are not what such a function writes.

    Args:
        data: the bytes.
        classes: dataclasses and enums that values may be of, by name.
    """

    def __init__(self, data: bytes, classes: Mapping[str, type] | None = None):
        self._data = data
        self._position = 0
        self._classes = classes or {}

    @property
    def done(self) -> bool:
        return self._position == len(self._data)

    def take(self, size: int) -> bytes:
        stop = self._position + size
        if stop > len(self._data):
            raise ValueError(f"{size} bytes wanted, {len(self._data) - self._position} left.")
        part = self._data[self._position : stop]
        self._position = stop
        return part

    def count(self) -> int:
        number, shift = 0, 0
        while True:
            (byte,) = self.take(1)
            number |= (byte & 127) << shift
            if byte < 128:
                return number
            shift += 7

    def text(self) -> str:
        return self.take(self.count()).decode("utf-8", "surrogatepass")

    def array(self) -> np.ndarray:
        """Returns an array, read-only."""
        name = self.text()
        try:
            dtype = np.dtype(name)
        except TypeError as error:
            raise ValueError(f"unknown dtype {name!r}.") from error
        shape = tuple(self.count() for _ in range(self.count()))
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        return np.ndarray(shape, dtype, self.take(num_bytes))

    def value(self) -> Any:
        match self.take(1):
            case b"n":
                return None
            case b"y":
                return True
            case b"z":
                return False
            case b"i":
                number = self.count()
                return -(number + 1 >> 1) if number & 1 else number >> 1
            case b"f":
                return _FLOAT.unpack(self.take(_FLOAT.size))[0]
            case b"s":
                return self.text()
            case b"t":
                return tuple(self.value() for _ in range(self.count()))
            case b"a":
                return self.array()
            case b"e":
                cls, name = self._class(), self.text()
                if name not in cls.__members__:
                    raise ValueError(f"{cls.__name__} has no {name!r}.")
                return cls[name]
            case b"r":
                cls = self._class()
                return cls(**self.fields(cls))
            case tag:
                raise ValueError(f"unknown tag {tag!r}.")

    def fields(self, cls: type) -> dict[str, Any]:
        """Returns the fields of a dataclass that were written, by name."""
        known = {field.name for field in _fields(cls)}
        found = {}
        while name := self.text():
            if name not in known:
                raise ValueError(f"{cls.__name__} has no field {name!r} in this version.")
            found[name] = self.value()
        return found

    def _class(self) -> Any:
        name = self.text()
        if name not in self._classes:
            raise ValueError(f"unknown class {name!r}.")
        return self._classes[name]
