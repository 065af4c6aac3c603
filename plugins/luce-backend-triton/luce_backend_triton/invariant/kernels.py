# Triton compiles these functions: no annotations, no conditional expressions.
# ruff: noqa: ANN001, ANN201
"""A product with weights that are floats, cut alike for any number of rows."""

from __future__ import annotations

import triton
import triton.language as tl

from luce_backend_triton.kernels import DOT_F32


@triton.jit(do_not_specialize=["m"])
def linear_floats(
    x, factors, w, y, scale, bias, residual, m, n, k, ldr, ldy,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, M: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """y = x Wᵀ · scale + bias + residual, M rows of x and ROWS of W. x [m, k] of W's type · factors[m].

    Grid (rows of W / ROWS, rows of x / M). Sums go along k, DEPTH columns at a time.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    who = tl.program_id(1) * M + tl.arange(0, M)
    inside, live, column = row < n, who < m, tl.arange(0, DEPTH)
    from_x = x + who[:, None].to(tl.int64) * k + column[None, :]
    from_w = w + row[None, :].to(tl.int64) * k + column[:, None]
    total = tl.zeros((M, ROWS), tl.float32)
    for base in range(0, k, DEPTH):
        here = base + column < k
        given = tl.load(from_x + base, mask=live[:, None] & here[None, :], other=0.0)
        weights = tl.load(from_w + base, mask=inside[None, :] & here[:, None], other=0.0)
        if DOT_F32:
            total += tl.dot(given.to(tl.float32), weights.to(tl.float32), input_precision="ieee")
        else:
            total += tl.dot(given, weights, input_precision="ieee")
    total *= tl.load(factors + who, mask=live, other=0.0)[:, None]
    if HAS_SCALE:
        total *= tl.load(scale)
    if HAS_BIAS:
        total += tl.load(bias + row, mask=inside, other=0.0)[None, :]
    both = live[:, None] & inside[None, :]
    if HAS_RESIDUAL:
        total += tl.load(residual + who[:, None].to(tl.int64) * ldr + row[None, :], mask=both, other=0.0)
    tl.store(y + who[:, None].to(tl.int64) * ldy + row[None, :], total, mask=both)
