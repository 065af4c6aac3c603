# Triton compiles these functions: no annotations, no conditional expressions.
# ruff: noqa: ANN001, ANN201, PLR0915, SIM102
"""Triton kernels of what stands in front of a softmax over pages: where entries lie; head norms, RoPE and
append.
"""

from __future__ import annotations

import triton
import triton.language as tl

from luce_backend_triton.codec_kernels import store_vectors, turn
from luce_backend_triton.waiting import let_next_start, wait_only

# --- where things lie


@triton.jit
def column_of(first, count, token, BLOCK: tl.constexpr):
    """The last column of a rising table whose first token is at most `token`; -1 before all of them.

    Blocks at the end of a table mostly follow each other, so that one is guessed first.
    """
    newest = tl.load(first + count - 1)
    behind = tl.maximum(newest + BLOCK - 1 - token, 0) // BLOCK
    low = tl.maximum(count - 1 - behind, 0)
    found = tl.load(first + low)
    if (found > token) | ((found + BLOCK <= token) & (low < count - 1)):
        low = count * 0
        high = count
        while low < high:
            middle = (low + high) // 2
            if tl.load(first + middle) <= token:
                low = middle + 1
            else:
                high = middle
        low = low - 1
    return low


@triton.jit
def places_below(first, count, token, BLOCK: tl.constexpr):
    """How many places of a table hold a token index below `token`."""
    column = column_of(first, count, token - 1, BLOCK)
    begun = tl.load(first + tl.maximum(column, 0))
    return tl.where(column < 0, 0, column * BLOCK + tl.minimum(BLOCK, token - begun))


@triton.jit
def tile_of(program, query_start, num_seqs, RT: tl.constexpr, SB: tl.constexpr):
    """Sequence and first row (of the batch) of the program-th tile of RT rows; a sequence beyond: nothing."""
    if SB == 1:
        seq = program * 0
        row = tl.load(query_start) + program * RT
    else:
        s = tl.arange(0, SB)
        start = tl.load(query_start + s, mask=s < num_seqs, other=0)
        stop = tl.load(query_start + s + 1, mask=s < num_seqs, other=0)
        tiles = (stop - start + RT - 1) // RT
        until = tl.cumsum(tiles, 0)
        seq = tl.sum((until <= program).to(tl.int32), 0)
        row = tl.sum(tl.where(s == seq, start + (program - until + tiles) * RT, 0), 0)
    return seq, row


# --- queries, keys and values


@triton.jit
def turning_of(
    d, position, axis, axis_stride, frequency, magnitude,
    ROPE: tl.constexpr, START: tl.constexpr, HALF: tl.constexpr, HALVES: tl.constexpr, AXES: tl.constexpr,
):  # fmt: skip
    """How RoPE turns features d [n] at a position: with which others, which at all, cosines, and sines with
    the sign that the others take.
    """
    if ROPE:
        r = d - START
        turning = (r >= 0) & (r < 2 * HALF)
        if HALVES:
            j = tl.where(r < HALF, r, r - HALF)
            other = tl.where(r < HALF, d + HALF, d - HALF)
            minus = r < HALF
        else:
            j = r // 2
            other = START + (r ^ 1)
            minus = (r & 1) == 0
        if AXES:
            at = tl.load(axis + j, mask=turning, other=0)
            turn = tl.load(position + at * axis_stride, mask=turning, other=0).to(tl.float32)
        else:
            turn = tl.load(position).to(tl.float32)
        angle = turn * tl.load(frequency + j, mask=turning, other=0.0)
        sine = tl.sin(angle) * magnitude
        return other, turning, (tl.cos(angle) * magnitude)[None, :], tl.where(minus, -sine, sine)[None, :]
    else:
        return d, d < 0, d, d


@triton.jit
def features(x, d, dim, live):
    """f32: features d < dim of heads x (pointers [heads, 1])."""
    return tl.load(x + d, mask=live & (d < dim), other=0.0).to(tl.float32)


@triton.jit
def weights_of(weight, d, other, turning, dim, NORM: tl.constexpr, ROPE: tl.constexpr):
    """Of a norm: for features d [n], and for those they are turned with."""
    own, theirs = 1.0, 1.0
    if NORM:
        own = tl.load(weight + d, mask=d < dim, other=0.0)[None, :]
        if ROPE:
            theirs = tl.load(weight + other, mask=turning, other=0.0)[None, :]
    return own, theirs


@triton.jit
def turned(
    v, x, own, theirs, dim, eps, other, turning, cosine, sine, live, NORM: tl.constexpr, ROPE: tl.constexpr
):
    """`features` v of heads x, normed with what `weights_of` gave, turned as `turning_of` said."""
    if NORM:
        inverse = 1 / tl.sqrt(tl.sum(v * v, 1)[:, None] / dim + eps)
        v = v * inverse * own
    if ROPE:
        turning = turning[None, :]
        u = tl.load(x + other[None, :], mask=live & turning, other=0.0).to(tl.float32)
        if NORM:
            u = u * inverse * theirs
        v = tl.where(turning, v * cosine + u * sine, v)
    return v


