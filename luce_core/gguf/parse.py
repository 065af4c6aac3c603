"""Bytes of one GGUF file to its metadata and tensor table, trusting none of them.

Layout (little-endian): "GGUF", version u32, tensor count u64, pair count u64; pairs of key, value type u32,
value; then per tensor its name, dimension count u32, dimensions u64 (innermost first), type id u32, offset
u64; padding; tensor data. A string is a length u64 and its UTF-8 bytes, an array an element type u32, a
count u64 and its elements.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import attrs
import numpy as np

from luce_core.errors import ModelFormatError
from luce_core.gguf import limits
from luce_core.gguf.complaint import bad, quote
from luce_core.gguf.formats import FormatRegistry
from luce_core.gguf.header import TensorInfo
from luce_core.gguf.values import MetaValue, StringArray, frozen_array, is_int, read_strings, shown

MAGIC: Final = b"GGUF"
DEFAULT_ALIGNMENT: Final = 32
VERSIONS: Final = (2, 3)

TYPE_BOOL, TYPE_STRING, TYPE_ARRAY = 7, 8, 9
NUMBERS: Final = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
SCALARS: Final = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"),
    10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}  # fmt: skip

_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")

MIN_PAIR_BYTES: Final = 8 + 1 + 4 + 1
MIN_TENSOR_BYTES: Final = 8 + 1 + 4 + 8 + 4 + 8
MIN_ELEMENT_BYTES: Final = {
    TYPE_BOOL: 1, TYPE_STRING: 8, TYPE_ARRAY: 12, **{kind: scalar.size for kind, scalar in SCALARS.items()},
}  # fmt: skip


@attrs.frozen
class ShardTable:
    """The header of one file. header_bytes: where the tensor table ends."""

    version: int
    metadata: Mapping[str, MetaValue]
    tensors: Mapping[str, TensorInfo]
    header_bytes: int


def parse_table(data: memoryview, path: Path, shard: int, formats: FormatRegistry) -> ShardTable:
    """Read the header at the start of `data`, the whole file; nothing returned refers to it.

    Raises ModelFormatError naming the key or tensor.
    """
    cursor = _Cursor(data, path)
    version = _version(cursor)
    num_tensors = cursor.count("the header's tensor count", limits.MAX_TENSORS, MIN_TENSOR_BYTES)
    num_pairs = cursor.count("the header's count of metadata keys", limits.MAX_METADATA_PAIRS, MIN_PAIR_BYTES)
    metadata: dict[str, MetaValue] = {}
    for index in range(num_pairs):
        _read_pair(cursor, index, metadata)
    alignment = _alignment(metadata, path)
    entries = [_read_entry(cursor, index) for index in range(num_tensors)]
    data_start = -(-cursor.pos // alignment) * alignment
    layout = _Layout(path, shard, formats, data_start, alignment, len(data))
    tensors: dict[str, TensorInfo] = {}
    for entry in entries:
        if entry.name in tensors:
            raise bad(path, f"tensor {quote(entry.name)}", "appears twice", "every name once")
        tensors[entry.name] = _place(entry, layout)
    _refuse_overlap(tensors, path)
    return ShardTable(version, metadata, tensors, cursor.pos)


@attrs.frozen
class _Entry:
    """A line of the tensor table as written."""

    name: str
    dims: tuple[int, ...]
    type_id: int
    offset: int


class _Cursor:
    """A place in the header that never moves past its end, and what the arrays read so far have used up."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self.path = path
        self.file_bytes = len(data)
        self.data = data[: limits.MAX_HEADER_BYTES]
        self.pos = 0
        self.elements_left = limits.MAX_ARRAY_ELEMENTS
        self.nested_left = limits.MAX_NESTED_ARRAYS

    @property
    def left(self) -> int:
        return len(self.data) - self.pos

    def take(self, num_bytes: int, subject: str) -> memoryview:
        if num_bytes > self.left:
            raise self.too_short(subject, num_bytes)
        start = self.pos
        self.pos += num_bytes
        return self.data[start : self.pos]

    def too_short(self, subject: str, num_bytes: int) -> ModelFormatError:
        if num_bytes <= self.file_bytes - self.pos:
            wanted = f"a header of at most {limits.MAX_HEADER_BYTES} bytes"
            return bad(self.path, subject, f"ends at byte {self.pos + num_bytes}", wanted)
        got = f"needs {num_bytes} bytes at byte {self.pos}, but the file ends at byte {self.file_bytes}"
        return bad(self.path, subject, got, "a complete file")

    def u32(self, subject: str) -> int:
        return int(_U32.unpack(self.take(4, subject))[0])

    def u64(self, subject: str) -> int:
        return int(_U64.unpack(self.take(8, subject))[0])

    def count(self, subject: str, most: int, min_bytes: int) -> int:
        """A u64 that says how many things follow, of at least `min_bytes` each."""
        value = self.u64(subject)
        if value > most:
            raise bad(self.path, subject, f"is {value}", f"at most {most}")
        if value * min_bytes > self.left:
            raise self.too_short(f"{subject} ({value})", value * min_bytes)
        return value

    def text(self, subject: str, most_bytes: int) -> str:
        num_bytes = self.u64(subject)
        if num_bytes > most_bytes:
            raise bad(self.path, subject, f"has a string of {num_bytes} bytes", f"at most {most_bytes} bytes")
        try:
            return str(self.take(num_bytes, subject), "utf-8")
        except UnicodeDecodeError as error:
            got = f"has a string that is not UTF-8 ({error.reason})"
            raise bad(self.path, subject, got, "UTF-8") from error

    def spend(self, elements: int, subject: str) -> None:
        self.elements_left -= elements
        if self.elements_left < 0:
            wanted = f"at most {limits.MAX_ARRAY_ELEMENTS} in all arrays of the file"
            raise bad(self.path, subject, f"has {elements} elements", wanted)


