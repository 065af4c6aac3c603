"""x Wᵀ whose sums have one order, however many rows x has."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from luce_backend_triton import capability, few_rows, product, shapes
from luce_backend_triton.few_floats import Behind
from luce_backend_triton.invariant import kernels
from luce_backend_triton.kernels import INTERPRETED
from luce_backend_triton.matrix import Dense, Matrix
from luce_backend_triton.product import Rows

PIECE = 256
"""Rows of x in a launch: partial sums of workers stay small."""
PORTABLE_ROWS = 16
"""Rows of x a program of the Triton product takes."""
FLOAT_ROWS, FLOAT_TILE, FLOAT_DEPTH = 32, 32, 64
"""Of x, of W, and columns, that a program of the product with floats takes at a time; half the rows where
Triton has no tensor cores.
"""


def multiply(packed: Matrix | Dense, rows: Rows, cuda: bool, behind: Behind) -> Tensor:
    """-> f32[m, out] = rows Wᵀ · scale + bias + residual. cuda: packed weights go through CUDA C++."""
    if isinstance(packed, Dense):
        return _floats(packed, rows, behind)
    if cuda and packed.records.is_cuda:
        device = packed.records.device
        shape = shapes.choose_any(
            packed.fmt, packed.records.shape[0], packed.blocks, shapes.room_of(device.index or 0)
        )
        if shape is not None:
            return _compiled(packed, rows, behind, *shape)
    return product.portable(packed, rows, behind, PORTABLE_ROWS)


def _compiled(matrix: Matrix, rows: Rows, behind: Behind, shape: few_rows.Shape, grid: int) -> Tensor:
    """Passes of up to 32 rows, or of one. How a launch is cut does not depend on how many are real."""
    m, residual = rows.x.shape[0], behind.residual
    y = torch.empty(m, matrix.rows, device=matrix.records.device)
    for first in range(0, m, PIECE):
        part = rows if m <= PIECE else rows.part(first, PIECE)
        few_rows.launch(
            matrix.format, matrix.records, matrix.rows, part.few(shape.kind), y[first : first + PIECE],
            shapes.narrowed(shape, part.x.shape[0]), grid, scale=behind.scale, bias=behind.bias,
            residual=None if residual is None else residual[first : first + PIECE],
        )  # fmt: skip
    return y


def _floats(dense: Dense, rows: Rows, behind: Behind) -> Tensor:
    weight = dense.weight if dense.weight.is_contiguous() else dense.weight.contiguous()
    x, factors = rows.dense(weight.dtype, 1)
    (m, k), n = x.shape, weight.shape[0]
    y = torch.empty(m, n, device=weight.device)
    if not m:
        return y
    scale, bias, residual = behind.scale, behind.bias, behind.residual
    tile = max(16, min(512, triton.next_power_of_2(n))) if INTERPRETED else FLOAT_TILE
    per = FLOAT_ROWS if capability.on(weight.device).matrix else FLOAT_ROWS // 2
    kernels.linear_floats[(-(-n // tile), -(-m // per))](
        x, factors, weight, y, y if scale is None else scale, y if bias is None else bias,
        y if residual is None else residual, m, n, k, 0 if residual is None else residual.stride(0),
        y.stride(0), HAS_SCALE=scale is not None, HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, M=per, ROWS=tile, DEPTH=FLOAT_DEPTH, num_warps=4,
        num_stages=3,
    )  # fmt: skip
    return y


__all__ = ["multiply"]
