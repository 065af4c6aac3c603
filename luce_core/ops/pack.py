"""The reference of weight packing: everything as f32. Slow, large, exact: the oracle of every other tier.

A layer that packs differently overrides these together with `linear` and `table_rows`, the two ops that
read packed weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from luce_core.contracts import Linear, RawLinear
from luce_core.gguf import FORMATS, FormatRegistry
from luce_core.ops.namespace import Implementation, Layer


def dequantizer(formats: FormatRegistry) -> Implementation:
    """The op "dequantize" over these formats: (name, u8[..., row_bytes]) -> new f32[..., row], both numpy.

    The loader lays one over the reference that knows the formats of installed plugins too.
    """

    def dequantize(ops: Any, name: str, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        return formats.by_name(name).dequantize(data)

    return dequantize


def pack_linear(ops: Any, raw: RawLinear) -> Tensor:
    """-> f32[out, in] on `raw.device`."""
    return torch.from_numpy(ops.dequantize(raw.format, raw.data)).to(raw.device)


def pack_group(ops: Any, members: tuple[Linear, ...]) -> None:
    """The reference runs members one by one."""


def linear(ops: Any, x: Tensor, w: Linear) -> Tensor:
    """x [..., in] -> [..., out] = (x Wᵀ) · scale + bias."""
    if w.scale is None:
        return F.linear(x, w.packed, w.bias)
    y = F.linear(x, w.packed) * w.scale
    return y if w.bias is None else y + w.bias


def table_rows(ops: Any, table: Linear, ids: Tensor) -> Tensor:
    """Rows `ids` i32[...] of the matrix itself (no bias), times its scale -> f32[..., in]."""
    rows = F.embedding(ids, table.packed)
    return rows if table.scale is None else rows * table.scale


OPS: Layer = {
    "dequantize": dequantizer(FORMATS),
    "pack_linear": pack_linear,
    "pack_group": pack_group,
    "linear": linear,
    "table_rows": table_rows,
}
