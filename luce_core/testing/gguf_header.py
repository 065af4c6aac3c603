"""Files that say everything a model's header says and hold no weights: published sizes for a test.

    path = write_header(tmp_path / "8b.gguf", {"general.architecture": "llama"}, {"output.weight": (9, 8)})

Metadata: a Python int becomes u32, float f32, then str, bool and lists of one kind. Shapes in torch
order.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path

from luce_core.gguf import FORMATS
from luce_core.testing import gguf_raw as raw

ALIGNMENT = 32


def q4_k_m(name: str, shape: tuple[int, ...]) -> str:
    """Roughly what a Q4_K_M file stores each tensor as. Routers are F32, as are all vectors."""
    if len(shape) < 2 or name.endswith((".scale", "ffn_gate_inp.weight")):
        return "F32"
    if name in ("token_embd.weight", "output.weight"):
        return "Q6_K" if shape[-1] % 256 == 0 else "Q8_0"
    return "Q4_K" if shape[-1] % 256 == 0 else "Q5_0"


def write_header(
    path: Path,
    metadata: Mapping[str, object],
    shapes: Mapping[str, tuple[int, ...]],
    format_of: Callable[[str, tuple[int, ...]], str] = q4_k_m,
) -> Path:
    """The file, whose end is a hole in the disk. format_of: what a tensor is stored as."""
    lines, at = [], 0
    for name, shape in shapes.items():
        block = FORMATS.by_name(format_of(name, shape))
        lines.append(raw.tensor(name.encode(), shape[::-1], block.ggml_id, at))
        size = block.row_bytes(shape[-1])
        for count in shape[:-1]:
            size *= count
        at += -(-size // ALIGNMENT) * ALIGNMENT
    head = raw.model([_pair(key, value) for key, value in metadata.items()], lines, b"\0")
    path.write_bytes(head)
    with path.open("rb+") as file:
        file.truncate(len(head) - 1 + at)
    return path


def _pair(key: str, value: object) -> bytes:
    if isinstance(value, list):
        kind = _type_of(value[0])
        packed = b"".join(_packed(item) for item in value)
        return raw.pair(key.encode(), raw.ARRAY, raw.array(kind, len(value), packed))
    return raw.pair(key.encode(), _type_of(value), _packed(value))


def _type_of(value: object) -> int:
    if isinstance(value, bool):
        return raw.BOOL
    if isinstance(value, int):
        return raw.U32
    return raw.F32 if isinstance(value, float) else raw.STRING


def _packed(value: object) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<?", value)
    if isinstance(value, int):
        return struct.pack("<I", value)
    if isinstance(value, float):
        return struct.pack("<f", value)
    if isinstance(value, str):
        return raw.string(value.encode())
    raise TypeError(f"Metadata holds {value!r}; wanted a bool, int, float, str or a list of one of them.")
