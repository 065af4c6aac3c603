# Triton compiles these functions: no annotations, no conditional expressions.
# ruff: noqa: ANN001, ANN201, PLR0124, PLR0915
"""Triton kernels of the ops `sample`, `newest_tokens` and `note_picks`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix(x):
    """As `luce_core.ops.noise` mixes 32 bits."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def gumbel(seed, index, token):
    """f32 noise of (seed i64, index i32, token i32[N]). log1p by Kahan: w = 1 - u is exact enough for it."""
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    key = mix(low) ^ mix(high ^ 0x5851F42D)
    key = mix(key ^ mix(index.to(tl.uint32)))
    bits = mix(mix(token.to(tl.uint32) * 0x9E3779B1) ^ key)
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    w = 1.0 - u
    same = w == 1.0
    log1p = tl.where(same, -u, tl.log(w) * (-u) / tl.where(same, 1.0, w - 1.0))
    return -tl.log(-log1p)


@triton.jit
def key_of(v):
    """i64 in 0 .. 2^32 - 1 that orders f32 as they are."""
    bits = (v + 0.0).to(tl.int32, bitcast=True).to(tl.int64)  # one zero
    return tl.where(bits < 0, -bits - 1, bits + 2147483648)


@triton.jit
def top_of_part(logits, tops, vocab, part, STEP: tl.constexpr):
    """The largest of `part` columns of one row. Grid (rows, parts)."""
    row, split = tl.program_id(0), tl.program_id(1)
    first = split * part
    last = tl.minimum(first + part, vocab)
    top = tl.full((STEP,), -float("inf"), tl.float32)
    for start in range(first, last, STEP):
        c = start + tl.arange(0, STEP)
        v = tl.load(logits + row.to(tl.int64) * vocab + c, mask=c < last, other=-float("inf"))
        top = tl.maximum(top, tl.where(v != v, -float("inf"), v))
    tl.store(tops + row * tl.num_programs(1) + split, tl.max(top, 0))


@triton.jit
def top_of(row, tops, parts, P: tl.constexpr):
    s = tl.arange(0, P)
    return tl.max(tl.load(tops + row * parts + s, mask=s < parts, other=-float("inf")), 0)


@triton.jit
def shift_of(PASS: tl.constexpr):
    """Candidates of a pass lie 2^this keys apart: 27, 22, .. 2, 0."""
    return max(27 - 5 * PASS, 0)


