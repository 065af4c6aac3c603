"""How attention is cut into programs: tiles of rows and places, and parts of the text. Fixed tables, no
tuning at run time.
"""

from __future__ import annotations

from functools import lru_cache

import triton
from attrs import evolve, frozen

FEW, FEW_PROGRAMS, MANY_PROGRAMS = 32, 3, 1
"""Programs a launch should have for each multiprocessor, where the text is long enough to split: for tiles of
at most FEW rows · heads, and for others, whose partial sums are larger.
"""
ALONE = 128
"""Places that one program of at most FEW rows · heads takes in turn, rather than another launch its parts."""
HASTY = 8
"""Warps of such a program where each has a multiprocessor to itself: less for a thread to do in turn."""
TILES = ((128, 64), (128, 32), (64, 64), (64, 32), (64, 16))
"""Rows · heads and places of a tile of a long chunk, best first where they fit."""
DEEP, DEEP_BYTES = 5, 200 << 10
"""Stages of a program of few rows, with two tiles of pages on their way, and shared memory from which on
there is room for three such programs. A table's entry is one load, the page behind it another, so that a tile
takes two stages.
"""
SPARE_BYTES = 4096
"""Of shared memory, for what is not a tile."""
COMPANY = 32
"""Sequences among which a program looks for its own, at least: each size is a kernel of its own."""


@frozen
class Cut:
    """How `attend` is cut."""

    rows: int
    """Rows of the batch in a tile; with their query heads they fill `m`."""
    m: int
    places: int
    warps: int
    stages: int
    splits: int = 1
    """Parts of the places."""

    def tiles(self, rows: int, seqs: int) -> int:
        """At most so many hold all rows."""
        return -(-rows // self.rows) if seqs == 1 else rows // self.rows + seqs


@frozen
class Room:
    """What limits a program on one device."""

    multiprocessors: int
    shared_bytes: int
    matrix: bool
    """Whether Triton uses its tensor cores (compute capability 8.0 and newer)."""


@lru_cache(maxsize=4096)
def cut(
    rows: int, seqs: int, places: int, heads: int, kv_heads: int, width: int, num_bytes: int, room: Room
) -> Cut:
    """For `rows` rows of `seqs` sequences, each with at most so many places. width: of K and V, rounded up;
    num_bytes: of one number.

    Large tiles read pages seldom, small ones make programs: the largest of which there are enough.
    """
    for shape in _tiles(rows, seqs, heads // kv_heads, width, num_bytes, room):
        programs = shape.tiles(rows, seqs) * kv_heads
        per = FEW_PROGRAMS if shape.m <= FEW else MANY_PROGRAMS
        splits = splits_of(programs, places, shape.places, room.multiprocessors * per)
        if shape.m <= FEW and places <= ALONE:
            splits = 1
        made = evolve(shape, splits=splits)
        if shape.m <= FEW and programs * splits <= room.multiprocessors:
            made = evolve(made, warps=HASTY)
        if programs * splits >= room.multiprocessors // 2:
            break
    return made


@lru_cache(maxsize=4096)
def cut_together(
    rows: int, seqs: int, places: int, heads: int, kv_heads: int, width: int, num_bytes: int, room: Room
) -> Cut:
    """The same for prompts of several sequences: the largest tile for all of them, however short they are
    and whatever lies in front. Who comes together is chance, and each other tile would be compiled then.
    """
    shape = _tiles(seqs * TILES[0][0], seqs, heads // kv_heads, width, num_bytes, room)[0]
    programs, per = shape.tiles(rows, seqs) * kv_heads, FEW_PROGRAMS if shape.m <= FEW else MANY_PROGRAMS
    return evolve(shape, splits=splits_of(programs, places, shape.places, room.multiprocessors * per))


def searched(seqs: int) -> int:
    """Sequences among which a program of several looks for its own (`row_kernels.tile_of`)."""
    return 1 if seqs == 1 else max(COMPANY, triton.next_power_of_2(seqs))


def _tiles(rows: int, seqs: int, group: int, width: int, num_bytes: int, room: Room) -> list[Cut]:
    """What a program has room for, the largest first."""
    wanted = max(16, triton.next_power_of_2(-(-rows // max(1, seqs)) * group))
    line, least = width * num_bytes, triton.next_power_of_2(group)
    found: dict[int, Cut] = {}
    for most, places in TILES if room.matrix else ():
        m = max(least, min(most, wanted))
        fits = m * width <= 128 * 256 and line * (m + 4 * places) + SPARE_BYTES <= room.shared_bytes
        if m > FEW and m not in found and fits:
            found[m] = Cut(max(1, m // group), m, places, 8 if m * width >= 64 * 128 else 4, 2)
    for most in (FEW, 16) if room.matrix else (16,):
        m = max(least, min(most, wanted))
        if m not in found:
            places = 64 if line <= 128 else 32 if line <= 1024 and room.matrix else 16
            deep = room.matrix and room.shared_bytes >= DEEP_BYTES
            stages = 2 if line > 512 else DEEP if deep else 3
            found[m] = Cut(max(1, m // group), m, places, 4 if m <= FEW else 8, stages)
    return list(found.values())


def joins(shape: Cut, turned_back: int) -> bool:
    """Whether `join` gives the result. turned_back: values that are turned back together, 0 for none. A large
    tile has no registers for that: its sums went to 3.5 KB of stack, which the card keeps for every thread.
    """
    return shape.splits > 1 or (shape.m > FEW and turned_back > 0)


def splits_of(programs: int, places: int, each: int, wanted: int) -> int:
    """Parts the places of a sequence are cut into, so that `programs` times as many are those wanted."""
    wanted = -(-wanted // max(1, programs))
    return max(1, min(wanted, places // (2 * each)))


__all__ = ["Cut", "Room", "cut", "cut_together", "joins", "searched", "splits_of"]
