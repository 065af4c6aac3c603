# Triton compiles these functions: no annotations, no conditional expressions.
# ruff: noqa: ANN001, ANN201, PLR0124, RUF059
"""Triton kernels that find where top-k and top-p cut a row.

Floats are compared as integers, `key_of`. The cut of top-p is the lowest key above which less than p of the
mass lies, that of top-k above which fewer than k are. Two passes over the row, each over 32 ranges of keys,
leave one range of it; what lies in that is listed, and one program searches the list, for any number of them.
With top-k all above is listed too, and the cut of top-p is then searched for in the list. Masses and counts
are integers, so the order in which programs add them up is no matter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from luce_backend_triton.waiting import wait_for_previous

RANGES = tl.constexpr(32)
"""Of a pass."""
NEAR, FALL, FAR_FALL = tl.constexpr(24), tl.constexpr(0.5), tl.constexpr(2.75)
"""How far below the best those of the first pass end: NEAR of them one FALL each, then one FAR_FALL each down
to where a million have no mass, and the last takes what is left.
"""
UNIT = tl.constexpr(1 << 40)
"""One counted, and the mass of the best: a million like it are an i64 still, and 2^-40 of it is less than f32
sums tell.
"""
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
def value_of(key):
    """f32 of which `key_of` makes that, within what is finite."""
    v = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.minimum(tl.maximum(v, -LARGEST), LARGEST)


@triton.jit
def divided(low, high):
    """Lower bounds, i32 keys, of the ranges that (low, high] is cut into: evenly by value, since nearly all
    keys of a range about zero lie so close to it that no value has them; below all other ranges by key.

    One step has 16 bits, so that its multiples are exact: whoever multiplies and subtracts at once, or not,
    has the same bounds.
    """
    j = tl.arange(0, RANGES) + 1
    width = high.to(tl.int64) - low.to(tl.int64)
    down = j.to(tl.int64) * ((width + RANGES - 1) // RANGES)
    bounds = tl.maximum(high.to(tl.int64) - down, low.to(tl.int64)).to(tl.int32)
    if low > NOTHING:
        start = value_of(high)
        step = (start - value_of(low)) * (1 / RANGES)
        step = (step.to(tl.int32, bitcast=True) & -256).to(tl.float32, bitcast=True)
        bounds = tl.maximum(key_of(start - j.to(tl.float32) * step), low)
    return tl.where(j < RANGES, bounds, low)


@triton.jit
def range_in(sums, bounds, high, beyond, wanted):
    """Of one pass, from the masses above its bounds: (low, high] keys with the cut, and the mass above. high,
    beyond: of all its ranges.
    """
    j = tl.arange(0, RANGES)
    column = tl.minimum(tl.sum((sums < wanted).to(tl.int32), 0), RANGES - 1)
    low = tl.sum(tl.where(j == column, bounds, 0), 0)
    high = tl.where(column > 0, tl.sum(tl.where(j == column - 1, bounds, 0), 0), high)
    return low, high, tl.where(column > 0, tl.sum(tl.where(j == column - 1, sums, 0), 0), beyond)


@triton.jit
def mass_wanted(share, whole):
    """i64, at least 1: the best is always kept."""
    return tl.maximum(tl.ceil(share * whole.to(tl.float32)).to(tl.int64), 1)


@triton.jit
def passed(row, rows, tops, parts, above, share, limit, DONE: tl.constexpr, P: tl.constexpr):
    """What DONE passes found: the best of the row and its key, the bounds of the next pass, the range with
    the cut, what lies above that, what is wanted. above: i64[2, rows, RANGES]. All loads come first.
    """
    j, s = tl.arange(0, RANGES), tl.arange(0, P)
    best = tl.load(tops + row * parts + s, mask=s < parts, other=-float("inf"))
    one = tl.load(above + row * RANGES + j, mask=j < DONE * RANGES, other=0)
    two = tl.load(above + (rows + row) * RANGES + j, mask=j < (DONE - 1) * RANGES, other=0)
    top = tl.max(best, 0)
    highest = key_of(top)
    low, high = tl.full((), NOTHING, tl.int32), highest
    top = tl.minimum(tl.maximum(top, -LARGEST), LARGEST)
    near = tl.minimum(j + 1, NEAR)
    fall = near.to(tl.float32) * FALL + (j + 1 - near).to(tl.float32) * FAR_FALL
    bounds = tl.where(j < RANGES - 1, key_of(top - fall), NOTHING)
    beyond, wanted = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    if DONE > 0:
        whole = tl.sum(tl.where(j == RANGES - 1, one, 0), 0)
        wanted = tl.where(limit > 0, limit.to(tl.int64) * UNIT, mass_wanted(share, whole))
        low, high, beyond = range_in(one, bounds, high, beyond, wanted)
        bounds = divided(low, high)
    if DONE > 1:
        low, high, beyond = range_in(two, bounds, high, beyond, wanted)
    return top, highest, bounds, low, high, beyond, wanted


@triton.jit(do_not_specialize=["rows"])
def add_masses(
    logits, tops, shares, limits, above, rows, vocab, parts,
    DONE: tl.constexpr, STEP: tl.constexpr, P: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One pass: the mass above each bound, or with a limit the number. above: zeros before the first.
    shares f32[rows]: p, 1 without; limits i32[rows]: k, 0 without. Grid (rows, vocab / STEP).
    """
    wait_for_previous(OVERLAP)
    row, split = tl.program_id(0), tl.program_id(1)
    c = split * STEP + tl.arange(0, STEP)
    v = load_row(logits, row, vocab, c, c < vocab)
    share, limit = tl.load(shares + row), tl.load(limits + row)
    if (share < 1) | (limit > 0):
        top, highest, bounds, low, high, beyond, wanted = passed(
            row, rows, tops, parts, above, share, limit, DONE, P
        )
        weight = tl.where(limit > 0, 1.0, mass_of(v, top))
        higher = key_of(v)[:, None] > bounds[None, :]
        sums = tl.sum(tl.where(higher, weight[:, None], 0.0), 0)
        at = above + (DONE * rows + row) * RANGES + tl.arange(0, RANGES)
        tl.atomic_add(at, (sums * UNIT).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def list_range(
    logits, tops, shares, limits, above, found, listed, rows, vocab, parts,
    STEP: tl.constexpr, P: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """found: how many of a row lie in the range with the cut, or with a limit anywhere above its end; listed:
    their ids, in any order. Same grid.
    """
    wait_for_previous(OVERLAP)
    row, split = tl.program_id(0), tl.program_id(1)
    c = split * STEP + tl.arange(0, STEP)
    key = key_of(load_row(logits, row, vocab, c, c < vocab))
    share, limit = tl.load(shares + row), tl.load(limits + row)
    if (share < 1) | (limit > 0):
        top, highest, bounds, low, high, beyond, wanted = passed(
            row, rows, tops, parts, above, share, limit, 2, P
        )
        inside = ((key > low) & ((key <= high) | (limit > 0))).to(tl.int32)
        count = tl.sum(inside, 0)
        if count > 0:
            place = tl.atomic_add(found + row, count, sem="relaxed") + tl.cumsum(inside, 0) - 1
            tl.store(listed + row.to(tl.int64) * vocab + place, c, mask=inside > 0)


@triton.jit
def listed_at(
    start, logits, listed, row, vocab, count, top, floor, last, BY_NUMBER: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """(ids, keys, weights) of C from the list. Below all, of no weight: what lies behind its end, below
    `floor`, or at it with an id beyond `last`.
    """
    s = start + tl.arange(0, C)
    ids = tl.load(listed + row.to(tl.int64) * vocab + s, mask=s < count, other=0)
    v = load_row(logits, row, vocab, ids, s < count)
    key = key_of(v)
    counts = (s < count) & ((key > floor) | ((key == floor) & (ids <= last)))
    weight = tl.full((C,), UNIT, tl.int64)
    if not BY_NUMBER:
        weight = (mass_of(v, top) * UNIT).to(tl.int64)
    return ids, tl.where(counts, key, BELOW_ALL), tl.where(counts, weight, 0)


@triton.jit
def search(
    under, cut, wanted, logits, listed, row, vocab, count, top, floor, last,
    BY_NUMBER: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The cut in (under, cut], keys in i64, and the last id kept of those at it: as many as it takes, lowest
    ids first. The first C of the list stay in registers.
    """
    ids, key, weight = listed_at(0, logits, listed, row, vocab, count, top, floor, last, BY_NUMBER, C)
    while cut - under > 1:
        middle = (cut + under) >> 1
        more = tl.sum(tl.where(key > middle, weight, 0), 0)
        for start in range(C, count, C):
            others, keys, weights = listed_at(
                start, logits, listed, row, vocab, count, top, floor, last, BY_NUMBER, C
            )
            more += tl.sum(tl.where(keys > middle, weights, 0), 0)
        under = tl.where(more >= wanted, middle, under)
        cut = tl.where(more >= wanted, cut, middle)
    more = tl.sum(tl.where(key > cut, weight, 0), 0)
    at = tl.sum(tl.where(key == cut, weight, 0), 0)
    ties = tl.sum((key == cut).to(tl.int32), 0)
    for start in range(C, count, C):
        others, keys, weights = listed_at(
            start, logits, listed, row, vocab, count, top, floor, last, BY_NUMBER, C
        )
        more += tl.sum(tl.where(keys > cut, weights, 0), 0)
        at += tl.sum(tl.where(keys == cut, weights, 0), 0)
        ties += tl.sum((keys == cut).to(tl.int32), 0)
    each = tl.maximum(at // tl.maximum(ties, 1), 1)
    kept = (wanted - more + each - 1) // each
    final = tl.where(cut == floor, last, tl.full((), LAST_ID, tl.int64))
    if (at > 0) & (kept < ties):
        before, final = tl.full((), -1, tl.int64), tl.zeros((), tl.int64) + vocab - 1
        while final - before > 1:
            half = (final + before) >> 1
            lower = tl.sum(((key == cut) & (ids <= half)).to(tl.int32), 0)
            for start in range(C, count, C):
                others, keys, weights = listed_at(
                    start, logits, listed, row, vocab, count, top, floor, last, BY_NUMBER, C
                )
                lower += tl.sum(((keys == cut) & (others <= half)).to(tl.int32), 0)
            before = tl.where(lower >= kept, before, half)
            final = tl.where(lower >= kept, half, final)
    return cut, final


@triton.jit(do_not_specialize=["rows"])
def find_cut(
    logits, tops, shares, limits, above, found, listed, cuts, lasts, rows, vocab, parts,
    C: tl.constexpr, P: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """cuts i32[rows]: the key; lasts i32[rows]: the last id kept of those at it. Top-k first, then top-p of
    what that leaves. Grid (rows,).
    """
    wait_for_previous(OVERLAP)
    row = tl.program_id(0)
    share, limit, count = tl.load(shares + row), tl.load(limits + row), tl.load(found + row)
    cut, last = tl.full((), BELOW_ALL, tl.int64), tl.full((), LAST_ID, tl.int64)
    if (share < 1) | (limit > 0):
        top, highest, bounds, low, high, beyond, wanted = passed(
            row, rows, tops, parts, above, share, limit, 2, P
        )
        under, upper = low.to(tl.int64), high.to(tl.int64)
        if limit > 0:
            cut, last = search(
                under, upper, wanted, logits, listed, row, vocab, count, top, cut, last, True, C
            )
            whole = tl.zeros((), tl.int64)
            for start in range(0, count, C):
                ids, keys, masses = listed_at(
                    start, logits, listed, row, vocab, count, top, cut, last, False, C
                )
                whole += tl.sum(masses, 0)
            under, upper = cut - 1, highest.to(tl.int64)
            beyond, wanted = tl.zeros((), tl.int64), mass_wanted(share, whole)
        if share < 1:
            cut, last = search(
                under, upper, wanted - beyond, logits, listed, row, vocab, count, top, cut, last, False, C
            )
    tl.store(cuts + row, cut.to(tl.int32))
    tl.store(lasts + row, last.to(tl.int32))
