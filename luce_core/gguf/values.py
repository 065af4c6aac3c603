"""What a metadata value is in Python: plain scalars, a numpy array, a `StringArray`, or a tuple of arrays."""

from __future__ import annotations

import array
import codecs
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias, TypeGuard, TypeVar, overload

import numpy as np
import numpy.typing as npt

from luce_core.gguf.complaint import quote

_U64: Final = struct.Struct("<Q")
_LENGTH_BYTES: Final = 8
_UTF8_CHUNK_BYTES: Final = 1 << 20

Scalar = TypeVar("Scalar", bound=np.generic)


class StringArray(Sequence[str]):
    """Immutable strings, kept as one run of UTF-8 and decoded on demand: a vocabulary is no 250,000 objects.

    text: every string, one after the other; ends: `i64[n]`, where each one ends.
    """

    __slots__ = ("_ends", "_text")

    def __init__(self, text: bytes, ends: npt.NDArray[np.int64]) -> None:
        self._text = text
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        position = range(len(self))[index]
        start = int(self._ends[position - 1]) if position else 0
        return self._text[start : int(self._ends[position])].decode()

    def __iter__(self) -> Iterator[str]:
        start = 0
        text = self._text
        for end in self._ends.tolist():
            yield text[start:end].decode()
            start = end

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StringArray):
            return self._text == other._text and np.array_equal(self._ends, other._ends)
        if isinstance(other, (tuple, list)):
            return tuple(self) == tuple(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"StringArray({len(self)} strings)"


MetaValue: TypeAlias = "bool | int | float | str | StringArray | npt.NDArray[Any] | tuple[MetaValue, ...]"


def frozen_array(values: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    values.setflags(write=False)
    return values


def read_strings(data: memoryview, count: int, max_bytes: int) -> tuple[StringArray, int]:
    """`count` strings from the start of `data`, each a length u64 and UTF-8, and the bytes they took.

    Raises ValueError, worded as the verb phrase of a complaint, when they are cut off, too long or not UTF-8.
    """
    prefixed_ends = array.array("q")
    append, unpack, pos, limit = prefixed_ends.append, _U64.unpack_from, 0, len(data)
    for index in range(count):
        if limit - pos < _LENGTH_BYTES:
            raise ValueError(f"is cut off by the end of the header at string {index} of {count}")
        num_bytes = unpack(data, pos)[0]
        pos += _LENGTH_BYTES + num_bytes
        if num_bytes > max_bytes:
            raise ValueError(f"has a string of {num_bytes} bytes at index {index} (at most {max_bytes})")
        if pos > limit:
            raise ValueError(f"is cut off by the end of the header at string {index} of {count}")
        append(pos)
    ends = np.frombuffer(prefixed_ends, np.int64) if count else np.empty(0, np.int64)
    raw = np.frombuffer(data[:pos], np.uint8)
    text_ends = ends - _LENGTH_BYTES * np.arange(1, count + 1, dtype=np.int64)
    text = raw[_text_mask(ends, pos)].tobytes()
    _check_utf8(text, text_ends)
    return StringArray(text, frozen_array(text_ends)), pos


def _text_mask(ends: npt.NDArray[np.int64], num_bytes: int) -> npt.NDArray[np.bool_]:
    """True for each byte that is not part of a length."""
    mask = np.ones(num_bytes, np.bool_)
    starts = np.concatenate((np.zeros(1, np.int64), ends[:-1])) if len(ends) else ends
    for byte in range(_LENGTH_BYTES):
        mask[starts + byte] = False
    return mask


def _check_utf8(text: bytes, ends: npt.NDArray[np.int64]) -> None:
    """The run as a whole must decode, and no string may start inside a character."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(text), _UTF8_CHUNK_BYTES):
            decoder.decode(text[start : start + _UTF8_CHUNK_BYTES])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise ValueError(f"has a string that is not UTF-8 ({error.reason})") from error
    inner_starts = ends[ends < len(text)]
    first_bytes = np.frombuffer(text, np.uint8)[inner_starts]
    if np.any(first_bytes & 0xC0 == 0x80):
        raise ValueError("has a string that ends inside a UTF-8 character")


def is_int(value: object) -> TypeGuard[int]:
    """An integer; Python counts booleans among them, GGUF does not."""
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: MetaValue) -> str:
    """A value for a message: short, whatever the file holds."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the string {quote(value)}"
    if isinstance(value, (int, float)):
        return f"the number {value!r}"
    return f"an array of {describe_array(value)}"


def describe_array(value: StringArray | npt.NDArray[Any] | tuple[MetaValue, ...]) -> str:
    if isinstance(value, StringArray):
        noun = "string"
    elif isinstance(value, tuple):
        noun = "array"
    else:
        noun = f"{value.dtype.name} value"
    return f"{len(value)} {noun}" if len(value) == 1 else f"{len(value)} {noun}s"