def _version(cursor: _Cursor) -> int:
    magic = bytes(cursor.data[:4])
    if magic != MAGIC:
        raise bad(cursor.path, "the magic at its start", f"is {magic!r}", f"{MAGIC!r}")
    cursor.take(4, "the magic at its start")
    version = cursor.u32("the version")
    if version and version & 0xFFFF == 0:
        got = f"is {version:#010x}, so the file is big-endian"
        raise bad(cursor.path, "the version", got, "little-endian", "Convert the model without byte swaps.")
    if version not in VERSIONS:
        fix = "Convert the model again." if version == 1 else "Upgrade luce-core, or fetch the file again."
        raise bad(cursor.path, "the version", f"is {version}", "2 or 3", fix)
    return version


def _read_pair(cursor: _Cursor, index: int, metadata: dict[str, MetaValue]) -> None:
    key = cursor.text(f"metadata key number {index + 1}", limits.MAX_KEY_BYTES)
    if not key:
        raise bad(cursor.path, f"metadata key number {index + 1}", "is empty", "a name")
    subject = f"metadata key {quote(key)}"
    if key in metadata:
        raise bad(cursor.path, subject, "appears twice", "every key once")
    metadata[key] = _read_value(cursor, cursor.u32(subject), subject)


def _read_value(cursor: _Cursor, kind: int, subject: str) -> MetaValue:
    if kind in SCALARS:
        scalar = SCALARS[kind]
        number: int | float = scalar.unpack(cursor.take(scalar.size, subject))[0]
        return number
    if kind == TYPE_STRING:
        return cursor.text(subject, limits.MAX_STRING_BYTES)
    if kind == TYPE_BOOL:
        return bool(_bools(cursor, 1, subject)[0])
    if kind == TYPE_ARRAY:
        return _read_array(cursor, subject, limits.MAX_ARRAY_DEPTH)
    raise bad(cursor.path, subject, f"has value type {kind}", "a type from 0 to 12")


def _read_array(cursor: _Cursor, subject: str, depth: int) -> MetaValue:
    kind = cursor.u32(subject)
    if kind not in MIN_ELEMENT_BYTES:
        raise bad(cursor.path, subject, f"is an array of value type {kind}", "a type from 0 to 12")
    count = cursor.count(f"the array length of {subject}", limits.MAX_ARRAY_ELEMENTS, MIN_ELEMENT_BYTES[kind])
    cursor.spend(count, subject)
    if kind == TYPE_STRING:
        return _strings(cursor, count, subject)
    if kind == TYPE_BOOL:
        return _bools(cursor, count, subject)
    if kind == TYPE_ARRAY:
        return _nested(cursor, count, subject, depth)
    return frozen_array(np.frombuffer(cursor.take(count * SCALARS[kind].size, subject), NUMBERS[kind]).copy())


