# Triton compiles these functions: no annotations, no conditional expressions.
# ruff: noqa: ANN001, ANN201, C901, RUF059, SIM102
"""Triton kernels that find a cut in the list of what lies around it, see `nucleus_kernels`.

Of each on the list all that come before it are counted, at once, by many programs. One program searches a
long list: of equal logits, or of a large k. With top-k the cut of top-p is found in the same list.
"""

from __future__ import annotations

import triton
import triton.language as tl

from luce_backend_triton.nucleus_kernels import (
    BELOW_ALL,
    FEW,
    LAST_ID,
    MASS,
    NONE_KEPT,
    NUCLEUS,
    PASSES,
    SIDE,
    TYPICAL,
    UNIT,
    key_of,
    load_row,
    mass_of,
    mass_wanted,
    mean_of,
    packed,
    passed,
    unpacked,
    view,
)
from luce_backend_triton.waiting import wait_for_previous


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
    decides, order, v = view(load_row(logits, row, vocab, ids, s < count), ids, row, rows, cuts, mean, STAGE)
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
def place_of(
    number, cut, logits, row, rows, vocab, floor, last, cuts, mean, STAGE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """i64: the place of the number-th of those at the cut, in the order of equal ones: one look at the row
    from its beginning, for typical-p two, since those below the mean come last.
    """
    final, before = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    for side in tl.static_range(2):
        if side == 0 or STAGE == 1:
            for start in range(0, vocab, C):
                c = start + tl.arange(0, C)
                v = load_row(logits, row, vocab, c, c < vocab)
                decides, order, v = view(v, c, row, rows, cuts, mean, STAGE)
                key = key_of(decides)
                at = (c < vocab) & (key == cut) & ((key > floor) | (order <= last))
                at = at & ((order >= SIDE) == (side == 1))
                count = tl.sum(at.to(tl.int64), 0)
                if (before < number) & (before + count >= number):
                    places = before + tl.cumsum(at.to(tl.int32), 0)
                    final = tl.min(tl.where(at & (places == number), order, LAST_ID), 0).to(tl.int64)
                before += count
    return final


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
    most = tl.max(tl.where(key <= cut, key, BELOW_ALL), 0)
    least = tl.min(tl.where(key > under, key, LAST_ID), 0)
    for start in range(C, count, C):
        others, keys, weights = listed_at(
            start, logits, listed, row, rows, vocab, count, top, floor, last, cuts, mean,
            BY_NUMBER, STAGE, C,
        )  # fmt: skip
        most = tl.maximum(most, tl.max(tl.where(keys <= cut, keys, BELOW_ALL), 0))
        least = tl.minimum(least, tl.min(tl.where(keys > under, keys, LAST_ID), 0))
    cut = tl.maximum(tl.minimum(cut, most.to(tl.int64)), under + 1)
    under = tl.minimum(tl.maximum(under, least.to(tl.int64) - 1), cut - 1)
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
        final = place_of(kept, cut, logits, row, rows, vocab, floor, last, cuts, mean, STAGE, C)
    return cut, final


@triton.jit(do_not_specialize=["rows"])
def find_cut(
    logits, tops, shares, limits, above, cuts, sums, found, listed, rows, vocab, parts,
    BY_NUMBER: tl.constexpr, AFTER: tl.constexpr, STAGE: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    MOST: tl.constexpr, ENOUGH: tl.constexpr, P: tl.constexpr, OVERLAP: tl.constexpr,
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
        top, bounds, low, high, beyond, wanted, settled = passed(
            row, rows, tops, parts, above, share, limit, STAGE, PASSES, ENOUGH, P
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
