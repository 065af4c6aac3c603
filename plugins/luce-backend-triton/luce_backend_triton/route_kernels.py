# Triton compiles these functions: no annotations, no conditional expressions.
# ruff: noqa: ANN001, ANN201, SIM102
"""Triton kernels of the op `route`: logits of few rows, and the choice of experts. All f32."""

from __future__ import annotations

import triton
import triton.language as tl

from luce_backend_triton.kernels import integer_columns, store_integers

LOWEST = tl.constexpr(-(2**31))


@triton.jit(do_not_specialize=["rows"])
def logits(
    x, norm, w, out, ready32, ready8, rows, count, width, ldx, eps,
    NORM: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, READY: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """TILE experts of ROWS rows, in turn: w · norm(x). Grid (rows / ROWS, experts / TILE).

    WHOLE: at least the width. READY: as many programs more as norm(x) has blocks of 256 columns make it ready
    for csrc/gemv.cu; ready32, ready8: views of the same u8[blocks, rows, 576].
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    expert = tl.program_id(1) * TILE + tl.arange(0, TILE)
    c = tl.arange(0, WHOLE)
    inside = c < width
    at = w + expert[:, None].to(tl.int64) * width + c[None, :]
    weights = tl.load(at, mask=(expert < count)[:, None] & inside[None, :], other=0.0)
    if NORM:
        gains = tl.load(norm + c, mask=inside, other=0.0)
    if READY:
        block = tl.program_id(1) - (count + TILE - 1) // TILE
        column = integer_columns(block)
        mine = (block >= 0) & (column < width)
        if NORM:
            own_gains = tl.load(norm + column, mask=mine, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for step in range(ROWS):
        row = first + step
        if row < rows:
            v = tl.load(x + row * ldx + c, mask=inside, other=0.0)
            if READY:
                own = tl.load(x + row * ldx + column, mask=mine, other=0.0)
            if NORM:
                inverse = 1 / tl.sqrt(tl.sum(v * v, 0) / width + eps)
                v = v * inverse * gains
                if READY:
                    own = own * inverse * own_gains
            if READY:
                if block >= 0:
                    store_integers(own, ready32, ready8, block * rows + row)
            tl.store(out + row * count + expert, tl.sum(weights * v[None, :], 1), mask=expert < count)


@triton.jit
def pick(
    logits, bias, parent, ids, weight, count, scale,
    K: tl.constexpr, X: tl.constexpr, SOFTMAX: tl.constexpr, BIAS: tl.constexpr, RENORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The K best of one row and their scores; the lower id where two are alike. X: at least the count."""
    row = tl.program_id(0).to(tl.int64)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    e = tl.arange(0, X)
    inside = e < count
    v = tl.load(logits + row * count + e, mask=inside, other=-float("inf"))
    padding = tl.load(parent + row) == -2
    if SOFTMAX:
        score = tl.exp(v - tl.max(v, 0))
        score = score / tl.sum(score, 0)
    else:
        score = 1 / (1 + tl.exp(tl.minimum(-v, 80.0)))
    by = score
    if BIAS:
        by = score + tl.load(bias + e, mask=inside, other=0.0)
    # As integers of the same order, which a warp compares in one instruction.
    order = by.to(tl.int32, bitcast=True)
    order = tl.where(inside, order ^ ((order >> 31) & 0x7FFFFFFF), LOWEST)
    bits = score.to(tl.int32, bitcast=True)
    j = tl.arange(0, triton.next_power_of_2(K))
    chosen = tl.zeros_like(j)
    share = tl.zeros_like(j)
    for place in tl.static_range(K):
        top = tl.max(order, 0)
        best = tl.min(tl.where(order == top, e, X - 1), 0)
        chosen = tl.where(j == place, best, chosen)
        if BIAS:
            top = tl.max(tl.where(e == best, bits, 0), 0)
        share = tl.where(j == place, top, share)
        order = tl.where(e == best, LOWEST, order)
    share = share.to(tl.float32, bitcast=True)
    if RENORM:
        share = share / (tl.sum(share, 0) + 1e-20)
    chosen = tl.where(padding, -1, chosen)
    share = tl.where(padding, 0.0, share * scale)
    tl.store(ids + row * K + j, chosen, mask=j < K)
    tl.store(weight + row * K + j, share, mask=j < K)
