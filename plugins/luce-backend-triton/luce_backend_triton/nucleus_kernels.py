# Triton compiles these functions: no annotations, no conditional expressions.
# ruff: noqa: ANN001, ANN201, PLR0124, RUF059
"""Triton kernels that find where top-k, typical-p and top-p cut a row.

Floats are compared as integers, `key_of`. The cut of top-p is the lowest key above which less than p of the
mass lies, that of top-k above which fewer than k are; of equal ones the lowest ids come first. Passes over
the row, each over 32 ranges, leave one range of it, and what lies in that is listed; with top-k all above is,
too. `list_kernels` finds the cut in the list. Two passes leave a short list of most rows. The others do
something only where logits are nearly alike, or so far apart that the cut lies in the last range of the first
pass. Masses and counts are integers, so the order in which programs add them up is no matter.

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
PASSES = tl.constexpr(4)
"""Over a row: what the last leaves of half a nat is not more than f32 tells of logits from 4 on."""
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
    at = above + ((PASSES * STAGE + DONE) * rows + row) * (COPIES * RANGES) + j
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
def narrowed(
    sums, wanted, low, high, beyond, settled, top, limit, STAGE: tl.constexpr, ENOUGH: tl.constexpr,
):  # fmt: skip
    """(low, high, beyond, settled) after one more pass behind the first, as they are where that was settled:
    where no more than ENOUGH lie in the range, each of them of as much mass as its lower end at least. How
    far values are from a mean tells nothing of their masses.
    """
    column = column_of(sums, wanted)
    above_it = beyond_of(sums, column, beyond)
    inside = tl.sum(tl.where(tl.arange(0, RANGES) == column, sums, 0), 0) - above_it
    start = second_bound(column, low, high)
    end = tl.where(column > 0, second_bound(column - 1, low, high), high)
    low, high = tl.where(settled, low, start), tl.where(settled, high, end)
    beyond = tl.where(settled, beyond, above_it)
    if STAGE != 1:
        least = tl.where(limit > 0, 1.0, mass_of(value_of(low), top))
        settled = settled | (inside <= (least * UNIT).to(tl.int64) * ENOUGH)
    return low, high, beyond, settled


@triton.jit
def passed(
    row, rows, tops, parts, above, share, limit,
    STAGE: tl.constexpr, DONE: tl.constexpr, ENOUGH: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """What DONE passes found: the best of the row, the bounds of the next pass, the range with the cut, what
    lies above that, what is wanted, whether no more passes are. above: i64[stages, PASSES, rows, COPIES,
    RANGES]. All loads come first.
    """
    j, s = tl.arange(0, RANGES), tl.arange(0, P)
    best = tl.load(tops + row * parts + s, mask=s < parts, other=-float("inf"))
    one, two, whole = tl.zeros((RANGES,), tl.int64), tl.zeros((RANGES,), tl.int64), tl.zeros((), tl.int64)
    three, four = tl.zeros((RANGES,), tl.int64), tl.zeros((RANGES,), tl.int64)
    if DONE > 0:
        one = sums_of(above, row, rows, j, STAGE, 0)
        whole = sums_of(above, row, rows, RANGES - 1, STAGE, 0)
    if DONE > 1:
        two = sums_of(above, row, rows, j, STAGE, 1)
    if DONE > 2:
        three = sums_of(above, row, rows, j, STAGE, 2)
    if DONE > 3:
        four = sums_of(above, row, rows, j, STAGE, 3)
    top = tl.max(best, 0)
    start = top
    if STAGE == 1:  # distances, as negative numbers
        start = tl.zeros((), tl.float32)
    low, high = tl.full((), NOTHING, tl.int32), key_of(start)
    top = tl.minimum(tl.maximum(top, -LARGEST), LARGEST)
    start = tl.minimum(tl.maximum(start, -LARGEST), LARGEST)
    bounds, settled = first_bound(j, start), tl.full((), False, tl.int1)
    beyond, wanted = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    if DONE > 0:
        wanted = tl.where(limit > 0, limit.to(tl.int64) * UNIT, mass_wanted(share, whole))
        column = column_of(one, wanted)
        beyond = beyond_of(one, column, beyond)
        low, high = first_bound(column, start), tl.where(column > 0, first_bound(column - 1, start), high)
    if DONE > 1:
        low, high, beyond, settled = narrowed(
            two, wanted, low, high, beyond, settled, top, limit, STAGE, ENOUGH
        )
    if DONE > 2:
        low, high, beyond, settled = narrowed(
            three, wanted, low, high, beyond, settled, top, limit, STAGE, ENOUGH
        )
    if DONE > 3:
        low, high, beyond, settled = narrowed(
            four, wanted, low, high, beyond, settled, top, limit, STAGE, ENOUGH
        )
    if DONE > 0:
        bounds = second_bound(j, low, high)
    return top, bounds, low, high, beyond, wanted, settled


@triton.jit(do_not_specialize=["rows"])
def add_masses(
    logits, tops, shares, limits, above, cuts, sums, rows, vocab, parts,
    STAGE: tl.constexpr, DONE: tl.constexpr, ENOUGH: tl.constexpr, STEP: tl.constexpr, P: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One pass: the mass above each bound, or with a limit the number. above: zeros before the first; none is
    added where the passes before left no more than ENOUGH of the row. shares f32[stages, rows]: p, 1 without;
    limits i32[stages, rows]: k, 0 without. Grid (rows, vocab / STEP).
    """
    wait_for_previous(OVERLAP)
    row, split = tl.program_id(0), tl.program_id(1)
    c = split * STEP + tl.arange(0, STEP)
    v = tl.full((STEP,), -float("inf"), tl.float32)
    if DONE < 2:
        v = load_row(logits, row, vocab, c, c < vocab)
    share, limit = tl.load(shares + STAGE * rows + row), tl.load(limits + STAGE * rows + row)
    if (share < 1) | (limit > 0):
        top, bounds, low, high, beyond, wanted, settled = passed(
            row, rows, tops, parts, above, share, limit, STAGE, DONE, ENOUGH, P
        )
        if not settled:
            if DONE > 1:
                v = load_row(logits, row, vocab, c, c < vocab)
            mean = mean_of(row, rows, sums, top, STAGE)
            decides, order, v = view(v, c, row, rows, cuts, mean, STAGE)
            weight = tl.where(limit > 0, 1.0, mass_of(v, top))
            higher = key_of(decides)[:, None] > bounds[None, :]
            found = tl.sum(tl.where(higher, weight[:, None], 0.0), 0)
            place = ((PASSES * STAGE + DONE) * rows + row) * COPIES + split % COPIES
            at = above + place * RANGES + tl.arange(0, RANGES)
            tl.atomic_add(at, (found * UNIT).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def list_range(
    logits, tops, shares, limits, above, cuts, sums, found, listed, rows, vocab, parts,
    STAGE: tl.constexpr, ENOUGH: tl.constexpr, STEP: tl.constexpr, P: tl.constexpr, OVERLAP: tl.constexpr,
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
        top, bounds, low, high, beyond, wanted, settled = passed(
            row, rows, tops, parts, above, share, limit, STAGE, PASSES, ENOUGH, P
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
