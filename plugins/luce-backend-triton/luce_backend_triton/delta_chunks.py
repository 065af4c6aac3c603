# Triton compiles these functions: no annotations, no conditional expressions.
# ruff: noqa: ANN001, ANN201
"""Triton kernels of Gated DeltaNet over prompts, in chunks (arXiv 2412.06464): five launches a layer.

q, k and v by convolution; of every chunk the triangular system, solved for what does not depend on the state;
the states, chunk after chunk; then all outputs. The window of the convolution is moved on last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from luce_backend_triton.attention_kernels import product
from luce_backend_triton.delta_kernels import gated_norm, inverse_of, log_decay, sigmoid, silu, unit
from luce_backend_triton.row_kernels import tile_of


@triton.jit(do_not_specialize=["num_rows"])
def convolve(
    x, q, k, v, window, taps, seq, query_start, slots, num_rows, ldx, unit_eps, q_scale,
    KH: tl.constexpr, VH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr,
    RT: tl.constexpr, KERNEL: tl.constexpr,
):  # fmt: skip
    """RT rows, one head of q, of k or of v: convolution and SiLU; q and k over their norm.

    Grid (rows / RT, heads of q, then of k, then of v).
    """
    C: tl.constexpr = 2 * KH * DK + VH * DV
    head = tl.program_id(1)
    row = tl.program_id(0) * RT + tl.arange(0, RT)[:, None]
    live = row < num_rows
    d = tl.arange(0, DP)[None, :]
    of_v = head >= 2 * KH
    wide = tl.where(of_v, DV, DK)
    channel = tl.where(of_v, 2 * KH * DK + (head - 2 * KH) * DV, head * DK) + d
    inside = d < wide
    s = tl.load(seq + row, mask=live, other=0)
    since = row - tl.load(query_start + s, mask=live, other=0)
    past = window + tl.load(slots + s, mask=live, other=0).to(tl.int64) * ((KERNEL - 1) * C)
    total = tl.zeros((RT, DP), tl.float32)
    for back in tl.static_range(KERNEL):
        tap = tl.load(taps + channel * KERNEL + (KERNEL - 1 - back), mask=inside, other=0.0)
        here = since >= back
        at = x + (row - back).to(tl.int64) * ldx + channel
        given = tl.load(at, mask=live & inside & here, other=0.0).to(tl.float32)
        if back > 0:
            kept = past + (KERNEL - 1 + since - back) * C + channel
            given += tl.load(kept, mask=live & inside & (since < back), other=0.0)
        total += tap * given
    total = silu(total)
    both = live & inside
    at = row.to(tl.int64)
    if of_v:
        to = v + (at * VH + head - 2 * KH) * DV + d
        tl.store(to, total.to(v.dtype.element_ty), mask=both)
    elif head >= KH:
        to = k + (at * KH + head - KH) * DK + d
        tl.store(to, unit(total, unit_eps).to(k.dtype.element_ty), mask=both)
    else:
        to = q + (at * KH + head) * DK + d
        tl.store(to, (unit(total, unit_eps) * q_scale).to(q.dtype.element_ty), mask=both)


@triton.jit
def move_window(x, window, query_start, slots, ldx, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The window of every sequence becomes its newest ROWS rows. Grid (sequences, blocks of columns)."""
    s = tl.program_id(0)
    start, stop = tl.load(query_start + s), tl.load(query_start + s + 1)
    rows = stop - start
    if rows <= 0:
        return
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    state = window + tl.load(slots + s).to(tl.int64) * (ROWS * width)
    for n in range(ROWS):
        taken = rows + n - ROWS
        if taken >= 0:
            row = tl.load(x + (start + taken).to(tl.int64) * ldx + c, mask=c < width).to(tl.float32)
        else:
            row = tl.load(state + (n + rows) * width + c, mask=c < width)
        tl.store(state + n * width + c, row, mask=c < width)


