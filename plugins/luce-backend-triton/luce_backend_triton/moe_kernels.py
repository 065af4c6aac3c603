# Triton compiles these functions: no annotations, no conditional expressions.
# ruff: noqa: ANN001, ANN201
"""Triton kernels of mixtures of experts: pairs of row and expert, by expert, times packed or dense
weights; and the weighted sum of what they gave.
"""

from __future__ import annotations

import triton
import triton.language as tl

from luce_backend_triton.kernels import DOT_F32, decode


@triton.jit
def tile_of_expert(program, starts, X: tl.constexpr, EXPERTS: tl.constexpr, M: tl.constexpr):
    """Expert of the program-th tile of M pairs, its first place in the order, and where the expert's end."""
    e = tl.arange(0, X)
    begin = tl.load(starts + e, mask=e < EXPERTS, other=0)
    end = tl.load(starts + e + 1, mask=e < EXPERTS, other=0)
    parts = (end - begin + M - 1) // M
    until = tl.cumsum(parts, 0)
    expert = tl.sum((until <= program).to(tl.int32), 0)
    mine = e == expert
    first = tl.sum(tl.where(mine, begin + (program - until + parts) * M, 0), 0)
    return expert, first, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit
def sort_pairs(ids, lut, order, starts, pairs, STEP: tl.constexpr):
    """Program e: where pairs of expert e begin, and those pairs in their order. The last: where all end."""
    e = tl.program_id(0)
    at = tl.arange(0, STEP)
    before = 0
    for base in range(0, pairs, STEP):
        chosen = tl.load(ids + base + at, mask=base + at < pairs, other=-1)
        place = tl.where(chosen >= 0, tl.load(lut + tl.maximum(chosen, 0)), -1)
        before += tl.sum(((place >= 0) & (place < e)).to(tl.int32), 0)
    tl.store(starts + e, before)
    for base in range(0, pairs, STEP):
        chosen = tl.load(ids + base + at, mask=base + at < pairs, other=-1)
        place = tl.where(chosen >= 0, tl.load(lut + tl.maximum(chosen, 0)), -1)
        mine = (place == e).to(tl.int32)
        behind = before + tl.cumsum(mine, 0) - 1
        tl.store(order + behind, base + at, mask=mine > 0)
        before += tl.sum(mine, 0)


@triton.jit
def grouped(
    x, factors, order, starts, records, halves, table, y, n, blocks, per, tiles,
    X: tl.constexpr, EXPERTS: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, RECORD: tl.constexpr,
    CODES: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """y f32[pairs, n]: of every pair, its row of x (pair // per) times the matrix of its expert.

    order: pairs by expert; starts i32[EXPERTS + 1]: where each expert's begin. x f16[rows, 256 · blocks] ·
    factors[rows]. tiles: of 16 rows, of one expert. Grid (tiles of M pairs, ROWS rows); X: EXPERTS or more.
    """
    expert, first, stop = tile_of_expert(tl.program_id(0), starts, X, EXPERTS, M)
    if expert >= EXPERTS:
        return
    place = first + tl.arange(0, M)
    live = place < stop
    pair = tl.load(order + place, mask=live, other=0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    at = expert * (tiles * 16) + tl.minimum(row, tiles * 16 - 1)
    column = tl.arange(0, 256)
    total = tl.zeros((M, ROWS), tl.float32)
    for block in range(blocks):
        w = decode(
            records, halves, table, at, block, blocks, RECORD, CODES, BITS, TABLE, ZERO, SCALES,
        )  # fmt: skip
        from_x = x + (pair // per)[:, None] * (blocks * 256) + block * 256 + column[None, :]
        given = tl.load(from_x, mask=live[:, None], other=0.0)
        if DOT_F32:
            total += tl.dot(given.to(tl.float32), tl.trans(w), input_precision="ieee")
        else:
            total += tl.dot(given, tl.trans(w.to(tl.float16)))
    total *= tl.load(factors + pair // per, mask=live, other=0.0)[:, None]
    tl.store(y + pair[:, None] * n + row[None, :], total, mask=live[:, None] & (row < n)[None, :])


@triton.jit
def grouped_dense(
    x, factors, order, starts, w, y, n, wide, per,
    X: tl.constexpr, EXPERTS: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The same with weights as they are: w f16[EXPERTS · n, wide], wide a multiple of DEPTH."""
    expert, first, stop = tile_of_expert(tl.program_id(1), starts, X, EXPERTS, M)
    if expert >= EXPERTS:
        return
    place = first + tl.arange(0, M)
    live = place < stop
    pair = tl.load(order + place, mask=live, other=0).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < n
    column = tl.arange(0, DEPTH)
    from_x = x + (pair // per)[:, None] * wide + column[None, :]
    from_w = w + (expert.to(tl.int64) * n + row)[None, :] * wide + column[:, None]
    total = tl.zeros((M, ROWS), tl.float32)
    for base in range(0, wide, DEPTH):
        given = tl.load(from_x + base, mask=live[:, None], other=0.0)
        weights = tl.load(from_w + base, mask=inside[None, :], other=0.0)
        if DOT_F32:
            total += tl.dot(given.to(tl.float32), weights.to(tl.float32), input_precision="ieee")
        else:
            total += tl.dot(given, weights)
    total *= tl.load(factors + pair // per, mask=live, other=0.0)[:, None]
    tl.store(y + pair[:, None] * n + row[None, :], total, mask=live[:, None] & inside[None, :])


@triton.jit
def combine(
    y, ids, lut, weights, shared, x, norm, gate, residual, out, width, each, lds, ldx, ldr, eps,
    weight_stride,
    K: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Σ weight · y over the experts of a row, + shared · sigmoid(gate · n), + residual, n = norm(x).

    y [rows, each, width], each at least K.     Grid (rows, columns / COLS). WHOLE: at least the width.
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = c < width
    total = tl.zeros((COLS,), tl.float32)
    for j in tl.static_range(K):
        chosen = tl.load(ids + row * K + j)
        place = tl.load(lut + tl.maximum(chosen, 0))
        here = (chosen >= 0) & (place >= 0)
        part = tl.load(y + (row * each + j) * width + c, mask=inside & here, other=0.0)
        total += part * tl.load(weights + row * weight_stride + j)
    if SHARED:
        part = tl.load(shared + row * lds + c, mask=inside, other=0.0)
        if GATED:
            all_c = tl.arange(0, WHOLE)
            v = tl.load(x + row * ldx + all_c, mask=all_c < width, other=0.0).to(tl.float32)
            g = v * tl.load(gate + all_c, mask=all_c < width, other=0.0)
            if NORM:
                g = g * tl.load(norm + all_c, mask=all_c < width, other=0.0)
                g = g * (1 / tl.sqrt(tl.sum(v * v, 0) / width + eps))
            part = part / (1 + tl.exp(tl.minimum(-tl.sum(g, 0), 80.0)))
        total += part
    if RESIDUAL:
        total += tl.load(residual + row * ldr + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + c, total, mask=inside)
