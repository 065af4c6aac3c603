"""Op layer `cpu-torch`: no compiler needed. 4-bit weights in torch's bf16 kernel, everything else as f32.

`_weight_int4pack_mm_for_cpu` computes with w = (q - 8) · scale + zero per group of 32, scales and zeros in
bf16. Q4_0, Q4_1 and Q4_K have that structure, so only scales and activations are rounded. The product's
other types in torch are slow fallbacks, so other formats stay f32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from luce_core.contracts import Linear, RawLinear
from luce_core.gguf import FORMATS

GROUP = 32
ROW_UNIT = 16
"""Output rows come in multiples of this in torch's kernel."""

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@frozen(eq=False)
class Int4:
    """A 4-bit matrix as torch's kernel takes it, and the file's bytes for reading single rows."""

    weight: Tensor
    scale_zero: Tensor
    """bf16[in / 32, out, 2]."""
    raw: RawLinear


def pack_linear(ops: Any, raw: RawLinear) -> Int4 | Tensor:
    """4-bit formats with whole units of rows -> Int4, others f32[out, in]."""
    rows = raw.shape[0]
    if raw.format in SPLIT and rows % ROW_UNIT == 0:
        codes, scale, minimum = SPLIT[raw.format](np.ascontiguousarray(raw.data))
        zero = minimum + 8 * scale
        both = torch.from_numpy(np.stack((scale, zero), -1)).transpose(0, 1).to(torch.bfloat16).contiguous()
        weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            torch.from_numpy(codes.astype(np.int32)), 1,
        )
        return Int4(weight, both, raw)
    return torch.from_numpy(np.array(FORMATS.by_name(raw.format).dequantize(raw.data), np.float32))


def linear(ops: Any, x: Tensor, w: Linear) -> Tensor:
    """x [..., in] -> f32[..., out] = (x Wᵀ) · scale + bias."""
    packed = w.packed
    if isinstance(packed, Tensor):
        y = F.linear(x, packed)
    else:
        flat = x.reshape(-1, w.in_features).to(torch.bfloat16)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, packed.weight, GROUP, packed.scale_zero)
        y = y.float().view(*x.shape[:-1], w.out_features)
    if w.scale is not None:
        y = y * w.scale
    return y if w.bias is None else y + w.bias


def table_rows(ops: Any, table: Linear, ids: Tensor) -> Tensor:
    """Rows `ids` i32[...] of the matrix, times its scale -> f32[..., in]. Only those rows are dequantized."""
    packed = table.packed
    if isinstance(packed, Tensor):
        rows = F.embedding(ids, packed)
    else:
        picked = packed.raw.data[ids.reshape(-1).numpy()]
        floats = FORMATS.by_name(packed.raw.format).dequantize(picked)
        rows = torch.from_numpy(floats).view(*ids.shape, table.in_features)
    return rows if table.scale is None else rows * table.scale


# --- the file's blocks as codes u8[rows, cols], scale and minimum f32[rows, groups]: w = scale · code + min


def _split_q4_0(data: Bytes) -> tuple[Bytes, Floats, Floats]:
    blocks = data.reshape(len(data), -1, 18)
    scale = _halves(blocks[:, :, :2])[..., 0]
    return _nibbles(blocks[:, :, 2:]), scale, -8 * scale


def _split_q4_1(data: Bytes) -> tuple[Bytes, Floats, Floats]:
    blocks = data.reshape(len(data), -1, 20)
    both = _halves(blocks[:, :, :4])
    return _nibbles(blocks[:, :, 4:]), both[..., 0], both[..., 1]


def _split_q4_k(data: Bytes) -> tuple[Bytes, Floats, Floats]:
    blocks = data.reshape(len(data), -1, 144)
    both = _halves(blocks[:, :, :4])
    a, b, c = (blocks[:, :, start : start + 4] for start in (4, 8, 12))
    scale = np.concatenate((a & 63, (c & 15) | (a >> 2 & 48)), -1)
    minimum = np.concatenate((b & 63, (c >> 4) | (b >> 2 & 48)), -1)
    codes = _nibbles(blocks[:, :, 16:].reshape(len(data), -1, 32))
    return (
        codes,
        (both[..., :1] * scale).reshape(len(data), -1).astype(np.float32),
        (-both[..., 1:] * minimum).reshape(len(data), -1).astype(np.float32),
    )


def _halves(raw: Bytes) -> Floats:
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _nibbles(raw: Bytes) -> Bytes:
    """u8[rows, blocks, n] -> u8[rows, blocks · 2n]: the low nibbles of a block, then its high ones."""
    return np.concatenate((raw & 15, raw >> 4), -1).reshape(len(raw), -1)


SPLIT = {"Q4_0": _split_q4_0, "Q4_1": _split_q4_1, "Q4_K": _split_q4_k}
