"""Which kernel multiplies how many rows, and how a launch is cut. Fixed tables, no tuning at run time."""

from __future__ import annotations

from functools import cache

import torch
from attrs import evolve, frozen

from luce_backend_triton import capability
from luce_backend_triton.few_rows import GEMV_PASS, GEMV_ROWS, MMA_ROWS, Shape
from luce_backend_triton.formats import RecordFormat

MMA_LIMIT = 128
"""More rows: dense f16 weights and one large product. Up to it, passes of 32 rows over packed weights."""
GEMV_LIMIT = 32
"""The same without tensor cores for them, in passes of integer products: f16 weights are written and read, as
many bytes as eight passes read of Q4_K. Not measured.
"""
BLOCK_RESERVE = 1 << 10
"""Shared memory the driver keeps for each thread block."""

SMALL_TILES, FEW_TILES = 6, 3
"""Row tiles per multiprocessor, below which a matrix is small; and too small for two blocks there."""
NARROWEST_ROWS = 8
"""Of x: there the compiler finds registers for its blocks by itself, and spills when told of them."""
NARROW = 4
"""Records in a row of the matrix, up to which a small one is narrow: a few for each warp, and little of x."""
GEMV = ((8, 4, 2), (8, 3, 2), (12, 3, 1), (8, 2, 1), (4, 2, 1), (2, 2, 1))
GEMV_SMALL = ((12, 4, 1), (12, 3, 1), (8, 2, 1), (4, 2, 1), (2, 2, 1))
GEMV_NARROW = ((8, 2, 2), *GEMV_SMALL)
"""(warps, stages, thread blocks per multiprocessor), best first where they fit: measured on an H200, LOG.md
2026-11-29 and 2026-11-30.
"""
NARROWEST = (1, 2, 1)
"""For wide matrices on compute capability 6.1, whose thread blocks have 48 KiB."""
MMA = {
    8: ((2, 4, 2, 4), (2, 4, 2, 2), (1, 4, 2, 1), (1, 2, 2, 1)),
    16: ((2, 4, 3, 2), (2, 4, 2, 2), (1, 4, 2, 1), (1, 2, 2, 1)),
    24: ((2, 4, 3, 2), (2, 4, 2, 2), (1, 4, 2, 1), (1, 2, 2, 1)),
    32: ((2, 4, 2, 2), (1, 4, 2, 1), (1, 2, 2, 1)),
}
"""Rows of x -> (tiles, warps, stages, blocks per multiprocessor), likewise."""
MMA_GROUPS = ((1, 4, 3, 2), (1, 4, 2, 1), (1, 2, 2, 1))
"""The same for the widest, where every group's sum has a scale of its own: two tiles need more registers."""


@frozen
class Room:
    """What limits a launch on one device."""

    multiprocessors: int
    block_bytes: int
    """Shared memory one thread block may have."""
    total_bytes: int
    """Of one multiprocessor."""
    mma: bool = True
    """Whether csrc/mma.cu runs there."""
    bulk: bool = True
    """Whether there are bulk copies to shared memory."""

    @property
    def most_rows(self) -> int:
        """Of x, for packed weights; more meet dense ones."""
        return MMA_LIMIT if self.mma else GEMV_LIMIT

    def fits(self, shared_bytes: int, per: int) -> bool:
        """Whether `per` thread blocks find room."""
        each = shared_bytes + BLOCK_RESERVE
        return each <= self.block_bytes and per * each <= self.total_bytes


@cache
def room_of(device: int) -> Room:
    """Of a CUDA device."""
    about, ability = torch.cuda.get_device_properties(device), capability.on(torch.device("cuda", device))
    return Room(
        about.multi_processor_count,
        about.shared_memory_per_block_optin,
        about.shared_memory_per_multiprocessor,
        ability.mma,
        ability.bulk,
    )


@cache
def choose(fmt: RecordFormat, m: int, tiles: int, blocks: int, room: Room) -> tuple[Shape, int] | None:
    """The kernel for m rows of x and tiles × blocks records, and its thread blocks; None: nothing fits."""
    if m <= GEMV_ROWS:
        for warps, stages, per in _gemv_cuts(tiles, blocks, room.multiprocessors):
            shape, grid = Shape("gemv", m, 1, warps, stages, per), per * room.multiprocessors
            if room.fits(shape.shared_bytes(fmt, tiles, blocks, grid), per):
                return shape, grid
    if not room.mma:
        return _in_passes(fmt, m, tiles, blocks, room)
    rows = min(-(-m // 8) * 8, MMA_ROWS)
    for each, warps, stages, per in _mma_cuts(fmt, rows):
        shape = Shape("mma", rows, each, warps, stages, 1 if rows == NARROWEST_ROWS else per, bulk=room.bulk)
        if room.fits(shape.shared_bytes(fmt, tiles, blocks, room.multiprocessors * per), per):
            return shape, room.multiprocessors * per
    return None


def _gemv_cuts(tiles: int, blocks: int, multiprocessors: int) -> tuple[tuple[int, int, int], ...]:
    if tiles >= SMALL_TILES * multiprocessors:
        return GEMV
    return GEMV_NARROW if blocks <= NARROW and tiles >= FEW_TILES * multiprocessors else GEMV_SMALL


def _mma_cuts(fmt: RecordFormat, rows: int) -> tuple[tuple[int, int, int, int], ...]:
    return MMA_GROUPS if rows == MMA_ROWS and fmt.scales in ("f16", "pair", "e8") else MMA[rows]


def _in_passes(fmt: RecordFormat, m: int, tiles: int, blocks: int, room: Room) -> tuple[Shape, int] | None:
    """Integer products of a few rows at a time, as many as find room."""
    for rows in range(min(m, GEMV_PASS), 0, -1):
        for warps, stages, per in (*GEMV_SMALL, NARROWEST):
            shape, grid = Shape("gemv", rows, 1, warps, stages), per * room.multiprocessors
            if room.fits(shape.shared_bytes(fmt, tiles, blocks, grid), per):
                return shape, grid
    return None


@cache
def choose_any(fmt: RecordFormat, tiles: int, blocks: int, room: Room) -> tuple[Shape, int] | None:
    """One kernel for any number of rows of x, and its thread blocks: the order of its sums is that of the
    widest pass, whichever is launched (`narrowed`). Without tensor cores that is a row. None: nothing fits.
    """
    if not room.mma:
        return _in_passes(fmt, 1, tiles, blocks, room)
    for each, warps, stages, per in _mma_cuts(fmt, MMA_ROWS):
        shape = Shape("mma", MMA_ROWS, each, warps, stages, per, bulk=room.bulk)
        grid = room.multiprocessors * per
        if room.fits(shape.shared_bytes(fmt, tiles, blocks, grid), per):
            return shape, grid
    return None


def narrowed(shape: Shape, m: int) -> Shape:
    """The same kernel for m rows: fewer of x in a pass, each summed as in the widest."""
    if shape.kind == "gemv":
        return shape
    return evolve(shape, x_rows=min(-(-m // 8) * 8, shape.x_rows))