@triton.jit(do_not_specialize=["num_seqs"])
def solve(
    k, v, beta, decay, w, u, sums, a, dt, query_start, num_seqs, ldbeta, lddecay,
    KH: tl.constexpr, VH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr,
    DVP: tl.constexpr, CHUNK: tl.constexpr, SB: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """One chunk, one value head: w and u, with which the state's part is u - w M; sums: log decays so far.

    Grid (chunks, value heads).
    """
    seq, row0 = tile_of(tl.program_id(0), query_start, num_seqs, CHUNK, SB)
    if seq >= num_seqs:
        return
    stop = tl.load(query_start + seq + 1)
    if row0 >= stop:
        return
    h = tl.program_id(1)
    i, c, d = tl.arange(0, CHUNK), tl.arange(0, DKP), tl.arange(0, DVP)
    row = (row0 + i).to(tl.int64)
    live = row0 + i < stop
    raw = tl.load(decay + row * lddecay + h, mask=live, other=0.0).to(tl.float32) + tl.load(dt + h)
    g = tl.where(live, log_decay(raw, tl.load(a + h), 0.0, False), 0.0)
    step = sigmoid(tl.load(beta + row * ldbeta + h, mask=live, other=0.0).to(tl.float32))
    step = tl.where(live, step, 0.0)
    total = tl.cumsum(g, 0)
    tl.store(sums + row * VH + h, total, mask=live)
    in_k, in_v = live[:, None] & (c < DK)[None, :], live[:, None] & (d < DV)[None, :]
    key = tl.load(k + (row[:, None] * KH + h % KH) * DK + c[None, :], mask=in_k, other=0.0)
    met = product(key, tl.trans(key))
    above = i[:, None] > i[None, :]
    between = tl.exp(tl.where(above, total[:, None] - total[None, :], -float("inf")))
    inverse = inverse_of(-met * between * step[:, None], CHUNK, PRECISE)
    inverse *= step[None, :]
    part = product((inverse * tl.exp(total)[None, :]).to(key.dtype), key)
    tl.store(w + (row[:, None] * VH + h) * DK + c[None, :], part.to(w.dtype.element_ty), mask=in_k)
    value = tl.load(v + (row[:, None] * VH + h) * DV + d[None, :], mask=in_v, other=0.0)
    part = product(inverse.to(value.dtype), value)
    tl.store(u + (row[:, None] * VH + h) * DV + d[None, :], part.to(u.dtype.element_ty), mask=in_v)


@triton.jit(do_not_specialize=["num_seqs"])
def carry(
    k, w, u, sums, states, memory, query_start, slots, num_seqs,
    KH: tl.constexpr, VH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr,
    DVB: tl.constexpr, CHUNK: tl.constexpr, SB: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One sequence, value head and block of Dv: the state from chunk to chunk, kept in `states` before each.

    u becomes u - w M. Grid (blocks of Dv, value heads, sequences).
    """
    h, seq = tl.program_id(1), tl.program_id(2)
    start, stop = tl.load(query_start + seq), tl.load(query_start + seq + 1)
    if start >= stop:
        return
    before = tl.load(query_start) * 0
    if SB > 1:
        s = tl.arange(0, SB)
        earlier = tl.load(query_start + s + 1, mask=s < seq, other=0) - tl.load(
            query_start + s, mask=s < seq, other=0
        )
        before = tl.sum((earlier + CHUNK - 1) // CHUNK, 0)
    i, c, d = tl.arange(0, CHUNK), tl.arange(0, DKP), tl.program_id(0) * DVB + tl.arange(0, DVB)
    square = (c < DK)[:, None] & (d < DV)[None, :]
    within = c[:, None] * DV + d[None, :]
    home = memory + (tl.load(slots + seq).to(tl.int64) * VH + h) * (DK * DV) + within
    m = tl.load(home, mask=square, other=0.0)
    total = tl.load(sums + (start + i).to(tl.int64) * VH + h, mask=start + i < stop, other=0.0)
    last = tl.load(sums + (tl.minimum(start + CHUNK, stop) - 1).to(tl.int64) * VH + h)
    for chunk in tl.range(0, (stop - start + CHUNK - 1) // CHUNK, num_stages=STAGES):
        to = states + ((before + chunk).to(tl.int64) * VH + h) * (DK * DV) + within
        first = start + chunk * CHUNK
        row = (first + i).to(tl.int64)
        live = first + i < stop
        in_k, in_v = live[:, None] & (c < DK)[None, :], live[:, None] & (d < DV)[None, :]
        key = tl.load(k + (row[:, None] * KH + h % KH) * DK + c[None, :], mask=in_k, other=0.0)
        read = tl.load(w + (row[:, None] * VH + h) * DK + c[None, :], mask=in_k, other=0.0)
        made = tl.load(u + (row[:, None] * VH + h) * DV + d[None, :], mask=in_v, other=0.0)
        left = tl.where(live, tl.exp(last - total), 0.0)
        whole = tl.exp(last)
        # Of the next chunk: these loads are too small to be moved ahead by the compiler.
        later = first + CHUNK
        total = tl.load(sums + (later + i).to(tl.int64) * VH + h, mask=later + i < stop, other=0.0)
        last = tl.load(sums + (tl.minimum(later + CHUNK, stop) - 1).to(tl.int64) * VH + h)
        # The state becomes an operand between the arrival of `made` and the product: see `product`.
        kept = made.to(tl.float32)
        half = m.to(states.dtype.element_ty)
        made = (kept - product(read, half)).to(key.dtype)
        tl.store(to, half, mask=square)
        tl.store(u + (row[:, None] * VH + h) * DV + d[None, :], made, mask=in_v)
        m = m * whole + product(tl.trans(key), (made.to(tl.float32) * left[:, None]).to(key.dtype))
    tl.store(home, m, mask=square)


@triton.jit(do_not_specialize=["num_seqs"])
def emit(
    q, k, u, sums, states, z, norm, out, query_start, num_seqs, ldz, norm_eps,
    KH: tl.constexpr, VH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr,
    DVP: tl.constexpr, CHUNK: tl.constexpr, SB: tl.constexpr,
):  # fmt: skip
    """One chunk, one value head: outputs, normed and gated. Grid (chunks, value heads)."""
    seq, row0 = tile_of(tl.program_id(0), query_start, num_seqs, CHUNK, SB)
    if seq >= num_seqs:
        return
    stop = tl.load(query_start + seq + 1)
    if row0 >= stop:
        return
    h = tl.program_id(1)
    i, c, d = tl.arange(0, CHUNK), tl.arange(0, DKP), tl.arange(0, DVP)
    row = (row0 + i).to(tl.int64)
    live = row0 + i < stop
    in_k, in_v = live[:, None] & (c < DK)[None, :], live[:, None] & (d < DV)[None, :]
    at_k = (row[:, None] * KH + h % KH) * DK + c[None, :]
    query = tl.load(q + at_k, mask=in_k, other=0.0)
    key = tl.load(k + at_k, mask=in_k, other=0.0)
    total = tl.load(sums + row * VH + h, mask=live, other=0.0)
    met = product(query, tl.trans(key))
    within = (i[:, None] >= i[None, :]) & live[None, :]
    met = met * tl.exp(tl.where(within, total[:, None] - total[None, :], -float("inf")))
    from_m = states + (tl.program_id(0).to(tl.int64) * VH + h) * (DK * DV) + c[:, None] * DV + d[None, :]
    m = tl.load(from_m, mask=(c < DK)[:, None] & (d < DV)[None, :], other=0.0)
    y = product(query, m) * tl.exp(total)[:, None]
    made = tl.load(u + (row[:, None] * VH + h) * DV + d[None, :], mask=in_v, other=0.0)
    y += product(met.to(key.dtype), made)
    gate = tl.load(z + row[:, None] * ldz + h * DV + d[None, :], mask=in_v, other=0.0).to(tl.float32)
    y = gated_norm(y, gate, norm, d, norm_eps, DV, False)
    tl.store(out + (row[:, None] * VH + h) * DV + d[None, :], y, mask=in_v)
