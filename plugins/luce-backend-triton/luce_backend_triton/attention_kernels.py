# Triton compiles these functions: no annotations, no conditional expressions.
# ruff: noqa: ANN001, ANN201, PLR0915, PLR0912, C901
"""Triton kernels of paged attention: a softmax over pages, split, and its sum.

Lengths, block tables and masks are read on the device. What a row sees is said in `luce_core.ops.pages`.

Keys and values may be codes (`codec_kernels`): KC and VC name the codec, "" = numbers; KG and VG are the
numbers that share a scale, KT and VT those turned together, KB and VB bytes of a vector, KS and VS how many
f16 lie in front of its scales. scales_k and scales_v are the same pages as f16. PTX: see `numbers_of`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from luce_backend_triton.codec_kernels import load_vectors, numbers_of, turn_back
from luce_backend_triton.kernels import DOT_F32
from luce_backend_triton.row_kernels import places_below, tile_of
from luce_backend_triton.waiting import let_next_start, wait_for_previous, wait_only

LOG2E = tl.constexpr(1.4426950408889634)


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
def gate_at(gate, row, h, d, ldg, hdg, inside, GATE: tl.constexpr, PER_HEAD: tl.constexpr):
    """The gate of rows `row` and heads h [n, 1], ldg and hdg apart: f32[n, Dv]. PER_HEAD: one for all
    features.
    """
    if GATE == 0:
        return 0.0
    else:
        at = gate + row.to(tl.int64) * ldg + h * hdg
        if PER_HEAD:
            return tl.load(at + 0 * d, mask=inside, other=0.0).to(tl.float32)
        else:
            return tl.load(at + d, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def gated(y, g, GATE: tl.constexpr):
    """y · its gate. GATE: 0 none, 1 sigmoid, 2 softplus."""
    if GATE == 1:
        y = y / (1 + tl.exp(-g))
    elif GATE == 2:
        y = y * tl.where(g > 20, g, tl.log(1 + tl.exp(tl.minimum(g, 20.0))))
    return y


@triton.jit
def vectors_of(base, end, block, kv, HK: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Places base .. base + N of a table: which are in front of `end`, and the number of each one's vector
    of a head: one for all, and what is added to it [N].
    """
    n = tl.arange(0, N)
    place = base + n
    here = place < end
    if BLOCK % N == 0:
        number = tl.load(block + base // BLOCK).to(tl.int64)
        return here, (number * BLOCK + base % BLOCK) * HK + kv, n * HK
    else:
        number = tl.load(block + place // BLOCK, mask=here, other=0).to(tl.int64)
        return here, tl.full((), 0, tl.int64) + kv, (number * BLOCK + place % BLOCK) * HK


@triton.jit
def load_keys(
    pages, scales, vector, added, here, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KC: tl.constexpr,
    KG: tl.constexpr, KB: tl.constexpr, KS: tl.constexpr,
):  # fmt: skip
    """Keys [DP, N], or what `load_vectors` gives; 0 where not `here`."""
    d = tl.arange(0, DP)
    if KC != "":
        at = vector + added
        return load_vectors(pages + at * KB, scales + (at * (KB // 2) + KS), here, N, DP, D, KC, KG, 0)
    else:
        at = pages + vector * D + ((added * D)[None, :] + d[:, None])
        if D == DP:
            key = tl.load(at, mask=here[None, :], other=0.0)
        else:
            key = tl.load(at, mask=here[None, :] & (d < D)[:, None], other=0.0)
        return key, key, key


@triton.jit
def load_values(
    pages, scales, vector, added, here, N: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    VC: tl.constexpr, VG: tl.constexpr, VB: tl.constexpr, VS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Values [N, DVP], or what `load_vectors` gives; 0 where not `here`."""
    d = tl.arange(0, DVP)
    if VC != "":
        at = vector + added
        return load_vectors(pages + at * VB, scales + (at * (VB // 2) + VS), here, N, DVP, DV, VC, VG, PTX)
    else:
        at = pages + vector * DV + ((added * DV)[:, None] + d[None, :])
        if DV == DVP:
            value = tl.load(at, mask=here[:, None], other=0.0)
        else:
            value = tl.load(at, mask=here[:, None] & (d < DV)[None, :], other=0.0)
        return value, value, value


@triton.jit
def capped(score, cap, CAP: tl.constexpr):
    """cap · tanh(score / cap); scores and cap in base 2."""
    if CAP:
        score = cap - 2 * cap / (tl.exp2(score * (2 * LOG2E / cap)) + 1)
    return score


@triton.jit
def with_tile(
    peak, weight, total, score, value, v_scale, v_minus, N: tl.constexpr, DVP: tl.constexpr, VC: tl.constexpr,
    VG: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The sums, after N places more: highest score (in base 2), sum of weights, sum of values."""
    highest = tl.maximum(peak, tl.max(score, 1))
    floor = tl.where(highest == -float("inf"), 0.0, highest)
    share = tl.exp2(score - floor[:, None])
    kept = tl.exp2(peak - floor)
    weight = weight * kept + tl.sum(share, 1)
    if VC != "":
        value = numbers_of(value, v_scale, v_minus, N, DVP, VC, VG, PTX)
    return highest, weight, total * kept[:, None] + product(share.to(value.dtype), value)


@triton.jit
def with_sink(peak, weight, total, sinks, h, SINKS: tl.constexpr):
    """The sums, after the sink of heads h: sum of weights and of values."""
    if SINKS:
        sink = tl.load(sinks + h) * LOG2E
        highest = tl.maximum(peak, sink)
        kept = tl.exp2(peak - highest)
        weight = weight * kept + tl.exp2(sink - highest)
        total = total * kept[:, None]
    return weight, total


@triton.jit(do_not_specialize=["num_rows", "num_seqs", "words", "table_stride", "splits"])
def attend(
    q, pages_k, pages_v, scales_k, scales_v, out, parts, peaks, gate, sinks, index, query_start, length, sees,
    span, block, first, count, num_rows, num_seqs, words, table_stride, ldg, hdg, scale, cap, window, splits,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, RT: tl.constexpr, SB: tl.constexpr, BLOCK: tl.constexpr,
    HELD: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, SPAN: tl.constexpr,
    SPLIT: tl.constexpr, GATE: tl.constexpr, PER_HEAD: tl.constexpr, KC: tl.constexpr, KG: tl.constexpr,
    KT: tl.constexpr, KB: tl.constexpr, KS: tl.constexpr, VC: tl.constexpr, VG: tl.constexpr,
    VT: tl.constexpr, VB: tl.constexpr, VS: tl.constexpr, PTX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """RT rows of one sequence, the query heads of one KV head, one part of the places. The last tiles see
    most and begin first.

    Grid (tiles, KV heads, splits). out f32[T, H·Dv]; SPLIT: parts f32[splits, T, H, Dv] and peaks
    f32[splits, T, H, 2], highest score (in base 2) and sum. scale: of scores, times log2(e).
    """
    let_next_start(OVERLAP)
    seq, row0 = tile_of(tl.num_programs(0) - 1 - tl.program_id(0), query_start, num_seqs, RT, SB)
    beyond = seq >= num_seqs
    seq = tl.minimum(seq, num_seqs - 1)
    start, stop = tl.load(query_start + seq), tl.load(query_start + seq + 1)
    kv, split = tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = H // HK
    m = tl.arange(0, M)
    row, h = row0 + m // group, kv * group + m % group
    live = (m < RT * group) & (row < stop)
    row = tl.maximum(tl.minimum(row, stop - 1), 0)
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

    wait_only(OVERLAP)
    if beyond | (row0 >= stop):
        return
    d, dv = tl.arange(0, DP), tl.arange(0, DVP)
    query = tl.load(
        q + (row[:, None].to(tl.int64) * H + h[:, None]) * D + d[None, :],
        mask=live[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip
    total = tl.zeros((M, DVP), tl.float32)
    peak = tl.full((M,), -float("inf"), tl.float32)
    weight = tl.zeros((M,), tl.float32)
    n = tl.arange(0, N)
    for base in range(begin, end, N):
        here, vector, added = vectors_of(base, end, block, kv, HK, N, BLOCK)
        key, k_scale, k_minus = load_keys(pages_k, scales_k, vector, added, here, N, D, DP, KC, KG, KB, KS)
        value, v_scale, v_minus = load_values(
            pages_v, scales_v, vector, added, here, N, DV, DVP, VC, VG, VB, VS, PTX
        )  # fmt: skip
        if KC != "":
            key = tl.trans(numbers_of(key, k_scale, k_minus, N, DP, KC, KG, PTX))
        score = capped(product(query, key) * scale, cap, CAP)
        masked = base + N > settled
        if WINDOW:
            masked = True
        if masked:
            place = base + n
            column = place // BLOCK
            token = tl.load(first + column, mask=here, other=0) + place % BLOCK
            at = token
            if HELD:
                j = token - committed
                inside = here & (j >= 0) & (j < rows)
                j = tl.where(inside, j, 0)
                seen = tl.zeros((M, N), tl.int1) | (here & (token < committed))[None, :]
                for w in range((rows + 63) // 64):  # one word of a row at a time, not one for every place
                    word = tl.load(sees + row.to(tl.int64) * words + w)
                    bit = (word[:, None] >> (j % 64)[None, :].to(tl.int64)) & 1
                    seen = seen | ((inside & (j // 64 == w))[None, :] & (bit != 0))
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
        peak, weight, total = with_tile(
            peak, weight, total, score, value, v_scale, v_minus, N, DVP, VC, VG, PTX
        )  # fmt: skip
    both = live[:, None] & (dv < DV)[None, :]
    if SPLIT:
        to = (split.to(tl.int64) * num_rows + row) * H + h
        tl.store(peaks + to * 2, peak, mask=live)
        tl.store(peaks + to * 2 + 1, weight, mask=live)
        tl.store(parts + to[:, None] * DV + dv[None, :], total, mask=both)
    else:
        weight, total = with_sink(peak, weight, total, sinks, h, SINKS)
        y = total / tl.where(weight > 0, weight, 1.0)[:, None]
        if VC != "":
            y = turn_back(y, M, DVP, VT)
        g = gate_at(gate, row[:, None], h[:, None], dv[None, :], ldg, hdg, both, GATE, PER_HEAD)
        to = out + (row[:, None].to(tl.int64) * H + h[:, None]) * DV + dv[None, :]
        tl.store(to, gated(y, g, GATE), mask=both)


@triton.jit
def store_ready(y, ready, factors, row, num_rows, first, N: tl.constexpr):
    """Columns first .. first + N of a row, N a power of two from 32 to 256, to f16[blocks, rows, 288] as
    csrc/mma.cu wants them. factors f32[2]: a power of two that they are to be multiplied with, its inverse.
    """
    column = first + tl.arange(0, N)
    p = column % 256
    at = (first // 256 * num_rows + row).to(tl.int64)
    h = (y * tl.load(factors + 1)).to(tl.float16)
    full = h.to(tl.float32)
    share = tl.where(p % 32 < 16, 1.0, 0.0625)  # of codes that lie four bits up
    place = p // 32 * 32 + p % 16 // 4 * 8 + p % 32 // 16 * 4 + p % 4
    tl.store(ready + at * 288 + place, (full * share).to(tl.float16))
    sums = tl.sum(tl.reshape(full, (N // 32, 32)), 1) * 0.03125
    group = first % 256 // 32 + tl.arange(0, N // 32)
    tl.store(ready + at * 288 + 256 + group, sums.to(tl.float16))
    if first % 256 == 0:
        words = ready.to(tl.pointer_type(tl.float32), bitcast=True)
        tl.store(words + at * 144 + 136, tl.load(factors))


@triton.jit(do_not_specialize=["num_rows", "splits"])
def join(
    parts, peaks, out, gate, sinks, ready, factors, num_rows, splits, ldg, hdg,
    H: tl.constexpr, DV: tl.constexpr, DVB: tl.constexpr, STEP: tl.constexpr, SINKS: tl.constexpr,
    GATE: tl.constexpr, PER_HEAD: tl.constexpr, VT: tl.constexpr, READY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The splits of one row and head: their sum, with sink and gate. Grid (rows, heads, blocks of Dv).

    VT: values that are turned back together, within a block; 0 = they were not turned. READY: see
    `store_ready`.
    """
    wait_for_previous(OVERLAP)
    row, h = tl.program_id(0), tl.program_id(1)
    dv, s = tl.program_id(2) * DVB + tl.arange(0, DVB), tl.arange(0, STEP)
    inside = (dv < DV)[None, :]
    g = gate_at(gate, row, h, dv[None, :], ldg, hdg, inside, GATE, PER_HEAD)
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
    y = gated(y, g, GATE)
    tl.store(out + (row.to(tl.int64) * H + h) * DV + dv[None, :], y, mask=inside)
    if READY:
        first = h * DV + tl.program_id(2) * DVB
        store_ready(tl.reshape(y, (DVB,)), ready, factors, row, num_rows, first, DVB)
