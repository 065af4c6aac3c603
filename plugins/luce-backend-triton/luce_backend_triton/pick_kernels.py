# Triton compiles these functions: no annotations, no conditional expressions.
# ruff: noqa: ANN001, ANN201, SIM102
"""Triton kernels of the ops `process_logits`, `sample`, `newest_tokens` and `note_picks`."""

from __future__ import annotations

import triton
import triton.language as tl

from luce_backend_triton.choice_kernels import (
    acts,
    asked_of,
    begin,
    least_value,
    left_of,
    top_of,
    uniform,
    without_choices,
)
from luce_backend_triton.nucleus_kernels import LARGEST, load_row
from luce_backend_triton.waiting import let_next_start, wait_for_previous, wait_only


@triton.jit
def gumbel(seed, index, token):
    """f32 noise of (seed i64, index i32, token i32[N]). log1p by Kahan: w = 1 - u is exact enough for it."""
    u = uniform(seed, index, token)
    w = 1.0 - u
    same = w == 1.0
    log1p = tl.where(same, -u, tl.log(w) * (-u) / tl.where(same, 1.0, w - 1.0))
    return -tl.log(-log1p)


@triton.jit(do_not_specialize=["most"])
def process(
    logits, out, wanted, seq, slot, index, token, sees, query_start, sure,
    mask, bias, marks, repetition, frequency, presence, min_index, temperature, vocab, most, words,
    mask_words, MASK: tl.constexpr, BIAS: tl.constexpr, PENALTY: tl.constexpr, MIN_TOKENS: tl.constexpr,
    NOISE: tl.constexpr, STEP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """What comes before the filters, of STEP columns of one row; bits of the reference, so nothing is fused.

    mask i32[R, mask_words], see `ForwardBatch`; bias f32[slots, V]; marks i32[slots, V], see
    `luce_core.ops.marks`. most: rows of a sequence; words: of sees. Grid (rows, vocab / STEP).
    """
    let_next_start(OVERLAP)
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = tl.load(wanted + row)
    q = tl.load(seq + t)
    s = tl.load(slot + q).to(tl.int64)
    divisor = tl.load(temperature + s)
    wait_only(OVERLAP)
    c = split * STEP + tl.arange(0, STEP)
    v = tl.load(logits + row * vocab + c, mask=c < vocab, other=0.0)
    if MASK:
        word = tl.load(mask + row * mask_words + c // 32, mask=c < vocab, other=0)
        v = tl.where(((word >> (c % 32)) & 1) > 0, v, -float("inf"))
    if BIAS:
        v += tl.load(bias + s * vocab + c, mask=c < vocab, other=0.0)
    if PENALTY or MIN_TOKENS:
        mark = tl.load(marks + s * vocab + c, mask=c < vocab, other=0)
    if PENALTY:
        count = mark >> 2
        if most > 1:
            first = tl.load(query_start + q)
            for j in range(tl.load(sure + q), tl.load(query_start + q + 1) - first):
                seen = (tl.load(sees + t * words + j // 64) >> (j % 64)) & 1
                count += tl.where(c == tl.load(token + first + j), seen.to(tl.int32), 0)
        factor = tl.load(repetition + s)
        weaker = tl.where(v > 0, tl.div_rn(v, factor), v * factor)
        v = tl.where(((mark & 1) > 0) | (count > 0), weaker, v)
        v = v - tl.load(frequency + s) * count.to(tl.float32)
        v = v - tl.load(presence + s) * (count > 0).to(tl.float32)
    if MIN_TOKENS:
        early = tl.load(index + t) + 1 < tl.load(min_index + s)
        v = tl.where(early & ((mark & 2) > 0), -float("inf"), v)
    if NOISE:
        v = tl.div_rn(v, tl.where(divisor > 0, divisor, 1.0))
    tl.store(out + row * vocab + c, v, mask=c < vocab)


@triton.jit(do_not_specialize=["rows"])
def top_of_part(
    logits, tops, vocab, part, wanted, seq, slot, temperature, top_k, top_p, typical_p, shares, limits, above,
    found, cuts, sums, rows, CUT: tl.constexpr, STAGES: tl.constexpr, STEP: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The largest of `part` columns of one row; with CUT what filters begin with, too. Grid (rows, parts)."""
    let_next_start(OVERLAP)
    row, split = tl.program_id(0), tl.program_id(1)
    limit, share, typical = 0, 1.0, 1.0
    if CUT:
        limit, share, typical = asked_of(row, wanted, seq, slot, vocab, temperature, top_k, top_p, typical_p)
    wait_only(OVERLAP)
    first = split * part
    last = tl.minimum(first + part, vocab)
    top = tl.full((STEP,), -float("inf"), tl.float32)
    for start in range(first, last, STEP):
        c = start + tl.arange(0, STEP)
        top = tl.maximum(top, load_row(logits, row, vocab, c, c < last))
    tl.store(tops + row * tl.num_programs(1) + split, tl.max(top, 0))
    if CUT:
        if split == 0:
            begin(row, rows, limit, share, typical, shares, limits, above, found, cuts, sums, STAGES)


@triton.jit(do_not_specialize=["rows"])
def best_of_part(
    logits, wanted, seq, slot, index, temperature, seeds, min_p, probability, threshold, tops, cuts, sums,
    best, where, rows, vocab, part, parts,
    NOISE: tl.constexpr, MIN_P: tl.constexpr, CUT: tl.constexpr, STAGES: tl.constexpr, XTC: tl.constexpr,
    STEP: tl.constexpr, P: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The best of `part` columns of one row, the lowest id on ties, never a NaN. Grid (rows, parts).

    cuts, sums: of the kernels of filters.
    """
    let_next_start(OVERLAP)
    row, split = tl.program_id(0), tl.program_id(1)
    least, share, top = -float("inf"), 0.0, 0.0
    seed, place, sampled, chosen, likely = tl.zeros((), tl.int64), 0, False, False, 0.0
    if NOISE:
        t = tl.load(wanted + row)
        s = tl.load(slot + tl.load(seq + t)).to(tl.int64)
        place = tl.load(index + t) + 1
        seed = tl.load(seeds + s)
        sampled = tl.load(temperature + s) > 0
        if MIN_P:
            share = tl.load(min_p + s)
        if XTC:
            chosen = acts(t, s, index, seeds, temperature, probability)
            likely = tl.load(threshold + s)
    wait_only(OVERLAP)
    if NOISE:
        if MIN_P or XTC or STAGES > 1:
            top = top_of(row, tops, parts, P)
        if MIN_P:
            least = least_value(top, share)
        if XTC or STAGES > 1:
            top = tl.minimum(tl.maximum(top, -LARGEST), LARGEST)
    values = tl.full((STEP,), -float("inf"), tl.float32)
    ids = tl.full((STEP,), 0x7FFFFFFF, tl.int32)
    first = split * part
    last = tl.minimum(first + part, vocab)
    for start in range(first, last, STEP):
        c = start + tl.arange(0, STEP)
        v = load_row(logits, row, vocab, c, c < last)
        v = left_of(v, c, row, rows, cuts, sums, top, least, CUT, STAGES, MIN_P)
        if XTC:
            v = tl.where(chosen, without_choices(v, c, row, rows, sums, top, likely), v)
        if NOISE:
            v = tl.where(sampled, v + gumbel(seed, place, c), v)
        better = (v > values) | ((ids == 0x7FFFFFFF) & (c < last))
        values, ids = tl.where(better, v, values), tl.where(better, c, ids)
    best_value = tl.max(values, 0)
    at = row * parts + split
    tl.store(best + at, best_value)
    tl.store(where + at, tl.min(tl.where(values == best_value, ids, 0x7FFFFFFF), 0))


@triton.jit
def best_of_parts(best, where, out, parts, P: tl.constexpr, OVERLAP: tl.constexpr):
    """out i64[rows]. Grid (rows,). P: at least the parts."""
    wait_for_previous(OVERLAP)
    row, p = tl.program_id(0), tl.arange(0, P)
    values = tl.load(best + row * parts + p, mask=p < parts, other=-float("inf"))
    ids = tl.load(where + row * parts + p, mask=p < parts, other=0x7FFFFFFF)
    tl.store(out + row, tl.min(tl.where(values == tl.max(values, 0), ids, 0x7FFFFFFF), 0).to(tl.int64))


@triton.jit(do_not_specialize=["num_seqs"])
def fill_tokens(token, slot, newest, out, count, num_seqs, S: tl.constexpr):
    """out: the token of each sequence, the newest of its slot where it is below 0; count: 0 where there is
    none. One program.
    """
    s = tl.arange(0, S)
    inside = s < num_seqs
    t = tl.load(token + s, mask=inside, other=0)
    t = tl.where(t >= 0, t, tl.load(newest + tl.load(slot + s, mask=inside, other=0), mask=inside, other=0))
    tl.store(out + s, tl.maximum(t, 0), mask=inside)
    tl.store(count + s, (t >= 0).to(tl.int32), mask=inside)


@triton.jit
def note(
    picks, count, slot, ends, newest, out, marks, vocab,
    ENDS: tl.constexpr, MARKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out: the pick, -1 where the count is 0. newest: that, -1 too where it is an end. MARKS: it is counted
    there. Grid (sequences,). The step behind it, which begins with what is written here, begins after it.
    """
    s = tl.program_id(0)
    where, alive = tl.load(slot + s), tl.load(count + s) > 0
    ids = tl.load(ends + where * ENDS + tl.arange(0, ENDS))
    wait_only(OVERLAP)
    pick = tl.where(alive, tl.load(picks + s), -1)
    ended = tl.max((ids == pick).to(tl.int32), 0) > 0
    tl.store(out + s, pick)
    tl.store(newest + where, tl.where(ended, -1, pick).to(tl.int32))
    if MARKS:
        if pick >= 0:
            at = marks + where.to(tl.int64) * vocab + pick
            tl.store(at, tl.load(at) + 4)
