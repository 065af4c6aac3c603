# Triton compiles these functions: no annotations, no conditional expressions.
# ruff: noqa: ANN001, ANN201, PLR0124, RUF059
"""Triton kernels that find where top-p cuts a row.

Floats are compared as integers, `key_of`. The cut is the lowest key above which less than p of the mass lies.
Two passes over the row, each over 32 ranges of keys, leave one range of it; what lies in that is listed, and
one program searches the list, for any number of them. Masses are integers, so the order in which programs add
them up is no matter.
"""

from __future__ import annotations

import triton
import triton.language as tl

RANGES = tl.constexpr(32)
"""Of a pass."""
NEAR, FALL, FAR_FALL = tl.constexpr(24), tl.constexpr(0.5), tl.constexpr(2.75)
"""How far below the best those of the first pass end: NEAR of them one FALL each, then one FAR_FALL each down
to where a million have no mass, and the last takes what is left.
"""
UNIT = tl.constexpr(float(1 << 40))
"""The mass of the best: a million like it are an i64 still, and 2^-40 of it is less than f32 sums tell."""
NOTHING = tl.constexpr(-2139095041)
"""Key of -inf."""
LARGEST = tl.constexpr(3.4028234663852886e38)
BELOW_ALL = tl.constexpr(-(1 << 31))
"""A cut that leaves everything."""
LAST_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def key_of(v):
    """i32 that orders f32 as they are; both zeros are one. Its own inverse, up to that."""
    bits = (v + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def load_row(logits, row, vocab, c, inside):
    """Columns c, -inf for NaN and outside."""
    v = tl.load(logits + row.to(tl.int64) * vocab + c, mask=inside, other=-float("inf"))
    return tl.where(v != v, -float("inf"), v)


@triton.jit
def mass_of(v, top):
    """f32 in 0 .. 1: beside the best."""
    e = tl.where(v < top, tl.exp(v - top), 1.0)
    return tl.where(v > -float("inf"), e, 0.0)


@triton.jit
def range_in(sums, bounds, high, wanted):
    """Of one pass, from the masses above its bounds: (low, high] keys with the cut, and the mass above."""
    j = tl.arange(0, RANGES)
    column = tl.minimum(tl.sum((sums < wanted).to(tl.int32), 0), RANGES - 1)
    low = tl.sum(tl.where(j == column, bounds, 0), 0)
    high = tl.where(column > 0, tl.sum(tl.where(j == column - 1, bounds, 0), 0), high)
    return low, high, tl.sum(tl.where(j == column - 1, sums, 0), 0)


@triton.jit
def passed(row, rows, tops, parts, above, share, DONE: tl.constexpr, P: tl.constexpr):
    """What DONE passes found: the best of the row, the bounds of the next pass, the range with the cut, the
    mass above that and the mass that is wanted. above: i64[2, rows, RANGES]. All loads come first.
    """
    j, s = tl.arange(0, RANGES), tl.arange(0, P)
    best = tl.load(tops + row * parts + s, mask=s < parts, other=-float("inf"))
    one = tl.load(above + row * RANGES + j, mask=j < DONE * RANGES, other=0)
    two = tl.load(above + (rows + row) * RANGES + j, mask=j < (DONE - 1) * RANGES, other=0)
    top = tl.max(best, 0)
    low, high = tl.full((), NOTHING, tl.int32), key_of(top)
    top = tl.minimum(tl.maximum(top, -LARGEST), LARGEST)
    near = tl.minimum(j + 1, NEAR)
    fall = near.to(tl.float32) * FALL + (j + 1 - near).to(tl.float32) * FAR_FALL
    bounds = tl.where(j < RANGES - 1, key_of(top - fall), NOTHING)
    beyond, wanted = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    if DONE > 0:
        whole = tl.sum(tl.where(j == RANGES - 1, one, 0), 0)
        wanted = tl.maximum(tl.ceil(share * whole.to(tl.float32)).to(tl.int64), 1)
        low, high, beyond = range_in(one, bounds, high, wanted)
        width = high.to(tl.int64) - low.to(tl.int64)
        down = (j + 1).to(tl.int64) * ((width + RANGES - 1) // RANGES)
        bounds = tl.maximum(high.to(tl.int64) - down, low.to(tl.int64)).to(tl.int32)
    if DONE > 1:
        low, high, beyond = range_in(two, bounds, high, wanted)
    return top, bounds, low, high, beyond, wanted


@triton.jit(do_not_specialize=["rows"])
def add_masses(
    logits, tops, shares, above, rows, vocab, parts, DONE: tl.constexpr, STEP: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """One pass: the mass above each bound. above: zeros before the first. Grid (rows, vocab / STEP)."""
    row, split = tl.program_id(0), tl.program_id(1)
    c = split * STEP + tl.arange(0, STEP)
    v = load_row(logits, row, vocab, c, c < vocab)
    share = tl.load(shares + row)
    if share < 1:
        top, bounds, low, high, beyond, wanted = passed(row, rows, tops, parts, above, share, DONE, P)
        higher = key_of(v)[:, None] > bounds[None, :]
        sums = tl.sum(tl.where(higher, mass_of(v, top)[:, None], 0.0), 0)
        at = above + (DONE * rows + row) * RANGES + tl.arange(0, RANGES)
        tl.atomic_add(at, (sums * UNIT).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def list_range(
    logits, tops, shares, above, found, listed, rows, vocab, parts, STEP: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """found: how many of a row lie in the range with the cut; listed: their ids, in any order. Same grid."""
    row, split = tl.program_id(0), tl.program_id(1)
    c = split * STEP + tl.arange(0, STEP)
    key = key_of(load_row(logits, row, vocab, c, c < vocab))
    share = tl.load(shares + row)
    if share < 1:
        top, bounds, low, high, beyond, wanted = passed(row, rows, tops, parts, above, share, 2, P)
        inside = ((key > low) & (key <= high)).to(tl.int32)
        count = tl.sum(inside, 0)
        if count > 0:
            place = tl.atomic_add(found + row, count, sem="relaxed") + tl.cumsum(inside, 0) - 1
            tl.store(listed + row.to(tl.int64) * vocab + place, c, mask=inside > 0)


@triton.jit
def listed_at(start, logits, listed, row, vocab, count, top, C: tl.constexpr):
    """(ids, keys, masses) of C from the list; behind its end: below all, of no mass."""
    s = start + tl.arange(0, C)
    ids = tl.load(listed + row.to(tl.int64) * vocab + s, mask=s < count, other=0)
    v = load_row(logits, row, vocab, ids, s < count)
    key = tl.where(s < count, key_of(v), BELOW_ALL)
    return ids, key, (mass_of(v, top) * UNIT).to(tl.int64)


@triton.jit
def tally(cut, key, mass, logits, listed, row, vocab, count, top, C: tl.constexpr):
    """(mass above a cut, mass at it, how many are at it) of a list, the first C of which are key and mass."""
    above = tl.sum(tl.where(key > cut, mass, 0), 0)
    at = tl.sum(tl.where(key == cut, mass, 0), 0)
    ties = tl.sum((key == cut).to(tl.int32), 0)
    for start in range(C, count, C):
        ids, keys, masses = listed_at(start, logits, listed, row, vocab, count, top, C)
        above += tl.sum(tl.where(keys > cut, masses, 0), 0)
        at += tl.sum(tl.where(keys == cut, masses, 0), 0)
        ties += tl.sum((keys == cut).to(tl.int32), 0)
    return above, at, ties


@triton.jit(do_not_specialize=["rows"])
def find_cut(
    logits, tops, shares, above, found, listed, cuts, lasts, rows, vocab, parts,
    C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """cuts i32[rows]: the key; lasts i32[rows]: the last id kept of those at it: as many as it takes, lowest
    ids first. The first C of the list stay in registers. Grid (rows,).
    """
    row = tl.program_id(0)
    share, count = tl.load(shares + row), tl.load(found + row)
    cut, last = tl.full((), BELOW_ALL, tl.int64), tl.full((), LAST_ID, tl.int64)
    if share < 1:
        top, bounds, low, high, beyond, wanted = passed(row, rows, tops, parts, above, share, 2, P)
        ids, key, mass = listed_at(0, logits, listed, row, vocab, count, top, C)
        under, cut = low.to(tl.int64), high.to(tl.int64)
        while cut - under > 1:
            middle = (cut + under) >> 1
            more, at, ties = tally(middle, key, mass, logits, listed, row, vocab, count, top, C)
            enough = beyond + more >= wanted
            under = tl.where(enough, middle, under)
            cut = tl.where(enough, cut, middle)
        more, at, ties = tally(cut, key, mass, logits, listed, row, vocab, count, top, C)
        each = tl.maximum(at // tl.maximum(ties, 1), 1)
        kept = (wanted - beyond - more + each - 1) // each
        if (at > 0) & (kept < ties):
            before, last = tl.full((), -1, tl.int64), tl.zeros((), tl.int64) + vocab - 1
            while last - before > 1:
                half = (last + before) >> 1
                lower = tl.sum(((key == cut) & (ids <= half)).to(tl.int32), 0)
                for start in range(C, count, C):
                    others, keys, masses = listed_at(start, logits, listed, row, vocab, count, top, C)
                    lower += tl.sum(((keys == cut) & (others <= half)).to(tl.int32), 0)
                before = tl.where(lower >= kept, before, half)
                last = tl.where(lower >= kept, half, last)
    tl.store(cuts + row, cut.to(tl.int32))
    tl.store(lasts + row, last.to(tl.int32))
