"""Files that say everything a model's header says and hold no weights, for tests of what a header may say.

    path = write_header(tmp_path / "8b.gguf", {"general.architecture": "llama"}, {"output.weight": (9, 8)})

Metadata: what `luce_core.gguf.emit` takes. Shapes in torch order. Published sizes are written by
`luce_core.synth`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from luce_core.gguf import FORMATS
from luce_core.gguf.emit import header_bytes, place


def q4_k_m(name: str, shape: tuple[int, ...]) -> str:
    """Roughly what a Q4_K_M file stores each tensor as; `luce_core.synth.formats_of` has the whole rule."""
    if len(shape) < 2 or name.endswith((".scale", "ffn_gate_inp.weight")) or shape[-1] % 32:
        return "F32"
    if name.endswith(("token_embd.weight", "output.weight")) and not name.startswith("blk."):
        return "Q6_K" if shape[-1] % 256 == 0 else "Q8_0"
    return "Q4_K" if shape[-1] % 256 == 0 else "Q5_0"


def write_header(
    path: Path,
    metadata: Mapping[str, object],
    shapes: Mapping[str, tuple[int, ...]],
    format_of: Callable[[str, tuple[int, ...]], str] = q4_k_m,
) -> Path:
    """The file, whose end is a hole in the disk. format_of: what a tensor is stored as."""
    formats = {name: FORMATS.by_name(format_of(name, shape)) for name, shape in shapes.items()}
    tensors = place(shapes, formats)
    head = header_bytes(metadata, tensors)
    path.write_bytes(head)
    with path.open("rb+") as file:
        file.truncate(len(head) + sum(tensor.padded_bytes for tensor in tensors))
    return path