@triton.jit
def entry_at(block, first, count, token, BLOCK: tl.constexpr):
    """The entry (i64) of a token in a table; -1 where it has none."""
    entry = tl.full((), -1, tl.int64)
    if count > 0:
        column = column_of(first, count, token, BLOCK)
        offset = token - tl.load(first + tl.maximum(column, 0))
        if (column >= 0) & (offset < BLOCK):
            entry = tl.load(block + column).to(tl.int64) * BLOCK + offset
    return entry


@triton.jit
def write_vectors(
    pages, scales, y, at, d, live, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr,
    CODEC: tl.constexpr, GROUP: tl.constexpr, TURN: tl.constexpr, BYTES: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """y f32[ROWS, COLS] to the vectors numbered `at` [ROWS, 1], as pages keep them."""
    if CODEC != "":
        to = scales + at * (BYTES // 2) + SCALES
        store_vectors(pages + at * BYTES, to, y, live, ROWS, COLS, WIDTH, CODEC, GROUP, TURN)
    else:
        tl.store(pages + at * WIDTH + d, y.to(pages.dtype.element_ty), mask=live & (d < WIDTH))


@triton.jit(do_not_specialize=["num_seqs", "axis_stride", "row_stride", "table_stride"])
def make_rows(
    q, k, v, turned_q, pages_k, pages_v, scales_k, scales_v, q_weight, k_weight, v_weight, position, axis,
    frequency,
    seq, index, query_start, length, parent, block, first, count, num_seqs,
    ldq, hdq, ldk, ldv, axis_stride, row_stride, table_stride, q_eps, k_eps, v_eps, magnitude,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, HB: tl.constexpr,
    BLOCK: tl.constexpr, HELD: tl.constexpr, WRITE: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    V_NORM: tl.constexpr, ROPE: tl.constexpr, START: tl.constexpr, HALF: tl.constexpr, HALVES: tl.constexpr,
    AXES: tl.constexpr, KC: tl.constexpr, KG: tl.constexpr, KT: tl.constexpr, KB: tl.constexpr,
    KS: tl.constexpr, VC: tl.constexpr, VG: tl.constexpr, VT: tl.constexpr, VB: tl.constexpr,
    VS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row, HB heads of q (hdq apart), or of k, or of v: norm, RoPE; k and v go to the row's entry.

    Grid (rows, groups of q, then of k, then of v).
    """
    let_next_start(OVERLAP)
    row, part = tl.program_id(0), tl.program_id(1)
    groups: tl.constexpr = (H + HB - 1) // HB
    groups_kv: tl.constexpr = (HK + HB - 1) // HB
    n = tl.arange(0, DP)
    d = n[None, :]
    at = position + row * row_stride
    other, turning, cosine, sine = turning_of(
        n, at, axis, axis_stride, frequency, magnitude, ROPE, START, HALF, HALVES, AXES
    )
    entry = tl.full((), -1, tl.int64)
    if WRITE:
        if part >= groups:
            s = tl.load(seq + row)
            if HELD:
                token = tl.load(length + s) + row - tl.load(query_start + s)
                live = tl.load(parent + row) != -2
            else:
                token = tl.load(index + row)
                live = row < tl.load(query_start + num_seqs)
            if live:
                used = tl.load(count + s)
                entry = entry_at(block + s * table_stride, first + s * table_stride, used, token, BLOCK)
    wait_only(OVERLAP)
    if part < groups:
        h = part * HB + tl.arange(0, HB)[:, None]
        x = q + row.to(tl.int64) * ldq + tl.minimum(h, H - 1) * hdq
        y = features(x, d, D, h < H)
        q_own, q_theirs = weights_of(q_weight, n, other, turning, D, Q_NORM, ROPE)
        y = turned(y, x, q_own, q_theirs, D, q_eps, other, turning, cosine, sine, h < H, Q_NORM, ROPE)
        if KC != "":
            y = turn(y, HB, DP, KT)
        to = turned_q + (row.to(tl.int64) * H + h) * D + d
        tl.store(to, y.to(turned_q.dtype.element_ty), mask=(h < H) & (d < D))
    elif entry >= 0:
        if part < groups + groups_kv:
            h = (part - groups) * HB + tl.arange(0, HB)[:, None]
            k_x = k + row.to(tl.int64) * ldk + tl.minimum(h, HK - 1) * D
            k_y = features(k_x, d, D, h < HK)
            k_own, k_theirs = weights_of(k_weight, n, other, turning, D, K_NORM, ROPE)
            k_y = turned(
                k_y, k_x, k_own, k_theirs, D, k_eps, other, turning, cosine, sine, h < HK, K_NORM, ROPE
            )
            write_vectors(pages_k, scales_k, k_y, entry * HK + h, d, h < HK, HB, DP, D, KC, KG, KT, KB, KS)
        else:
            h = (part - groups - groups_kv) * HB + tl.arange(0, HB)[:, None]
            v_x = v + row.to(tl.int64) * ldv + tl.minimum(h, HK - 1) * DV
            v_y = features(v_x, d, DV, h < HK)
            v_own, v_theirs = weights_of(v_weight, n, n, turning, DV, V_NORM, False)
            v_y = turned(v_y, v_x, v_own, v_theirs, DV, v_eps, n, turning, n, n, h < HK, V_NORM, False)
            write_vectors(pages_v, scales_v, v_y, entry * HK + h, d, h < HK, HB, DP, DV, VC, VG, VT, VB, VS)
