# Triton compiles these functions: no annotations, no conditional expressions.
# ruff: noqa: ANN001, ANN201, PLR0915, PLR0912, C901
"""Triton kernels of paged attention: head norms, RoPE and append in one launch; split softmax; its sum.

Lengths, block tables and masks are read on the device. What a row sees is said in `luce_core.ops.pages`.

Keys and values may be codes (`codec_kernels`): KC and VC name the codec, "" = numbers; KG and VG are the
numbers that share a scale, KT and VT those turned together, KB and VB bytes of a vector, KS and VS how many
f16 lie in front of its scales. scales_k and scales_v are the same pages as f16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from luce_backend_triton.codec_kernels import load_vectors, numbers_of, store_vectors, turn, turn_back
from luce_backend_triton.kernels import DOT_F32

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Let the launch that follows begin, and wait for the one before: first in every kernel of a step, also
    where it finds nothing to do, so that whoever waits for it has waited for all.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """The first half of `wait_for_previous`: what stands between the halves reads nothing that a launch which
    lets the next one start has written.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_only(OVERLAP: tl.constexpr):
    """The second half. Alone, in kernels that write what others read in front of their wait: the launch that
    follows begins when all of this one is done.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


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
def turned(
    x, weight, inverse, d, dim, position, axis, axis_stride, frequency, magnitude,
    NORM: tl.constexpr, ROPE: tl.constexpr, START: tl.constexpr, HALF: tl.constexpr, HALVES: tl.constexpr,
    AXES: tl.constexpr,
):  # fmt: skip
    """Features d of heads x (pointers [heads, 1]): normed by `inverse`, then turned at the row's position."""
    v = tl.load(x + d, mask=d < dim, other=0.0).to(tl.float32)
    if NORM:
        v = v * inverse * tl.load(weight + d, mask=d < dim, other=0.0)
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
        u = tl.load(x + other, mask=turning, other=0.0).to(tl.float32)
        if NORM:
            u = u * inverse * tl.load(weight + other, mask=turning, other=0.0)
        if AXES:
            at = tl.load(axis + j, mask=turning, other=0)
            turn = tl.load(position + at * axis_stride, mask=turning, other=0).to(tl.float32)
        else:
            turn = tl.load(position).to(tl.float32)
        angle = turn * tl.load(frequency + j, mask=turning, other=0.0)
        side = u * (tl.sin(angle) * magnitude)
        v = tl.where(turning, v * (tl.cos(angle) * magnitude) + tl.where(minus, -side, side), v)
    return v


