"""Which matrix a step multiplies behind which, so that a launch asks for the next one's weights at its end.

Thread blocks of a product find room when those of the one before are over, and between the two no weights
are on their way. So a warp whose own records all are asks the L2 cache for those that the next launch begins
with (csrc/common.cuh). Which one that is, is learned from launch to launch: steps repeat, and are captured
after they have run. Where it is wrong, some bytes are read twice.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache

import torch
from attrs import define, field
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

AHEAD_BYTES = 0
"""Of the next matrix, that a launch asks for at most; 0: nothing. What memory gives in two microseconds."""


class Soon(ctypes.Structure):
    """`Soon` of csrc/common.cuh: the launch behind."""

    _fields_ = (
        ("records", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("tiles", "blocks", "grid", "warps", "bytes", "each")),
    )


NOTHING = Soon()


@define(eq=False)
class Order:
    """Of the launches of csrc/gemv.cu on one device."""

    _behind: WeakTensorKeyDictionary = field(factory=WeakTensorKeyDictionary)
    """Records -> rows of x -> (records of the next, how its launch is cut)."""
    _last: tuple[weakref.ref[Tensor], int] | None = None

    def after(self, records: Tensor, m: int, grid: int, warps: int, stages: int) -> Soon:
        """What follows the launch of now: over `records` u8[tiles, blocks, bytes], and m rows of x."""
        tiles, blocks, size = records.shape
        grid = min(grid, tiles)
        each = min(AHEAD_BYTES // (grid * warps * size), stages)
        own = Soon(records.data_ptr(), tiles, blocks, grid, warps, size, each)
        before = None if self._last is None else self._last[0]()
        if before is not None and self._last is not None:
            self._behind.setdefault(before, {})[self._last[1]] = (weakref.ref(records), own)
        self._last = weakref.ref(records), m
        ref, soon = self._behind.get(records, {}).get(m, (None, NOTHING))
        return soon if ref is not None and ref() is not None else NOTHING

    def interrupt(self) -> None:
        """Another kernel multiplies next."""
        self._last = None


@cache
def order(device: torch.device) -> Order:
    """Of a device."""
    return Order()
