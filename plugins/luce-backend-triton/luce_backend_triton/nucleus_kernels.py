# Triton compiles these functions: no annotations, no conditional expressions.
# ruff: noqa: ANN001, ANN201, C901, PLR0124, RUF059, SIM102
"""Triton kernels that find where top-k, typical-p and top-p cut a row.

Floats are compared as integers, `key_of`. The cut of top-p is the lowest key above which less than p of the
mass lies, that of top-k above which fewer than k are; of equal ones the lowest ids come first. Two passes
over the row, each over 32 ranges, leave one range of it, and what lies in that is listed. Of each on the list
all that come before it are counted, at once, by many programs; one program searches a long list. With top-k
all above is listed too, and the cut of top-p is then found in the list. Masses and counts are integers, so
the order in which programs add them up is no matter.

Typical-p is a cut too, of a row put in the order of how far its values are from their mean: the surprise of a
token, less that of the distribution. Its filters are up to three stages, each within what the ones before it
left: 0 top-k, and top-p where there is no typical-p; 1 typical-p; 2 top-p behind it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from luce_backend_triton.waiting import wait_for_previous

RANGES = tl.constexpr(32)
"""Of a pass."""
COPIES = tl.constexpr(4)
"""Of the sums of a pass: programs take turns, so that fewer wait for each other at one place."""
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
SIDE = tl.constexpr(1 << 30)
"""Added to the ids of values below the mean: of two as far from it, the other comes first."""
FEW, TYPICAL, NUCLEUS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Whose cuts: i64[3, rows]."""
MASS, MEAN_MASS, MEAN_FALL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Whose sums: i64[.., rows]: of what top-k leaves; of what typical-p sees, and how far below the best."""
NONE_KEPT, ALL_KEPT = tl.constexpr((1 << 63) - 1), tl.constexpr(-(1 << 63))
"""Cuts, `packed`."""


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
def packed(key, last):
    """i64, the smaller the more is kept: all above the key, and those at it with an id up to `last`."""
    return (key.to(tl.int64) << 32) | (last ^ LAST_ID).to(tl.int64)


@triton.jit
def unpacked(cut):
    """(key, last) of `packed`."""
    return (cut >> 32).to(tl.int32), ((cut & 0xFFFFFFFF) ^ LAST_ID).to(tl.int32)


@triton.jit
def is_above(key, order, cut):
    """Whether it is kept. cut: `packed`."""
    least, last = unpacked(cut)
    return (key > least) | ((key == least) & (order <= last))


@triton.jit
def mean_of(row, rows, sums, top, STAGE: tl.constexpr):
    """f32, of the values by their mass: what typical-p looks at."""
    mean = top
    if STAGE > 0:
        fall = tl.load(sums + MEAN_FALL * rows + row).to(tl.float32)
        mass = tl.load(sums + MEAN_MASS * rows + row).to(tl.float32)
        mean = top - tl.div_rn(fall, tl.maximum(mass, 1.0))
    return mean


@triton.jit
def view(v, c, row, rows, cuts, mean, STAGE: tl.constexpr):
    """How a stage sees columns c: (what decides, in which order equal ones come, their values): -inf where a
    stage before it cut.
    """
    decides, order = v, c
    if STAGE > 0:
        v = tl.where(is_above(key_of(v), c, tl.load(cuts + FEW * rows + row)), v, -float("inf"))
        near = tl.where(v > -float("inf"), -tl.abs(v - mean), -float("inf"))
        side = c + tl.where(v < mean, SIDE, 0)
        decides, order = near, side
        if STAGE > 1:
            typical = is_above(key_of(near), side, tl.load(cuts + TYPICAL * rows + row))
            v = tl.where(typical, v, -float("inf"))
            decides, order = v, c
    return decides, order, v


@triton.jit
def first_bound(j, top):
    """Lower bound, an i32 key, of range j of the first pass. j: i32, one or many."""
    near = tl.minimum(j + 1, NEAR)
    fall = near.to(tl.float32) * FALL + (j + 1 - near).to(tl.float32) * FAR_FALL
    return tl.where(j < RANGES - 1, key_of(top - fall), NOTHING)


@triton.jit
def second_bound(j, low, high):
    """Likewise of range j of those that (low, high] is cut into: evenly by value, since nearly all keys of a
    range about zero lie so close to it that no value has them; below all other ranges by key.

    One step has 16 bits, so that its multiples are exact: whoever multiplies and subtracts at once, or not,
    has the same bounds.
    """
    width = high.to(tl.int64) - low.to(tl.int64)
    down = (j + 1).to(tl.int64) * ((width + RANGES - 1) // RANGES)
    bound = tl.maximum(high.to(tl.int64) - down, low.to(tl.int64)).to(tl.int32)
    if low > NOTHING:
        start = value_of(high)
        step = (start - value_of(low)) * (1 / RANGES)
        step = (step.to(tl.int32, bitcast=True) & -256).to(tl.float32, bitcast=True)
        bound = tl.maximum(key_of(start - (j + 1).to(tl.float32) * step), low)
    return tl.where(j < RANGES - 1, bound, low)


@triton.jit
def sums_of(above, row, rows, j, STAGE: tl.constexpr, DONE: tl.constexpr):
    """i64: what a pass found above the bounds j."""
    at = above + ((2 * STAGE + DONE) * rows + row) * (COPIES * RANGES) + j
    sums = tl.load(at)
    for copy in tl.static_range(1, COPIES):
        sums += tl.load(at + copy * RANGES)
    return sums


@triton.jit
def column_of(sums, wanted):
    """i32: the range with the cut."""
    return tl.minimum(tl.sum((sums < wanted).to(tl.int32), 0), RANGES - 1)


@triton.jit
def beyond_of(sums, column, beyond):
    """i64: what lies above that range. beyond: what lies above all."""
    j = tl.arange(0, RANGES)
    return tl.where(column > 0, tl.sum(tl.where(j == column - 1, sums, 0), 0), beyond)


@triton.jit
def mass_wanted(share, whole):
    """i64, at least 1: the best is always kept."""
    return tl.maximum(tl.ceil(share * whole.to(tl.float32)).to(tl.int64), 1)


@triton.jit
def passed(
    row, rows, tops, parts, above, share, limit, STAGE: tl.constexpr, DONE: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """What DONE passes found: the best of the row, the bounds of the next pass, the range with the cut, what
    lies above that, what is wanted. above: i64[stages, 2, rows, COPIES, RANGES]. All loads come first.
    """
    j, s = tl.arange(0, RANGES), tl.arange(0, P)
    best = tl.load(tops + row * parts + s, mask=s < parts, other=-float("inf"))
    one, two, whole = tl.zeros((RANGES,), tl.int64), tl.zeros((RANGES,), tl.int64), tl.zeros((), tl.int64)
    if DONE > 0:
        one = sums_of(above, row, rows, j, STAGE, 0)
        whole = sums_of(above, row, rows, RANGES - 1, STAGE, 0)
    if DONE > 1:
        two = sums_of(above, row, rows, j, STAGE, 1)
    top = tl.max(best, 0)
    start = top
    if STAGE == 1:  # distances, as negative numbers
        start = tl.zeros((), tl.float32)
    low, high = tl.full((), NOTHING, tl.int32), key_of(start)
    top = tl.minimum(tl.maximum(top, -LARGEST), LARGEST)
    start = tl.minimum(tl.maximum(start, -LARGEST), LARGEST)
    bounds = first_bound(j, start)
    beyond, wanted = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    if DONE > 0:
        wanted = tl.where(limit > 0, limit.to(tl.int64) * UNIT, mass_wanted(share, whole))
        column = column_of(one, wanted)
        beyond = beyond_of(one, column, beyond)
        low, high = first_bound(column, start), tl.where(column > 0, first_bound(column - 1, start), high)
        bounds = second_bound(j, low, high)
    if DONE > 1:
        column = column_of(two, wanted)
        beyond = beyond_of(two, column, beyond)
        end = tl.where(column > 0, second_bound(column - 1, low, high), high)
        low, high = second_bound(column, low, high), end
    return top, bounds, low, high, beyond, wanted


@triton.jit(do_not_specialize=["rows"])
def add_masses(
    logits, tops, shares, limits, above, cuts, sums, rows, vocab, parts,
    STAGE: tl.constexpr, DONE: tl.constexpr, STEP: tl.constexpr, P: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One pass: the mass above each bound, or with a limit the number. above: zeros before the first.
    shares f32[stages, rows]: p, 1 without; limits i32[stages, rows]: k, 0 without. Grid (rows, vocab / STEP).
    """
    wait_for_previous(OVERLAP)
    row, split = tl.program_id(0), tl.program_id(1)
    c = split * STEP + tl.arange(0, STEP)
    v = load_row(logits, row, vocab, c, c < vocab)
    share, limit = tl.load(shares + STAGE * rows + row), tl.load(limits + STAGE * rows + row)
    if (share < 1) | (limit > 0):
        top, bounds, low, high, beyond, wanted = passed(
            row, rows, tops, parts, above, share, limit, STAGE, DONE, P
        )
        mean = mean_of(row, rows, sums, top, STAGE)
        decides, order, v = view(v, c, row, rows, cuts, mean, STAGE)
        weight = tl.where(limit > 0, 1.0, mass_of(v, top))
        higher = key_of(decides)[:, None] > bounds[None, :]
        found = tl.sum(tl.where(higher, weight[:, None], 0.0), 0)
        place = ((2 * STAGE + DONE) * rows + row) * COPIES + split % COPIES
        at = above + place * RANGES + tl.arange(0, RANGES)
        tl.atomic_add(at, (found * UNIT).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def list_range(
    logits, tops, shares, limits, above, cuts, sums, found, listed, rows, vocab, parts,
    STAGE: tl.constexpr, STEP: tl.constexpr, P: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """found: how many of a row lie in the range with the cut, or with a limit anywhere above its end; listed:
    their ids, in any order. Same grid.
    """
    wait_for_previous(OVERLAP)
    row, split = tl.program_id(0), tl.program_id(1)
    c = split * STEP + tl.arange(0, STEP)
    v = load_row(logits, row, vocab, c, c < vocab)
    share, limit = tl.load(shares + STAGE * rows + row), tl.load(limits + STAGE * rows + row)
    if (share < 1) | (limit > 0):
        top, bounds, low, high, beyond, wanted = passed(
            row, rows, tops, parts, above, share, limit, STAGE, 2, P
        )
        mean = mean_of(row, rows, sums, top, STAGE)
        decides, order, v = view(v, c, row, rows, cuts, mean, STAGE)
        key = key_of(decides)
        inside = ((key > low) & ((key <= high) | (limit > 0))).to(tl.int32)
        count = tl.sum(inside, 0)
        if count > 0:
            before = tl.atomic_add(found + STAGE * rows + row, count, sem="relaxed")
            place = before + tl.cumsum(inside, 0) - 1
            tl.store(listed + row.to(tl.int64) * vocab + place, c, mask=inside > 0)


@triton.jit
def listed_at(
    start, logits, listed, row, rows, vocab, count, top, floor, last, cuts, mean,
    BY_NUMBER: tl.constexpr, STAGE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """(places in the order of equal ones, keys, weights) of C from the list. Below all, of no weight: what
    lies behind its end, below `floor`, or at it with an id beyond `last`.
    """
    s = start + tl.arange(0, C)
    ids = tl.load(listed + row.to(tl.int64) * vocab + s, mask=s < count, other=0)
    decides, order, v = view(
        load_row(logits, row, vocab, ids, s < count), ids, row, rows, cuts, mean, STAGE
    )
    key = key_of(decides)
    counts = (s < count) & ((key > floor) | ((key == floor) & (order <= last)))
    weight = tl.full((C,), UNIT, tl.int64)
    if not BY_NUMBER:
        weight = (mass_of(v, top) * UNIT).to(tl.int64)
    return order, tl.where(counts, key, BELOW_ALL), tl.where(counts, weight, 0)


@triton.jit
def mass_of_list(logits, listed, row, rows, vocab, count, top, floor, last, cuts, C: tl.constexpr):
    """i64: of all on the list from `floor` on."""
    whole = tl.zeros((), tl.int64)
    for start in range(0, count, C):
        ids, keys, each = listed_at(
            start, logits, listed, row, rows, vocab, count, top, floor, last, cuts, top, False, 0, C
        )
        whole += tl.sum(each, 0)
    return whole


@triton.jit
def counted(
    first, wanted, logits, listed, row, rows, vocab, count, top, floor, last, cuts, mean,
    BY_NUMBER: tl.constexpr, STAGE: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """(the cut among N of the list, `packed`, NONE_KEPT where all of them lie below it; the masses of those
    kept). Kept is before which less than what is wanted lies.
    """
    ids, key, weight = listed_at(
        first, logits, listed, row, rows, vocab, count, top, floor, last, cuts, mean, BY_NUMBER, STAGE, N
    )
    before = tl.zeros((N,), tl.int64)
    for start in range(0, count, C):
        others, keys, weights = listed_at(
            start, logits, listed, row, rows, vocab, count, top, floor, last, cuts, mean,
            BY_NUMBER, STAGE, C,
        )  # fmt: skip
        same = (keys[None, :] == key[:, None]) & (others[None, :] < ids[:, None])
        ahead = (keys[None, :] > key[:, None]) | same
        before += tl.sum(tl.where(ahead, weights[None, :], 0), 1)
    kept = (key > BELOW_ALL) & (before < wanted)
    mass = weight
    if BY_NUMBER:
        v = load_row(logits, row, vocab, ids, kept)
        mass = (mass_of(v, top) * UNIT).to(tl.int64)
    return tl.min(tl.where(kept, packed(key, ids), NONE_KEPT), 0), tl.sum(tl.where(kept, mass, 0), 0)


@triton.jit
def search(
    under, cut, wanted, logits, listed, row, rows, vocab, count, top, floor, last, cuts, mean,
    BY_NUMBER: tl.constexpr, STAGE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The cut in (under, cut], keys in i64, and the last id kept of those at it: as many as it takes, lowest
    ids first. The first C of the list stay in registers.
    """
    ids, key, weight = listed_at(
        0, logits, listed, row, rows, vocab, count, top, floor, last, cuts, mean, BY_NUMBER, STAGE, C
    )
    while cut - under > 1:
        middle = (cut + under) >> 1
        more = tl.sum(tl.where(key > middle, weight, 0), 0)
        for start in range(C, count, C):
            others, keys, weights = listed_at(
                start, logits, listed, row, rows, vocab, count, top, floor, last, cuts, mean,
                BY_NUMBER, STAGE, C,
            )  # fmt: skip
            more += tl.sum(tl.where(keys > middle, weights, 0), 0)
        under = tl.where(more >= wanted, middle, under)
        cut = tl.where(more >= wanted, cut, middle)
    more = tl.sum(tl.where(key > cut, weight, 0), 0)
    at = tl.sum(tl.where(key == cut, weight, 0), 0)
    ties = tl.sum((key == cut).to(tl.int32), 0)
    for start in range(C, count, C):
        others, keys, weights = listed_at(
            start, logits, listed, row, rows, vocab, count, top, floor, last, cuts, mean,
            BY_NUMBER, STAGE, C,
        )  # fmt: skip
        more += tl.sum(tl.where(keys > cut, weights, 0), 0)
        at += tl.sum(tl.where(keys == cut, weights, 0), 0)
        ties += tl.sum((keys == cut).to(tl.int32), 0)
    each = tl.maximum(at // tl.maximum(ties, 1), 1)
    kept = (wanted - more + each - 1) // each
    final = tl.where(cut == floor, last, tl.full((), LAST_ID, tl.int64))
    if (at > 0) & (kept < ties):
        before, final = tl.full((), -1, tl.int64), tl.full((), LAST_ID, tl.int64)
        while final - before > 1:
            half = (final + before) >> 1
            lower = tl.sum(((key == cut) & (ids <= half)).to(tl.int32), 0)
            for start in range(C, count, C):
                others, keys, weights = listed_at(
                    start, logits, listed, row, rows, vocab, count, top, floor, last, cuts, mean,
                    BY_NUMBER, STAGE, C,
                )  # fmt: skip
                lower += tl.sum(((keys == cut) & (others <= half)).to(tl.int32), 0)
            before = tl.where(lower >= kept, before, half)
            final = tl.where(lower >= kept, half, final)
    return cut, final


@triton.jit(do_not_specialize=["rows"])
def find_cut(
    logits, tops, shares, limits, above, cuts, sums, found, listed, rows, vocab, parts,
    BY_NUMBER: tl.constexpr, AFTER: tl.constexpr, STAGE: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    MOST: tl.constexpr, P: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """cuts i64[3, rows], `packed`, NONE_KEPT before. BY_NUMBER: that of top-k, and into sums i64[.., rows]
    the mass of what it leaves. Else that of typical-p or top-p; AFTER: of what top-k leaves, all of which is
    listed. Grid (rows, programs).
    """
    wait_for_previous(OVERLAP)
    row, split = tl.program_id(0), tl.program_id(1)
    share, limit = tl.load(shares + STAGE * rows + row), tl.load(limits + STAGE * rows + row)
    count = tl.load(found + STAGE * rows + row)
    out = cuts + NUCLEUS * rows + row
    wants = share < 1
    if STAGE == 1:
        out = cuts + TYPICAL * rows + row
    if BY_NUMBER:
        out = cuts + FEW * rows + row
        wants = limit > 0
    if wants & ((split == 0) | (split * N < count)):
        floor, last = tl.full((), BELOW_ALL, tl.int32), tl.full((), LAST_ID, tl.int32)
        top, bounds, low, high, beyond, wanted = passed(
            row, rows, tops, parts, above, share, limit, STAGE, 2, P
        )
        mean = mean_of(row, rows, sums, top, STAGE)
        under, upper = low.to(tl.int64), high.to(tl.int64)
        if AFTER:
            if limit > 0:
                floor, last = unpacked(tl.load(cuts + FEW * rows + row))
                under, upper = floor.to(tl.int64) - 1, key_of(top).to(tl.int64)
                beyond, wanted = tl.zeros((), tl.int64), mass_wanted(share, tl.load(sums + MASS * rows + row))
        if not BY_NUMBER:
            wanted -= beyond
        if count <= MOST:
            for first in range(split * N, count, tl.num_programs(1) * N):
                cut, mass = counted(
                    first, wanted, logits, listed, row, rows, vocab, count, top, floor, last, cuts, mean,
                    BY_NUMBER, STAGE, N, C,
                )  # fmt: skip
                if cut < NONE_KEPT:
                    tl.atomic_min(out, cut, sem="relaxed")
                    if BY_NUMBER:
                        tl.atomic_add(sums + MASS * rows + row, mass, sem="relaxed")
        elif split == 0:
            key, end = search(
                under, upper, wanted, logits, listed, row, rows, vocab, count, top, floor, last, cuts, mean,
                BY_NUMBER, STAGE, C,
            )  # fmt: skip
            tl.store(out, packed(key, end))
            if BY_NUMBER:
                mass = mass_of_list(logits, listed, row, rows, vocab, count, top, key, end, cuts, C)
                tl.store(sums + MASS * rows + row, mass)