@triton.jit
def root_mean_of(x, d, dim, eps):
    """1 / sqrt(mean(x²) + eps) of heads x (pointers [heads, 1]) -> [heads, 1]."""
    v = tl.load(x + d, mask=d < dim, other=0.0).to(tl.float32)
    return 1 / tl.sqrt(tl.sum(v * v, 1)[:, None] / dim + eps)


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
    wait_for_previous(OVERLAP)
    row, part = tl.program_id(0), tl.program_id(1)
    groups: tl.constexpr = (H + HB - 1) // HB
    groups_kv: tl.constexpr = (HK + HB - 1) // HB
    d = tl.arange(0, DP)[None, :]
    at = position + row * row_stride
    if part < groups:
        h = part * HB + tl.arange(0, HB)[:, None]
        head = tl.minimum(h, H - 1)
        x = q + row.to(tl.int64) * ldq + head * hdq
        inverse = 1.0
        if Q_NORM:
            inverse = root_mean_of(x, d, D, q_eps)
        y = turned(
            x, q_weight, inverse, d, D, at, axis, axis_stride, frequency, magnitude, Q_NORM, ROPE, START,
            HALF, HALVES, AXES,
        )  # fmt: skip
        if KC != "":
            y = turn(y, HB, DP, KT)
        to = turned_q + (row.to(tl.int64) * H + h) * D + d
        tl.store(to, y.to(turned_q.dtype.element_ty), mask=(h < H) & (d < D))
    elif WRITE:
        s = tl.load(seq + row)
        if HELD:
            token = tl.load(length + s) + row - tl.load(query_start + s)
            live = tl.load(parent + row) != -2
        else:
            token = tl.load(index + row)
            live = row < tl.load(query_start + num_seqs)
        first += s * table_stride
        used = tl.load(count + s)
        if live & (used > 0):
            column = column_of(first, used, token, BLOCK)
            offset = token - tl.load(first + tl.maximum(column, 0))
            if (column >= 0) & (offset < BLOCK):
                number = tl.load(block + s * table_stride + column).to(tl.int64)
                entry = number * BLOCK + offset
                if part < groups + groups_kv:
                    h = (part - groups) * HB + tl.arange(0, HB)[:, None]
                    head = tl.minimum(h, HK - 1)
                    k_x = k + row.to(tl.int64) * ldk + head * D
                    k_inverse = 1.0
                    if K_NORM:
                        k_inverse = root_mean_of(k_x, d, D, k_eps)
                    k_y = turned(
                        k_x, k_weight, k_inverse, d, D, at, axis, axis_stride, frequency, magnitude, K_NORM,
                        ROPE, START, HALF, HALVES, AXES,
                    )  # fmt: skip
                    k_at = entry * HK + h
                    if KC != "":
                        k_scales = scales_k + k_at * (KB // 2) + KS
                        store_vectors(pages_k + k_at * KB, k_scales, k_y, h < HK, HB, DP, D, KC, KG, KT)
                    else:
                        k_y = k_y.to(pages_k.dtype.element_ty)
                        tl.store(pages_k + k_at * D + d, k_y, mask=(h < HK) & (d < D))
                else:
                    h = (part - groups - groups_kv) * HB + tl.arange(0, HB)[:, None]
                    head = tl.minimum(h, HK - 1)
                    v_x = v + row.to(tl.int64) * ldv + head * DV
                    v_inverse = 1.0
                    if V_NORM:
                        v_inverse = root_mean_of(v_x, d, DV, v_eps)
                    v_y = turned(
                        v_x, v_weight, v_inverse, d, DV, at, axis, axis_stride, frequency, magnitude, V_NORM,
                        False, 0, 0, True, False,
                    )  # fmt: skip
                    v_at = entry * HK + h
                    if VC != "":
                        v_scales = scales_v + v_at * (VB // 2) + VS
                        store_vectors(pages_v + v_at * VB, v_scales, v_y, h < HK, HB, DP, DV, VC, VG, VT)
                    else:
                        v_y = v_y.to(pages_v.dtype.element_ty)
                        tl.store(pages_v + v_at * DV + d, v_y, mask=(h < HK) & (d < DV))


# --- softmax over pages


@triton.jit
def product(a, b):
    """a @ b in f32: halves on a device, f32 where the interpreter would multiply halves wrongly.

    An operand made of registers should be made shortly before, with no reduction or change of layout between:
    Triton 3.6 puts the fence for Hopper's tensor cores right before the product, and leaves out the barrier
    behind it where one stands between the two. Rows came out wrong by that (LOG.md 2026-11-30).
    """
    if DOT_F32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def gated(y, gate, row, h, d, ldg, hdg, inside, GATE: tl.constexpr, PER_HEAD: tl.constexpr):
    """y [n, Dv] of rows `row` and heads h [n, 1] · its gate, ldg and hdg apart. GATE: 0 none, 1 sigmoid, 2
    softplus. PER_HEAD: one for all features.
    """
    if GATE != 0:
        at = gate + row.to(tl.int64) * ldg
        if PER_HEAD:
            g = tl.load(at + h * hdg + 0 * d, mask=inside, other=0.0).to(tl.float32)
        else:
            g = tl.load(at + h * hdg + d, mask=inside, other=0.0).to(tl.float32)
        if GATE == 1:
            y = y / (1 + tl.exp(-g))
        else:
            y = y * tl.where(g > 20, g, tl.log(1 + tl.exp(tl.minimum(g, 20.0))))
    return y


@triton.jit(do_not_specialize=["num_rows", "num_seqs", "words", "table_stride", "splits"])
def attend(
    q, pages_k, pages_v, scales_k, scales_v, out, parts, peaks, gate, sinks, index, query_start, length, sees,
    span, block, first, count, num_rows, num_seqs, words, table_stride, ldg, hdg, scale, cap, window, splits,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, RT: tl.constexpr, SB: tl.constexpr, BLOCK: tl.constexpr,
    HELD: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, SPAN: tl.constexpr,
    SPLIT: tl.constexpr, GATE: tl.constexpr, PER_HEAD: tl.constexpr, KC: tl.constexpr, KG: tl.constexpr,
    KT: tl.constexpr, KB: tl.constexpr, KS: tl.constexpr, VC: tl.constexpr, VG: tl.constexpr,
    VT: tl.constexpr, VB: tl.constexpr, VS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """RT rows of one sequence, the query heads of one KV head, one part of the places. The last tiles see
    most and begin first.

    Grid (tiles, KV heads, splits). out f32[T, H·Dv]; SPLIT: parts f32[splits, T, H, Dv] and peaks
    f32[splits, T, H, 2], highest score (in base 2) and sum. scale: of scores, times log2(e).
    """
    wait_for_previous(OVERLAP)
    seq, row0 = tile_of(tl.num_programs(0) - 1 - tl.program_id(0), query_start, num_seqs, RT, SB)
    if seq >= num_seqs:
        return
    start, stop = tl.load(query_start + seq), tl.load(query_start + seq + 1)
    if row0 >= stop:
        return
    kv, split = tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = H // HK
    m = tl.arange(0, M)
    row, h = row0 + m // group, kv * group + m % group
    live = (m < RT * group) & (row < stop)
    row = tl.minimum(row, stop - 1)
    d, dv = tl.arange(0, DP), tl.arange(0, DVP)
    query = tl.load(
        q + (row[:, None].to(tl.int64) * H + h[:, None]) * D + d[None, :],
        mask=live[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip
    own = tl.load(index + row)
    first += seq * table_stride
    block += seq * table_stride
    used = tl.load(count + seq)
    committed = tl.load(length + seq)
    rows = stop - start

    # The places any row of the tile sees; from `settled` on, masks are needed.
    lowest = tl.min(own, 0)
    begin, settled, end = used * 0, used * 0, used * BLOCK
    if used > 0:
        if HELD:
            end = places_below(first, used, committed + rows, BLOCK)
            settled = places_below(first, used, committed, BLOCK)
        else:
            if SPAN:
                end = places_below(first, used, tl.load(index + stop - 1) + 1, BLOCK)
            else:
                end = places_below(first, used, tl.max(own, 0) + 1, BLOCK)
            settled = places_below(first, used, lowest + 1, BLOCK)
        if WINDOW:
            begin = places_below(first, used, lowest - window + 1, BLOCK)
    begin = begin // N * N
    if SPLIT:
        each = (end - begin + splits - 1) // splits
        each = (each + N - 1) // N * N
        begin += split * each
        end = tl.minimum(end, begin + each)

    total = tl.zeros((M, DVP), tl.float32)
    peak = tl.full((M,), -float("inf"), tl.float32)
    weight = tl.zeros((M,), tl.float32)
    n = tl.arange(0, N)
    for base in range(begin, end, N):
        place = base + n
        here = place < end
        column = place // BLOCK
        if BLOCK % N == 0:
            number = tl.load(block + base // BLOCK).to(tl.int64)
            entry = (number * BLOCK + base % BLOCK) * HK + kv
            from_k = pages_k + entry * D + ((n * HK * D)[None, :] + d[:, None])
            from_v = pages_v + entry * DV + ((n * HK * DV)[:, None] + dv[None, :])
            vector = entry + n * HK
        else:
            number = tl.load(block + column, mask=here, other=0).to(tl.int64)
            entry = (number * BLOCK + place % BLOCK) * HK + kv
            from_k = pages_k + (entry[None, :] * D + d[:, None])
            from_v = pages_v + (entry[:, None] * DV + dv[None, :])
            vector = entry
        if KC != "":
            k_at, k_scales = pages_k + vector * KB, scales_k + (vector * (KB // 2) + KS)
            k_codes, k_scale, k_minus = load_vectors(k_at, k_scales, here, N, DP, D, KC, KG)
        elif D == DP:
            key = tl.load(from_k, mask=here[None, :], other=0.0)
        else:
            key = tl.load(from_k, mask=here[None, :] & (d < D)[:, None], other=0.0)
        if VC != "":
            v_at, v_scales = pages_v + vector * VB, scales_v + (vector * (VB // 2) + VS)
            v_codes, v_scale, v_minus = load_vectors(v_at, v_scales, here, N, DVP, DV, VC, VG)
        elif DV == DVP:
            value = tl.load(from_v, mask=here[:, None], other=0.0)
        else:
            value = tl.load(from_v, mask=here[:, None] & (dv < DV)[None, :], other=0.0)
        if KC != "":
            key = tl.trans(numbers_of(k_codes, k_scale, k_minus, N, DP, KC, KG))
        score = product(query, key) * scale
        if CAP:
            score = cap - 2 * cap / (tl.exp2(score * (2 * LOG2E / cap)) + 1)
        masked = base + N > settled
        if WINDOW:
            masked = True
        if masked:
            token = tl.load(first + column, mask=here, other=0) + place % BLOCK
            at = token
            if HELD:
                j = token - committed
                inside = here & (j >= 0) & (j < rows)
                j = tl.where(inside, j, 0)
                to = sees + row[:, None].to(tl.int64) * words + (j // 64)[None, :]
                word = tl.load(to, mask=inside[None, :], other=0)
                seen = ((word >> (j % 64)[None, :].to(tl.int64)) & 1) != 0
                seen = tl.where(inside[None, :], seen, (here & (token < committed))[None, :])
                if WINDOW:
                    at = tl.where(inside, tl.load(index + start + j, mask=inside, other=0), token)
            else:
                seen = (token[None, :] <= own[:, None]) & here[None, :]
            if SPAN:
                j = token - tl.load(index + start)
                inside = here & (j >= 0) & (j < rows)
                theirs = tl.load(span + start + tl.where(inside, j, 0), mask=inside, other=-1)
                mine = tl.load(span + row)
                seen = seen | ((theirs[None, :] == mine[:, None]) & (mine >= 0)[:, None])
            if WINDOW:
                seen = seen & (at[None, :] > own[:, None] - window)
            score = tl.where(seen, score, -float("inf"))
        highest = tl.maximum(peak, tl.max(score, 1))
        floor = tl.where(highest == -float("inf"), 0.0, highest)
        share = tl.exp2(score - floor[:, None])
        kept = tl.exp2(peak - floor)
        weight = weight * kept + tl.sum(share, 1)
        if VC != "":
            value = numbers_of(v_codes, v_scale, v_minus, N, DVP, VC, VG)
        total = total * kept[:, None] + product(share.to(value.dtype), value)
        peak = highest
    both = live[:, None] & (dv < DV)[None, :]
    if SPLIT:
        to = (split.to(tl.int64) * num_rows + row) * H + h
        tl.store(peaks + to * 2, peak, mask=live)
        tl.store(peaks + to * 2 + 1, weight, mask=live)
        tl.store(parts + to[:, None] * DV + dv[None, :], total, mask=both)
    else:
        if SINKS:
            sink = tl.load(sinks + h) * LOG2E
            highest = tl.maximum(peak, sink)
            kept = tl.exp2(peak - highest)
            weight = weight * kept + tl.exp2(sink - highest)
            total = total * kept[:, None]
        y = total / tl.where(weight > 0, weight, 1.0)[:, None]
        if VC != "":
            y = turn_back(y, M, DVP, VT)
        y = gated(y, gate, row[:, None], h[:, None], dv[None, :], ldg, hdg, both, GATE, PER_HEAD)
        tl.store(out + (row[:, None].to(tl.int64) * H + h[:, None]) * DV + dv[None, :], y, mask=both)


@triton.jit(do_not_specialize=["num_rows", "splits"])
def join(
    parts, peaks, out, gate, sinks, num_rows, splits, ldg, hdg,
    H: tl.constexpr, DV: tl.constexpr, DVB: tl.constexpr, STEP: tl.constexpr, SINKS: tl.constexpr,
    GATE: tl.constexpr, PER_HEAD: tl.constexpr, VT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The splits of one row and head: their sum, with sink and gate. Grid (rows, heads, blocks of Dv).

    VT: values that are turned back together, within a block; 0 = they were not turned.
    """
    wait_for_previous(OVERLAP)
    row, h = tl.program_id(0), tl.program_id(1)
    dv, s = tl.program_id(2) * DVB + tl.arange(0, DVB), tl.arange(0, STEP)
    inside = (dv < DV)[None, :]
    total = tl.zeros((DVB,), tl.float32)
    peak = tl.full((), -float("inf"), tl.float32)
    weight = tl.full((), 0.0, tl.float32)
    if SINKS:
        peak = tl.load(sinks + h) * LOG2E
        weight += 1.0
    for base in range(0, splits, STEP):
        split = base + s
        at = (split.to(tl.int64) * num_rows + row) * H + h
        here = split < splits
        theirs = tl.load(peaks + at * 2, mask=here, other=-float("inf"))
        sums = tl.load(peaks + at * 2 + 1, mask=here, other=0.0)
        values = tl.load(parts + at[:, None] * DV + dv[None, :], mask=here[:, None] & inside, other=0.0)
        highest = tl.maximum(peak, tl.max(theirs, 0))
        floor = tl.where(highest == -float("inf"), 0.0, highest)
        share = tl.exp2(theirs - floor)
        kept = tl.exp2(peak - floor)
        weight = weight * kept + tl.sum(share * sums, 0)
        total = total * kept + tl.sum(share[:, None] * values, 0)
        peak = highest
    y = tl.reshape(total / tl.where(weight > 0, weight, 1.0), (1, DVB))
    if VT != 0:
        y = turn_back(y, 1, DVB, VT)
    y = gated(y, gate, row, h, dv[None, :], ldg, hdg, inside, GATE, PER_HEAD)
    tl.store(out + (row.to(tl.int64) * H + h) * DV + dv[None, :], y, mask=inside)