def _nested(cursor: _Cursor, count: int, subject: str, depth: int) -> MetaValue:
    if depth == 1:
        wanted = f"at most {limits.MAX_ARRAY_DEPTH} levels"
        raise bad(cursor.path, subject, "has arrays in arrays in arrays too deep", wanted)
    cursor.nested_left -= count
    if cursor.nested_left < 0:
        wanted = f"at most {limits.MAX_NESTED_ARRAYS} nested arrays in the file"
        raise bad(cursor.path, subject, f"holds {count} arrays", wanted)
    return tuple(_read_array(cursor, subject, depth - 1) for _ in range(count))


def _strings(cursor: _Cursor, count: int, subject: str) -> StringArray:
    try:
        strings, used = read_strings(cursor.data[cursor.pos :], count, limits.MAX_STRING_BYTES)
    except ValueError as error:
        raise bad(cursor.path, subject, str(error), f"{count} complete UTF-8 strings") from error
    cursor.pos += used
    return strings


def _bools(cursor: _Cursor, count: int, subject: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    raw = np.frombuffer(cursor.take(count, subject), np.uint8)
    wrong = raw[raw > 1]
    if wrong.size:
        raise bad(cursor.path, subject, f"has {wrong[0]} for a boolean", "0 or 1")
    return frozen_array(raw.astype(np.bool_))


def _alignment(metadata: Mapping[str, MetaValue], path: Path) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if is_int(value) and limits.MIN_ALIGNMENT <= value <= limits.MAX_ALIGNMENT and value.bit_count() == 1:
        return value
    wanted = f"a power of two from {limits.MIN_ALIGNMENT} to {limits.MAX_ALIGNMENT}"
    raise bad(path, "metadata key 'general.alignment'", f"is {shown(value)}", wanted)


def _read_entry(cursor: _Cursor, index: int) -> _Entry:
    name = cursor.text(f"the name of tensor number {index + 1}", limits.MAX_TENSOR_NAME_BYTES)
    if not name:
        raise bad(cursor.path, f"tensor number {index + 1}", "has an empty name", "a name")
    subject = f"tensor {quote(name)}"
    num_dims = cursor.u32(subject)
    if not 1 <= num_dims <= limits.MAX_DIMS:
        raise bad(cursor.path, subject, f"has {num_dims} dimensions", f"1 to {limits.MAX_DIMS}")
    dims = tuple(cursor.u64(subject) for _ in range(num_dims))
    return _Entry(name, dims, cursor.u32(subject), cursor.u64(subject))


@attrs.frozen
class _Layout:
    """What an entry is checked against."""

    path: Path
    shard: int
    formats: FormatRegistry
    data_start: int
    alignment: int
    file_bytes: int


def _place(entry: _Entry, layout: _Layout) -> TensorInfo:
    path, subject = layout.path, f"tensor {quote(entry.name)}"
    weights = math.prod(entry.dims)
    if not 0 < weights <= limits.MAX_WEIGHTS:
        wanted = f"dimensions of at least 1 and at most {limits.MAX_WEIGHTS} weights"
        raise bad(path, subject, f"has the dimensions {list(entry.dims)}", wanted)
    try:
        block_format = layout.formats.by_id(entry.type_id)
    except ModelFormatError as error:
        raise ModelFormatError(f"GGUF file '{path}': {subject} has {error}") from error
    row_weights = entry.dims[0]
    if row_weights % block_format.block_weights:
        wanted = f"a multiple of {block_format.block_weights}, the block size of {block_format.name}"
        raise bad(path, subject, f"has rows of {row_weights} weights", wanted)
    if entry.offset % layout.alignment:
        wanted = f"a multiple of the alignment {layout.alignment}"
        raise bad(path, subject, f"starts at offset {entry.offset}", wanted)
    num_bytes = weights // block_format.block_weights * block_format.block_bytes
    start = layout.data_start + entry.offset
    if start + num_bytes > layout.file_bytes:
        got = f"covers bytes {start} to {start + num_bytes}, but the file ends at byte {layout.file_bytes}"
        raise bad(path, subject, got, "data inside the file")
    return TensorInfo(entry.name, entry.dims[::-1], block_format, num_bytes, layout.shard, start)


def _refuse_overlap(tensors: Mapping[str, TensorInfo], path: Path) -> None:
    in_file_order = sorted(tensors.values(), key=lambda info: info.offset)
    for first, second in itertools.pairwise(in_file_order):
        if first.offset + first.num_bytes > second.offset:
            got = f"overlaps tensor {quote(first.name)} (both hold byte {second.offset})"
            raise bad(path, f"tensor {quote(second.name)}", got, "bytes of its own")