@triton.jit
def cut_after(
    row, rows, above, lows, totals, p, parts, PASS: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """What pass PASS found: from which key on the cut lies, the candidate it is at or below, the mass above
    that, and the mass that is wanted.
    """
    s, j = tl.arange(0, P), tl.arange(0, 32)
    mass = p * tl.sum(tl.load(totals + row * parts + s, mask=s < parts, other=0.0), 0)
    of = above + (PASS * rows + row).to(tl.int64) * parts * 32
    sums = tl.load(of + s[:, None] * 32 + j[None, :], mask=(s < parts)[:, None], other=0.0)
    sums = tl.sum(sums, 0)
    column = tl.sum((sums >= mass).to(tl.int32), 0)
    beyond = tl.sum(tl.where(j == column, sums, 0.0), 0)
    low = tl.load(lows + PASS * rows + row) + (column.to(tl.int64) << shift_of(PASS))
    return low, column, beyond, mass


@triton.jit(do_not_specialize=["rows"])
def mass_above(
    logits, wanted, seq, slot, top_p, tops, above, lows, totals, ties, rows, vocab, part, parts,
    PASS: tl.constexpr, LAST: tl.constexpr, STEP: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """One pass of the search for the cut of top-p: the lowest key above which less than p of the mass lies.

    Its candidates are the last keys of 32 ranges of keys; the next pass looks into the range with the cut.
    above f32[passes, rows, parts, 32]: mass of the keys above a candidate, by part. lows i64[passes, rows]:
    where the ranges of a pass begin. totals f32[rows, parts]: all mass. ties i32[rows, parts, 32], of the
    last pass: keys that are the candidate. Grid (rows, parts).
    """
    row, split = tl.program_id(0), tl.program_id(1)
    t = tl.load(wanted + row)
    low = tl.zeros((), tl.int64)
    if PASS > 0:
        p = tl.load(top_p + tl.load(slot + tl.load(seq + t)))
        low, _, _, _ = cut_after(row, rows, above, lows, totals, p, parts, PASS - 1, P)
    if split == 0:
        tl.store(lows + PASS * rows + row, low)
    top = top_of(row, tops, parts, P)
    j = tl.arange(0, 32)
    candidate = low + ((j + 1).to(tl.int64) << shift_of(PASS)) - 1
    sums, equal, whole = tl.zeros((32,), tl.float32), tl.zeros((32,), tl.int32), 0.0
    first = split * part
    last = tl.minimum(first + part, vocab)
    for start in range(first, last, STEP):
        c = start + tl.arange(0, STEP)
        v = tl.load(logits + row.to(tl.int64) * vocab + c, mask=c < last, other=-float("inf"))
        v = tl.where(v != v, -float("inf"), v)
        e = tl.where(v > -float("inf"), tl.exp(v - top), 0.0)
        key = key_of(v)[:, None]
        sums += tl.sum(tl.where(key > candidate[None, :], e[:, None], 0.0), 0)
        if LAST:
            equal += tl.sum(((key == candidate[None, :]) & (c < last)[:, None]).to(tl.int32), 0)
        whole += tl.sum(e, 0)
    at = row.to(tl.int64) * parts * 32 + split * 32 + j
    tl.store(above + PASS * rows * parts * 32 + at, sums)
    if LAST:
        tl.store(ties + at, equal)
    if PASS == 0:
        tl.store(totals + row * parts + split, whole)


@triton.jit(do_not_specialize=["rows"])
def best_of_part(
    logits, wanted, seq, slot, index, temperature, seeds, min_p, top_p, tops, above, lows, totals, ties,
    best, where, rows, vocab, part, parts,
    NOISE: tl.constexpr, MIN_P: tl.constexpr, PASSES: tl.constexpr, STEP: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The best of `part` columns of one row, the lowest id on ties, never a NaN. Grid (rows, parts).

    PASSES: of `mass_above`, before this; 0 without top-p. At the cut as many of equal logits are kept as it
    takes, lowest ids first.
    """
    row, split = tl.program_id(0), tl.program_id(1)
    least = -float("inf")
    seed, place, sampled = tl.zeros((), tl.int64), 0, False
    if NOISE:
        t = tl.load(wanted + row)
        s = tl.load(slot + tl.load(seq + t)).to(tl.int64)
        place = tl.load(index + t) + 1
        seed = tl.load(seeds + s)
        sampled = tl.load(temperature + s) > 0
        if MIN_P:
            least = tl.load(min_p + s)
            below = tl.log(tl.maximum(least, 1e-30))
            least = tl.where(least > 0, top_of(row, tops, parts, P) + below, -float("inf"))
        if PASSES > 0:
            p = tl.load(top_p + s)
            cut, column, beyond, mass = cut_after(row, rows, above, lows, totals, p, parts, PASSES - 1, P)
            cut = tl.where(sampled & (p < 1), cut, -1)
            parts_before = tl.arange(0, P)
            of = ties + row.to(tl.int64) * parts * 32 + parts_before * 32 + column
            before = tl.sum(tl.load(of, mask=parts_before < split, other=0), 0)
            top = top_of(row, tops, parts, P)
    values = tl.full((STEP,), -float("inf"), tl.float32)
    ids = tl.full((STEP,), 0x7FFFFFFF, tl.int32)
    first = split * part
    last = tl.minimum(first + part, vocab)
    for start in range(first, last, STEP):
        c = start + tl.arange(0, STEP)
        v = tl.load(logits + row.to(tl.int64) * vocab + c, mask=c < last, other=-float("inf"))
        v = tl.where(v != v, -float("inf"), v)
        raw = v
        if PASSES > 0:
            key = key_of(raw)
            equal = ((key == cut) & (c < last)).to(tl.int32)
            rank = before + tl.cumsum(equal, 0) - 1
            before += tl.sum(equal, 0)
            kept = (key > cut) | ((equal > 0) & (beyond + rank * tl.exp(raw - top) < mass))
            v = tl.where(kept, v, -float("inf"))
        if MIN_P:
            v = tl.where(raw < least, -float("inf"), v)
        if NOISE:
            v = tl.where(sampled, v + gumbel(seed, place, c), v)
        better = (v > values) | ((ids == 0x7FFFFFFF) & (c < last))
        values, ids = tl.where(better, v, values), tl.where(better, c, ids)
    best_value = tl.max(values, 0)
    at = row * parts + split
    tl.store(best + at, best_value)
    tl.store(where + at, tl.min(tl.where(values == best_value, ids, 0x7FFFFFFF), 0))


@triton.jit
def best_of_parts(best, where, out, parts, P: tl.constexpr):
    """out i64[rows]. Grid (rows,). P: at least the parts."""
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
def note(picks, count, slot, ends, newest, out, ENDS: tl.constexpr):
    """out: the pick, -1 where the count is 0. newest: that, -1 too where it is an end. Grid (sequences,)."""
    s = tl.program_id(0)
    where = tl.load(slot + s)
    pick = tl.where(tl.load(count + s) > 0, tl.load(picks + s), -1)
    ids = tl.load(ends + where * ENDS + tl.arange(0, ENDS))
    ended = tl.max((ids == pick).to(tl.int32), 0) > 0
    tl.store(out + s, pick)
    tl.store(newest + where, tl.where(ended, -1, pick).to(tl.int32))
