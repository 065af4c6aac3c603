"""The bytes of a GGUF header, for files that are made here: headers alone and synthetic models.

Weights of trained models are converted elsewhere; nothing here quantizes. Plain Python values only, so that
what was written is what the caller sees: an int becomes u32 (i32 if negative, 64 bits wide if it must), a
float f32, then bool, str and lists of one kind; ints in a list become i32 where they fit, as converters
write them. A numpy scalar keeps its own type, for keys that insist on one.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from attrs import frozen

from luce_core.gguf.formats import BlockFormat

ALIGNMENT: Final = 32
VERSION: Final = 3

_U8, _I8, _U16, _I16, _U32, _I32, _F32, _BOOL, _STRING, _ARRAY, _U64, _I64, _F64 = range(13)
_CODES: Final = {
    _U8: "B", _I8: "b", _U16: "H", _I16: "h", _U32: "I", _I32: "i", _F32: "f", _BOOL: "?", _U64: "Q",
    _I64: "q", _F64: "d",
}  # fmt: skip
_NUMPY: Final = {
    "bool": _BOOL, "uint8": _U8, "int8": _I8, "uint16": _U16, "int16": _I16, "uint32": _U32, "int32": _I32,
    "uint64": _U64, "int64": _I64, "float32": _F32, "float64": _F64,
}  # fmt: skip


@frozen
class Placed:
    """A line of the tensor table."""

    name: str
    shape: tuple[int, ...]
    """Torch order."""
    format: BlockFormat
    num_bytes: int
    offset: int
    """From the start of the tensor data; a multiple of `ALIGNMENT`."""

    @property
    def padded_bytes(self) -> int:
        """With what aligns the tensor behind it."""
        return aligned(self.num_bytes)


def place(shapes: Mapping[str, tuple[int, ...]], formats: Mapping[str, BlockFormat]) -> list[Placed]:
    """Tensors one behind the other, in the order of `shapes`."""
    placed, at = [], 0
    for name, shape in shapes.items():
        block = formats[name]
        num_bytes = block.row_bytes(shape[-1])
        for count in shape[:-1]:
            num_bytes *= count
        placed.append(Placed(name, shape, block, num_bytes, at))
        at += placed[-1].padded_bytes
    return placed


def aligned(num_bytes: int) -> int:
    """Raised to a multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def header_bytes(metadata: Mapping[str, object], tensors: Sequence[Placed]) -> bytes:
    """Everything before the tensor data, padding included. Raises TypeError for what metadata cannot hold."""
    parts = [b"GGUF", struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    parts += [_string(key) + _value(value) for key, value in metadata.items()]
    for tensor in tensors:
        dims = tensor.shape[::-1]
        sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        parts.append(_string(tensor.name) + sizes + struct.pack("<IQ", tensor.format.ggml_id, tensor.offset))
    head = b"".join(parts)
    return head + bytes(aligned(len(head)) - len(head))


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: object) -> bytes:
    if isinstance(value, (list, tuple)):
        kind = _kind_of(value)
        head = struct.pack("<IIQ", _ARRAY, kind, len(value))
        if kind == _STRING:
            return head + b"".join(map(_string, value))
        return head + struct.pack(f"<{len(value)}{_CODES[kind]}", *value)
    kind = _kind_of([value], alone=True)
    packed = _string(str(value)) if kind == _STRING else struct.pack(f"<{_CODES[kind]}", value)
    return struct.pack("<I", kind) + packed


def _kind_of(values: Sequence[object], *, alone: bool = False) -> int:
    kinds = {type(value) for value in values}
    if len(kinds) == 1:
        (kind,) = kinds
        if issubclass(kind, np.generic) and np.dtype(kind).name in _NUMPY:
            return _NUMPY[np.dtype(kind).name]
        if kind is int:
            return _int_kind([value for value in values if isinstance(value, int)], alone=alone)
        plain = {bool: _BOOL, float: _F32, str: _STRING}
        if kind in plain:
            return plain[kind]
    raise TypeError(
        f"Metadata holds {values[0] if alone else list(values)!r}; wanted a bool, int, float, str or a list "
        "of one of them."
    )


def _int_kind(values: Sequence[int], *, alone: bool) -> int:
    low, high = min(values), max(values)
    if (low < 0 or not alone) and low >= -(2**31) and high < 2**31:
        return _I32
    if low >= 0:
        return _U32 if high < 2**32 else _U64
    return _I64
