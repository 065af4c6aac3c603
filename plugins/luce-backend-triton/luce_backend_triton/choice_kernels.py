# Triton compiles these functions: no annotations, no conditional expressions.
# ruff: noqa: ANN001, ANN201, RUF059
"""Triton kernels of what typical-p and XTC must know of a row: sums, as integers, in one pass each."""

from __future__ import annotations

import triton
import triton.language as tl

from luce_backend_triton.nucleus_kernels import (
    ALL_KEPT,
    COPIES,
    FEW,
    LARGEST,
    MEAN_FALL,
    MEAN_MASS,
    NONE_KEPT,
    NUCLEUS,
    PASSES,
    RANGES,
    TYPICAL,
    UNIT,
    is_above,
    key_of,
    load_row,
    mass_of,
    mean_of,
    packed,
    view,
)
from luce_backend_triton.waiting import wait_for_previous

LEFT, LIKELY, LEAST = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
"""Whose sums, behind those of nucleus_kernels: the mass that all filters leave; how many of it are as likely
as XTC's threshold; the cut, `packed`, of the least likely one of them.
"""
SUMS = tl.constexpr(6)
NOBODY = tl.constexpr(-1)
"""As a token: whether XTC acts is drawn under an id no vocabulary has."""


@triton.jit
def mix(x):
    """As `luce_core.ops.noise` mixes 32 bits."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def uniform(seed, index, token):
    """f32 in (0, 1) of (seed i64, index i32, token i32, one or many)."""
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    key = mix(low) ^ mix(high ^ 0x5851F42D)
    key = mix(key ^ mix(index.to(tl.uint32)))
    bits = mix(mix(token.to(tl.uint32) * 0x9E3779B1) ^ key)
    return tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)


@triton.jit
def asked_of(row, wanted, seq, slot, vocab, temperature, top_k, top_p, typical_p):
    """(k of top-k, 0 without; p of top-p, 1 without; p of typical-p, likewise) of one row."""
    s = tl.load(slot + tl.load(seq + tl.load(wanted + row))).to(tl.int64)
    sampled, k = tl.load(temperature + s) > 0, tl.load(top_k + s)
    limit = tl.where(sampled & (k > 0) & (k < vocab), k, 0).to(tl.int32)
    share, typical = tl.load(top_p + s), tl.load(typical_p + s)
    return limit, tl.where(sampled, share, 1.0), tl.where(sampled, typical, 1.0)


@triton.jit
def begin(
    row, rows, limit, share, typical, shares, limits, above, found, cuts, sums, STAGES: tl.constexpr,
):  # fmt: skip
    """What the filters of one row start with. One program. limit, share, typical: `asked_of`."""
    none, every = tl.full((), NONE_KEPT, tl.int64), tl.full((), ALL_KEPT, tl.int64)
    tl.store(cuts + FEW * rows + row, tl.where(limit > 0, none, every))
    tl.store(cuts + NUCLEUS * rows + row, tl.where(share < 1, none, every))
    tl.store(limits + row, limit)
    tl.store(shares + row, share)
    if STAGES > 1:
        tl.store(cuts + TYPICAL * rows + row, tl.where(typical < 1, none, every))
        tl.store(shares + row, 1.0)
        for stage in tl.static_range(1, STAGES):
            tl.store(limits + stage * rows + row, 0)
        tl.store(shares + rows + row, typical)
        tl.store(shares + 2 * rows + row, share)
    for place in tl.static_range(SUMS):
        tl.store(sums + place * rows + row, tl.zeros((), tl.int64))
    tl.store(sums + LEAST * rows + row, none)
    j, zeros = tl.arange(0, COPIES * RANGES), tl.zeros((COPIES * RANGES,), tl.int64)
    for stage in tl.static_range(STAGES):
        tl.store(found + stage * rows + row, 0)
        for done in tl.static_range(PASSES):
            tl.store(above + ((PASSES * stage + done) * rows + row) * (COPIES * RANGES) + j, zeros)


@triton.jit
def top_of(row, tops, parts, P: tl.constexpr):
    """The largest of a row, from those of its parts."""
    s = tl.arange(0, P)
    return tl.max(tl.load(tops + row * parts + s, mask=s < parts, other=-float("inf")), 0)


@triton.jit(do_not_specialize=["rows"])
def add_moments(
    logits, tops, shares, cuts, sums, rows, vocab, parts, STEP: tl.constexpr, P: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """sums: the mass of what top-k leaves, and mass times how far below the best. Of rows with typical-p.
    Grid (rows, vocab / STEP).
    """
    wait_for_previous(OVERLAP)
    row, split = tl.program_id(0), tl.program_id(1)
    c = split * STEP + tl.arange(0, STEP)
    v = load_row(logits, row, vocab, c, c < vocab)
    if tl.load(shares + rows + row) < 1:
        top = tl.minimum(tl.maximum(top_of(row, tops, parts, P), -LARGEST), LARGEST)
        kept = is_above(key_of(v), c, tl.load(cuts + FEW * rows + row))
        mass = tl.where(kept, mass_of(v, top), 0.0)
        fall = mass * tl.where(mass > 0, top - tl.minimum(v, top), 0.0)
        total, below = (tl.sum(mass, 0) * UNIT).to(tl.int64), (tl.sum(fall, 0) * UNIT).to(tl.int64)
        tl.atomic_add(sums + MEAN_MASS * rows + row, total, sem="relaxed")
        tl.atomic_add(sums + MEAN_FALL * rows + row, below, sem="relaxed")


@triton.jit
def left_of(
    v, c, row, rows, cuts, sums, top, least,
    CUT: tl.constexpr, STAGES: tl.constexpr, MIN_P: tl.constexpr,
):  # fmt: skip
    """Values of columns c, -inf where one of the filters cut; XTC comes behind them. least: of min-p."""
    raw = v
    if CUT:
        if STAGES > 1:
            decides, order, v = view(v, c, row, rows, cuts, mean_of(row, rows, sums, top, 2), 2)
        else:
            v = tl.where(is_above(key_of(v), c, tl.load(cuts + FEW * rows + row)), v, -float("inf"))
        v = tl.where(is_above(key_of(raw), c, tl.load(cuts + NUCLEUS * rows + row)), v, -float("inf"))
    if MIN_P:
        v = tl.where(raw < least, -float("inf"), v)
    return v


@triton.jit
def least_value(top, share):
    """f32: below it min-p cuts."""
    return tl.where(share > 0, top + tl.log(tl.maximum(share, 1e-30)), -float("inf"))


@triton.jit
def acts(t, s, index, seeds, temperature, probability):
    """Whether XTC does, in the row of the batch's row t, of slot s."""
    chance = uniform(tl.load(seeds + s), tl.load(index + t) + 1, tl.full((), NOBODY, tl.int32))
    return (chance < tl.load(probability + s)) & (tl.load(temperature + s) > 0)


