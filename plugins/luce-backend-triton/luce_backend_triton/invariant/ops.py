"""Op layers `triton-invariant` and `triton-invariant-portable`: the ops of `luce_backend_triton.ops` on
products whose sums have one order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from luce_backend_triton import ops as plain
from luce_backend_triton.few_floats import Behind
from luce_backend_triton.few_rows import ALONE, Beside
from luce_backend_triton.invariant.products import multiply
from luce_backend_triton.matrix import Dense, Matrix
from luce_backend_triton.product import Rows
from luce_core.contracts import Norm


class Layer(plain.Layer):
    """The ops of one layer. cuda: packed weights are multiplied by CUDA C++."""

    gates = False

    def _product(
        self, ops: Any, rows: Rows, packed: Matrix | Dense, behind: Behind, beside: Beside = ALONE
    ) -> Tensor:
        """Every product is launched alone."""
        return multiply(packed, rows, self.cuda, behind)

    def rms(self, ops: Any, x: Tensor, norm: Norm) -> Tensor:
        """weight · x / sqrt(mean(x²) + eps) over the last axis, f32: one program a row, where torch shares
        rows out by their number.
        """
        flat = x.float().reshape(-1, x.shape[-1])
        if not flat.shape[0]:
            return torch.empty_like(x, dtype=torch.float32)
        return Rows(flat.contiguous(), norm).dense(torch.float32, 1)[0].view(x.shape)

    head_rms = rms


CUDA = Layer(cuda=True)
PORTABLE = Layer(cuda=False)

__all__ = ["CUDA", "PORTABLE", "Layer"]
