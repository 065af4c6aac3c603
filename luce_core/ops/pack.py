"""The reference of weight packing: everything as f32. Slow, large, exact: the oracle of every other tier.

A layer that packs differently overrides these together with `linear` and `table_rows`, the two ops that
read packed weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from luce_core.contracts import Linear, RawLinear
from luce_core.gguf import FORMATS
from luce_core.ops.namespace import Layer


def pack_linear(ops: Any, raw: RawLinear) -> Tensor:
    """-> f32[out, in], a copy of its own on `raw.device`."""
    weights = FORMATS.by_name(raw.format).dequantize(raw.data)
    if not weights.flags.writeable or weights.base is not None:  # a view of the mapped file
        weights = np.array(weights)
    return torch.from_numpy(weights).to(raw.device)


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
    "pack_linear": pack_linear,
    "pack_group": pack_group,
    "linear": linear,
    "table_rows": table_rows,
}
