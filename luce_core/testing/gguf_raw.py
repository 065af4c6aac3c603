"""GGUF byte by byte, for files no writer would produce: every count, length and type can lie.

`model(pairs=[pair(b"general.architecture", STRING, string(b"x"))], num_pairs=2**63)`, for example.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)

ARCH = struct.pack("<Q20sIQ4s", 20, b"general.architecture", STRING, 4, b"tiny")
"""The pair most files start with."""


def string(text: bytes, length: int | None = None) -> bytes:
    """`length`: what the file claims."""
    return struct.pack("<Q", len(text) if length is None else length) + text


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    """A metadata pair; `value` is packed already."""
    return string(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, elements: bytes) -> bytes:
    """An array value; `elements` are packed already, `count` is what the file claims."""
    return struct.pack("<IQ", kind, count) + elements


def tensor(
    name: bytes = b"t",
    dims: Sequence[int] = (32,),
    type_id: int = 0,
    offset: int = 0,
    *,
    num_dims: int | None = None,
) -> bytes:
    """A line of the tensor table; `dims` innermost first, as the file has them."""
    head = string(name) + struct.pack("<I", len(dims) if num_dims is None else num_dims)
    return head + struct.pack(f"<{len(dims)}QIQ", *dims, type_id, offset)


def model(
    pairs: Sequence[bytes] = (ARCH,),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_pairs: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file. `data` starts at the next multiple of `alignment` after the tables."""
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(pairs) if num_pairs is None else num_pairs,
    )
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data if data else header