@triton.jit
def is_likely(v, top, whole, threshold):
    """Whether as likely as XTC's threshold. whole: the mass of all that is left."""
    mass = tl.maximum(whole, 1).to(tl.float32) * 9.094947017729282e-13  # 1 / UNIT
    return (v > -float("inf")) & (tl.div_rn(mass_of(v, top), mass) >= threshold)


@triton.jit(do_not_specialize=["rows"])
def add_choices(
    logits, tops, cuts, sums, wanted, seq, slot, index, temperature, seeds, min_p, probability, threshold,
    rows, vocab, parts, LIKELY_ONES: tl.constexpr, CUT: tl.constexpr, STAGES: tl.constexpr,
    MIN_P: tl.constexpr, STEP: tl.constexpr, P: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """sums: the mass that is left; then LIKELY_ONES, whose number and the least of them. Of rows in which XTC
    acts. Grid (rows, vocab / STEP).
    """
    wait_for_previous(OVERLAP)
    row, split = tl.program_id(0), tl.program_id(1)
    t = tl.load(wanted + row)
    s = tl.load(slot + tl.load(seq + t)).to(tl.int64)
    c = split * STEP + tl.arange(0, STEP)
    v = load_row(logits, row, vocab, c, c < vocab)
    if acts(t, s, index, seeds, temperature, probability):
        top = tl.minimum(tl.maximum(top_of(row, tops, parts, P), -LARGEST), LARGEST)
        least = tl.full((), -float("inf"), tl.float32)
        if MIN_P:
            least = least_value(top, tl.load(min_p + s))
        v = left_of(v, c, row, rows, cuts, sums, top, least, CUT, STAGES, MIN_P)
        if LIKELY_ONES:
            likely = is_likely(v, top, tl.load(sums + LEFT * rows + row), tl.load(threshold + s))
            count = tl.sum(likely.to(tl.int64), 0)
            if count > 0:
                tl.atomic_add(sums + LIKELY * rows + row, count, sem="relaxed")
                last = tl.min(tl.where(likely, packed(key_of(v), c), NONE_KEPT), 0)
                tl.atomic_min(sums + LEAST * rows + row, last, sem="relaxed")
        else:
            mass = (tl.sum(mass_of(v, top), 0) * UNIT).to(tl.int64)
            tl.atomic_add(sums + LEFT * rows + row, mass, sem="relaxed")


@triton.jit
def without_choices(v, c, row, rows, sums, top, threshold):
    """What XTC leaves: of those as likely as the threshold the least, if there are two."""
    likely = is_likely(v, top, tl.load(sums + LEFT * rows + row), threshold)
    least = packed(key_of(v), c) == tl.load(sums + LEAST * rows + row)
    many = tl.load(sums + LIKELY * rows + row) > 1
    return tl.where(many & likely & ~least, -float("inf"), v)
