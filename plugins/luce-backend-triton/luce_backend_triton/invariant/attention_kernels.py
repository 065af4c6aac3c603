# Triton compiles these functions: no annotations, no conditional expressions.
# ruff: noqa: ANN001, ANN201, PLR0912, PLR0915, C901, SIM102
"""Triton kernels of paged attention whose sums are cut by places in the text alone.

A softmax is that of parts of PART tokens, each summed N tokens at a time from a multiple of N on; then the
parts meet, one after another. What a row does not see is an exact zero in these sums. The rows above a held
row count as the tokens behind the committed text, whichever entries they lie in: so a row of a tree is
summed as the same row decoded alone. Held rows and prompts are compiled each by themselves, with
`enable_fp_fusion` off: of a · b + c · d the compiler would join the sum to either product, and round the
other. KC to VS: see `luce_backend_triton.attention_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from luce_backend_triton.attention_kernels import LOG2E, gate_at, gated, product
from luce_backend_triton.codec_kernels import load_vectors, numbers_of, turn_back
from luce_backend_triton.row_kernels import tile_of
from luce_backend_triton.waiting import wait_for_previous


@triton.jit
def entries_of(token, wanted, block, first, used, newest, BLOCK: tl.constexpr):
    """Entries of tokens [N] in a table, and which have one. newest: first token of the last block.

    Blocks mostly follow each other up to the last, so that is guessed first.
    """
    column = used - 1 - tl.maximum(newest + BLOCK - 1 - token, 0) // BLOCK
    column = tl.maximum(column, 0)
    begun = tl.load(first + column)
    here = wanted & (begun <= token) & (token < begun + BLOCK)
    entry = tl.load(block + column).to(tl.int64) * BLOCK + (token - begun)
    missed = wanted & (here == 0) & (token < newest)
    if tl.sum(missed.to(tl.int32), 0) > 0:
        for c in range(used):
            begun_there = tl.load(first + c)
            there = missed & (begun_there <= token) & (token < begun_there + BLOCK)
            entry_there = tl.load(block + c).to(tl.int64) * BLOCK + (token - begun_there)
            entry = tl.where(there, entry_there, entry)
            here = here | there
    return entry, here


@triton.jit
def joined(total, peak, weight, part, highest_of, sums):
    """Two partial softmaxes as one: totals [M, Dv], highest scores (in base 2) [M], sums [M]."""
    highest = tl.maximum(peak, highest_of)
    floor = tl.where(highest == -float("inf"), 0.0, highest)
    kept, share = tl.exp2(peak - floor), tl.exp2(highest_of - floor)
    weight = weight * kept + sums * share
    total = total * kept[:, None] + part * share[:, None]
    return total, highest, weight


@triton.jit(do_not_specialize=["num_rows", "num_seqs", "words", "table_stride"])
def attend_parts(
    q, pages_k, pages_v, scales_k, scales_v, out, parts, peaks, gate, sinks, index, query_start, length, sees,
    span, block, first, count, num_rows, num_seqs, words, table_stride, ldg, hdg, scale, cap, window,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PART: tl.constexpr, RT: tl.constexpr, SB: tl.constexpr,
    BLOCK: tl.constexpr, HELD: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    SPAN: tl.constexpr, GATE: tl.constexpr, PER_HEAD: tl.constexpr, KC: tl.constexpr, KG: tl.constexpr,
    KT: tl.constexpr, KB: tl.constexpr, KS: tl.constexpr, VC: tl.constexpr, VG: tl.constexpr,
    VT: tl.constexpr, VB: tl.constexpr, VS: tl.constexpr, PTX: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """RT rows of one sequence, the query heads of one KV head. HELD: one row and one part of the text.

    Grid (tiles, KV heads, parts; prompts: 1). Prompts: out f32[T, H·Dv]. HELD: parts
    f32[parts, T, H, Dv] and peaks f32[parts, T, H, 2], highest score (in base 2) and sum. scale: of scores,
    times log2(e).
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
    m, n = tl.arange(0, M), tl.arange(0, N)
    row, h = row0 + m // group, kv * group + m % group
    live = (m < RT * group) & (row < stop)
    row = tl.where(live, row, row0)
    d, dv = tl.arange(0, DP), tl.arange(0, DVP)
    query = tl.load(
        q + (row[:, None].to(tl.int64) * H + h[:, None]) * D + d[None, :],
        mask=live[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip
    own = tl.load(index + row)
    first += seq * table_stride
    block += seq * table_stride
    used = tl.load(count + seq)
    newest = tl.load(first + tl.maximum(used - 1, 0))
    committed, rows = tl.load(length + seq), stop - start

    # The tokens any row of the tile sees.
    lowest = tl.min(own, 0)
    if HELD:
        end = committed + rows
    elif SPAN:
        end = tl.load(index + stop - 1) + 1
    else:
        end = tl.max(own, 0) + 1
    end = tl.where(used > 0, end, 0)
    begin = end * 0
    if WINDOW:
        begin = tl.maximum(lowest - window + 1, 0)
    begin = begin // N * N
    low, high = begin // PART, (end + PART - 1) // PART
    if HELD:
        low += split
        high = tl.minimum(high, low + 1)

    all_total = tl.zeros((M, DVP), tl.float32)
    all_peak = tl.full((M,), -float("inf"), tl.float32)
    all_weight = tl.zeros((M,), tl.float32)
    if SINKS and not HELD:
        all_peak = tl.load(sinks + h) * LOG2E
        all_weight += 1.0
    for part in range(low, high):
        total = tl.zeros((M, DVP), tl.float32)
        peak = tl.full((M,), -float("inf"), tl.float32)
        weight = tl.zeros((M,), tl.float32)
        for base in range(tl.maximum(part * PART, begin), tl.minimum(part * PART + PART, end), N):
            token = base + n
            wanted = token < end
            at = token  # where its entry lies
            text = token  # its index in the text
            if HELD:
                if base + N > committed:
                    mine = row0 - start
                    behind = committed * 1
                    at = tl.where(token < committed, token, -1)
                    for j in range(rows):
                        word = tl.load(sees + (start + mine).to(tl.int64) * words + j // 64)
                        seen_j = ((word >> (j % 64)) & 1).to(tl.int32)
                        hit = (token == behind) & (seen_j != 0)
                        at = tl.where(hit, committed + j, at)
                        text = tl.where(hit, tl.load(index + start + j), text)
                        behind += seen_j
                    wanted = wanted & (at >= 0)
            entry, here = entries_of(at, wanted, block, first, used, newest, BLOCK)
            entry = tl.where(here, entry, 0) * HK + kv
            seen = here[None, :] & (row[:, None] >= 0)
            if not HELD:
                seen = seen & (text[None, :] <= own[:, None])
                if SPAN:
                    j = text - tl.load(index + start)
                    inside = here & (j >= 0) & (j < rows)
                    theirs = tl.load(span + start + tl.where(inside, j, 0), mask=inside, other=-1)
                    mine_of = tl.load(span + row)
                    seen = seen | ((theirs[None, :] == mine_of[:, None]) & (mine_of >= 0)[:, None])
            if WINDOW:
                seen = seen & (text[None, :] > own[:, None] - window)
            if KC != "":
                k_at, k_scales = pages_k + entry * KB, scales_k + (entry * (KB // 2) + KS)
                k_codes, k_scale, k_minus = load_vectors(k_at, k_scales, here, N, DP, D, KC, KG, 0)
            else:
                key = tl.load(
                    pages_k + (entry[None, :] * D + d[:, None]), mask=here[None, :] & (d < D)[:, None],
                    other=0.0,
                )  # fmt: skip
            if VC != "":
                v_at, v_scales = pages_v + entry * VB, scales_v + (entry * (VB // 2) + VS)
                v_codes, v_scale, v_minus = load_vectors(v_at, v_scales, here, N, DVP, DV, VC, VG, PTX)
            else:
                value = tl.load(
                    pages_v + (entry[:, None] * DV + dv[None, :]), mask=here[:, None] & (dv < DV)[None, :],
                    other=0.0,
                )  # fmt: skip
            if KC != "":
                key = tl.trans(numbers_of(k_codes, k_scale, k_minus, N, DP, KC, KG, PTX))
            score = product(query, key) * scale
            if CAP:
                score = cap - 2 * cap / (tl.exp2(score * (2 * LOG2E / cap)) + 1)
            score = tl.where(seen, score, -float("inf"))
            highest = tl.maximum(peak, tl.max(score, 1))
            floor = tl.where(highest == -float("inf"), 0.0, highest)
            share = tl.exp2(score - floor[:, None])
            kept = tl.exp2(peak - floor)
            weight = weight * kept + tl.sum(share, 1)
            if VC != "":
                value = numbers_of(v_codes, v_scale, v_minus, N, DVP, VC, VG, PTX)
            total = total * kept[:, None] + product(share.to(value.dtype), value)
            peak = highest
        if HELD:
            all_total, all_peak, all_weight = total, peak, weight
        else:
            all_total, all_peak, all_weight = joined(all_total, all_peak, all_weight, total, peak, weight)
    both = live[:, None] & (dv < DV)[None, :]
    if HELD:
        to = (split.to(tl.int64) * num_rows + row) * H + h
        tl.store(peaks + to * 2, all_peak, mask=live)
        tl.store(peaks + to * 2 + 1, all_weight, mask=live)
        tl.store(parts + to[:, None] * DV + dv[None, :], all_total, mask=both)
    else:
        y = all_total / tl.where(all_weight > 0, all_weight, 1.0)[:, None]
        if VC != "":
            y = turn_back(y, M, DVP, VT)
        g = gate_at(gate, row[:, None], h[:, None], dv[None, :], ldg, hdg, both, GATE, PER_HEAD)
        to = out + (row[:, None].to(tl.int64) * H + h[:, None]) * DV + dv[None, :]
        tl.store(to, gated(y, g, GATE), mask=both)


@triton.jit(do_not_specialize=["num_rows", "splits"])
def join_parts(
    parts, peaks, out, gate, sinks, num_rows, splits, ldg, hdg,
    H: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, HP: tl.constexpr, SINKS: tl.constexpr,
    GATE: tl.constexpr, PER_HEAD: tl.constexpr, VT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The parts of one row, one after another, HP heads; then turn, sink and gate as in `attend_parts`.

    Grid (rows, heads / HP).
    """
    wait_for_previous(OVERLAP)
    row = tl.program_id(0)
    h, dv = tl.program_id(1) * HP + tl.arange(0, HP), tl.arange(0, DVP)
    live = h < H
    both = live[:, None] & (dv < DV)[None, :]
    total = tl.zeros((HP, DVP), tl.float32)
    peak = tl.full((HP,), -float("inf"), tl.float32)
    weight = tl.zeros((HP,), tl.float32)
    if SINKS:
        peak = tl.load(sinks + h, mask=live, other=0.0) * LOG2E
        weight += 1.0
    for split in range(splits):
        at = (row.to(tl.int64) + split * num_rows) * H + h
        theirs = tl.load(peaks + at * 2, mask=live, other=-float("inf"))
        sums = tl.load(peaks + at * 2 + 1, mask=live, other=0.0)
        part = tl.load(parts + at[:, None] * DV + dv[None, :], mask=both, other=0.0)
        total, peak, weight = joined(total, peak, weight, part, theirs, sums)
    y = total / tl.where(weight > 0, weight, 1.0)[:, None]
    if VT != 0:
        y = turn_back(y, HP, DVP, VT)
    y = gated(y, gate_at(gate, row, h[:, None], dv[None, :], ldg, hdg, both, GATE, PER_HEAD), GATE)
    tl.store(out + (row.to(tl.int64) * H + h[:, None]) * DV + dv[None, :], y, mask=both)
