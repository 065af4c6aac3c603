"""Which kernel multiplies how many rows, and how a launch is cut. Fixed tables, no tuning at run time."""

from __future__ import annotations

from functools import lru_cache

import torch
from attrs import frozen

from luce_backend_triton.few_rows import GEMV_ROWS, MMA_ROWS, Shape
from luce_backend_triton.formats import RecordFormat

MMA_LIMIT = 128
"""Rows from here on: dense f16 weights and one large product. Below, passes of 32 rows over packed weights."""
BLOCK_RESERVE = 1 << 10
"""Shared memory the driver keeps for each thread block."""

GEMV = ((16, 3), (16, 2), (8, 3), (8, 2), (4, 2), (2, 2))
"""(warps, stages), best first where they fit: measured on an H200, LOG.md 2026-11-29."""
MMA = {
    8: ((2, 4, 2, 4), (2, 4, 2, 2), (1, 4, 2, 1), (1, 2, 2, 1)),
    16: ((2, 4, 2, 3), (2, 4, 2, 2), (1, 4, 2, 1), (1, 2, 2, 1)),
    24: ((2, 4, 3, 2), (2, 4, 2, 2), (1, 4, 2, 1), (1, 2, 2, 1)),
    32: ((2, 4, 2, 2), (1, 4, 2, 1), (1, 2, 2, 1)),
}
"""Rows of x -> (tiles, warps, stages, blocks per multiprocessor), likewise."""


@frozen
class Room:
    """What limits a launch on one device."""

    multiprocessors: int
    block_bytes: int
    """Shared memory one thread block may have."""
    total_bytes: int
    """Of one multiprocessor."""

    def fits(self, shared_bytes: int, per: int) -> bool:
        """Whether `per` thread blocks find room."""
        each = shared_bytes + BLOCK_RESERVE
        return each <= self.block_bytes and per * each <= self.total_bytes


@lru_cache(maxsize=None)
def room_of(device: int) -> Room:
    """Of a CUDA device."""
    about = torch.cuda.get_device_properties(device)
    return Room(
        about.multi_processor_count,
        about.shared_memory_per_block_optin,
        about.shared_memory_per_multiprocessor,
    )


@lru_cache(maxsize=None)
def choose(fmt: RecordFormat, m: int, blocks: int, room: Room) -> tuple[Shape, int] | None:
    """The kernel for m rows of x and `blocks` records across, and its thread blocks; None: nothing fits."""
    if m <= GEMV_ROWS:
        for warps, stages in GEMV:
            shape = Shape("gemv", m, 1, warps, stages)
            if room.fits(shape.shared_bytes(fmt, blocks), 1):
                return shape, room.multiprocessors
    rows = min(-(-m // 8) * 8, MMA_ROWS)
    for tiles, warps, stages, per in MMA[rows]:
        shape = Shape("mma", rows, tiles, warps, stages)
        if room.fits(shape.shared_bytes(fmt, blocks), per):
            return shape, room.multiprocessors * per
    return None
