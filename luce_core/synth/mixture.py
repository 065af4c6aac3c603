"""Which block format each tensor of a quantized file is stored in: llama.cpp's rule, by role and shape.

A quantization is a mixture. Its default format goes to every matrix but these:

* vectors, norms, routers (`ffn_gate_inp`) and short convolutions (`ssm_conv1d`) stay F32;
* the head, or the tables of embeddings where they serve as head, is wider;
* value-like matrices (`attn_v`, `attn_qkv`, `attn_kv_b`) and down matrices (`ffn_down*`) are wider in some
  layers (`wider_layer`): the first and last eighth, and every third between;
* a row that is no multiple of 256 weights takes the neighbouring format of blocks of 32, and F16 if it is no
  multiple of 32 either.

Whatever `Geometry.formats` says comes first. How the rule was checked: docs/synth.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Final

from attrs import frozen

from luce_core.contracts import Geometry
from luce_core.errors import UsageError
from luce_core.gguf.formats import FORMATS


@frozen
class Quant:
    """A quantization, by the name files carry it."""

    name: str
    default: str
    head: str
    wider: str
    """Of value-like and down matrices in the layers chosen for it."""
    stacks: str
    """Of stacks of experts."""
    file_type: int
    """`general.file_type`."""


def _mixed(name: str, default: str, wider: str, file_type: int) -> Quant:
    return Quant(name, default, "Q6_K", wider, default, file_type)


def _plain(name: str, default: str, file_type: int) -> Quant:
    return Quant(name, default, default, default, default, file_type)


QUANTS: Final[Mapping[str, Quant]] = {
    quant.name: quant
    for quant in (
        _plain("f16", "F16", 1),
        _plain("bf16", "BF16", 32),
        _plain("q8_0", "Q8_0", 7),
        _plain("q6_k", "Q6_K", 18),
        _mixed("q5_k_m", "Q5_K", "Q6_K", 17),
        _mixed("q5_1", "Q5_1", "Q5_1", 9),
        _mixed("q5_0", "Q5_0", "Q5_0", 8),
        _mixed("q4_k_m", "Q4_K", "Q6_K", 15),
        _mixed("q4_1", "Q4_1", "Q4_1", 3),
        _mixed("q4_0", "Q4_0", "Q4_0", 2),
        Quant("mxfp4", "Q8_0", "Q8_0", "Q8_0", "MXFP4", 38),
    )
}
NATIVE: Final = "native"
"""As the publisher's own converter writes it, for geometries that say so."""
NATIVE_FILE_TYPE: Final = 38

VALUE_LIKE: Final = ("attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight")
KEPT: Final = ("_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d")
"""In the names of matrices that stay F32."""
TABLES: Final = ("token_embd.weight", "per_layer_token_embd.weight")
NARROW: Final = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""256 weights to a block -> what stands in where a row is no multiple of them."""
LONG_BLOCK: Final = 256
SHORT_BLOCK: Final = 32


def quants_of(geometry: Geometry) -> tuple[str, ...]:
    """The quantizations a geometry can be had in."""
    return (*QUANTS, *((NATIVE,) if geometry.native else ()))


def check_quant(geometry: Geometry, quant: str) -> None:
    """Raises UsageError for a quantization this geometry has not."""
    if quant not in quants_of(geometry):
        known = ", ".join(quants_of(geometry))
        raise UsageError(f"Quantization {quant!r} of {geometry.name!r} is unknown. Choose one of {known}.")


def file_type(quant: str) -> int:
    """`general.file_type` of a file of that quantization."""
    return QUANTS[quant].file_type if quant in QUANTS else NATIVE_FILE_TYPE


def formats_of(geometry: Geometry, quant: str) -> dict[str, str]:
    """Tensor name -> block format. Raises UsageError for a quantization this geometry has not."""
    check_quant(geometry, quant)
    if quant == NATIVE:
        patterns = {**geometry.formats, **geometry.native}
        return {name: _matching(patterns, name) or "F32" for name in geometry.shapes}
    chosen = _Chooser(geometry, QUANTS[quant])
    return {name: _matching(geometry.formats, name) or chosen(name) for name in geometry.shapes}


def sizes(geometry: Geometry) -> dict[str, int]:
    """Bytes of all tensors, by quantization."""
    return {quant: num_bytes(geometry, quant) for quant in quants_of(geometry)}


def num_bytes(geometry: Geometry, quant: str) -> int:
    """Bytes of all tensors, without what aligns them."""
    formats = formats_of(geometry, quant)
    return sum(
        prod(shape[:-1]) * FORMATS.by_name(formats[name]).row_bytes(shape[-1])
        for name, shape in geometry.shapes.items()
    )


def wider_layer(number: int, count: int) -> bool:
    """Whether a mixture spends more bits there: the first and last eighth, every third of those between."""
    eighth = count // 8
    return number < eighth or number >= 7 * count // 8 or (number - eighth) % 3 == 2


class _Chooser:
    """The rule for one file; asked in the file's order."""

    def __init__(self, geometry: Geometry, quant: Quant) -> None:
        self.shapes = geometry.shapes
        self.quant = quant
        self.heads = ("output.weight",) if "output.weight" in geometry.shapes else TABLES
        self.values = [name for name in geometry.shapes if name.endswith(VALUE_LIKE)]
        self.blocks = 1 + max((_block(name) for name in geometry.shapes), default=-1)

    def __call__(self, name: str) -> str:
        shape = self.shapes[name]
        if not name.endswith(".weight") or num_dims(shape) < 2 or any(part in name for part in KEPT):
            return "F32"
        return fitting(self._by_role(name), shape[-1])

    def _by_role(self, name: str) -> str:
        quant = self.quant
        if name in self.heads:
            return quant.head
        if "_exps." in name and quant.stacks != quant.default:
            return quant.stacks
        if name.endswith(VALUE_LIKE):
            wider = wider_layer(self.values.index(name), len(self.values))
        else:
            wider = "ffn_down" in name and wider_layer(_block(name), self.blocks)
        return quant.wider if wider else quant.default


def fitting(block_format: str, row: int) -> str:
    """The format, or what stands in for it in rows of so many weights."""
    if row % LONG_BLOCK and block_format in NARROW:
        block_format = NARROW[block_format]
    unblocked = block_format in ("F32", "F16", "BF16")
    return "F16" if row % SHORT_BLOCK and not unblocked else block_format


def num_dims(shape: Sequence[int]) -> int:
    """As GGML counts them: leading ones are none."""
    kept = list(shape)
    while len(kept) > 1 and kept[0] == 1:
        del kept[0]
    return len(kept)


def _block(name: str) -> int:
    """The number in `blk.N.`; -1 without."""
    part = name.split(".")
    return int(part[1]) if part[0] == "blk" else -1


def _matching(patterns: Mapping[str, str], name: str) -> str | None:
    return next((patterns[pattern] for pattern in patterns if fnmatchcase(name, pattern)), None)
