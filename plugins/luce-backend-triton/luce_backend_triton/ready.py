"""x, norm(x) or act(x) · up made ready for csrc/mma.cu, by csrc/ready.cu."""

from __future__ import annotations

from functools import cache

import torch
from attrs import frozen
from torch import Tensor

from luce_backend_triton import few_rows, nvrtc
from luce_backend_triton.few_rows import INT, POINTER
from luce_backend_triton.given import ACT_CODES, ALIGNMENT, Given, in_of

WARPS = 4
"""Of a thread block, each with 256 columns of a row."""
MAKES, MOST_WARPS = 2, 32
"""Blocks of 256 columns that a warp takes of a row with a norm, which one thread block reads as a whole."""


@frozen
class Cut:
    """Of a launch."""

    warps: int
    makes: int
    """Blocks of 256 columns of each."""
    parts: int
    """Thread blocks of a row."""
    norm: bool
    act: str

    def defines(self) -> dict[str, int]:
        """What csrc/ready.cu is compiled with."""
        placeholders = {"BITS": 8, "TABLE": 0, "ZERO": 0, "SCALES": 0, "RECORD": 512, "CODES": 0, "STAGES": 2}
        own = {"MAKES": self.makes, "NORM": int(self.norm), "ACT": ACT_CODES[self.act]}
        return {**placeholders, "X_ROWS": 8, "TILES": 1, "WARPS": self.warps, **own}

    @property
    def shared_bytes(self) -> int:
        return 8 * self.warps if self.norm else 0


def cut(blocks: int, norm: bool, act: str) -> Cut | None:
    """For rows of so many blocks of 256 columns; None: they are too long."""
    if not norm:
        return Cut(WARPS, 1, -(-blocks // WARPS), norm, act)
    warps = -(-blocks // MAKES)
    return Cut(warps, MAKES, 1, norm, act) if warps <= MOST_WARPS else None


@cache
def _loaded(device: int, defines: tuple[tuple[str, int], ...]) -> nvrtc.Kernel:
    """Compiled and loaded once."""
    return few_rows.load(device, "ready", "ready", dict(defines))


def launch(given: Given, out: Tensor, squares: Tensor | None = None) -> bool:
    """out u8[blocks, m, X_BYTES], as `few_rows.prepare` makes it but for the last bits; of norm(x) with the
    sum of a row's squares at X_LENGTH, and that of x -> squares f32[m]. False: it cannot, nothing was done.
    Which it is does not depend on the number of rows.
    """
    blocks, m, _ = out.shape
    found = cut(blocks, given.weight is not None, given.act)
    if found is None or given.x.stride(0) % ALIGNMENT:
        return False
    kernel = _loaded(out.device.index or 0, tuple(found.defines().items()))
    stream = torch.cuda.current_stream(out.device).cuda_stream
    to = None if squares is None else squares.data_ptr()
    args = [in_of(given), POINTER(out.data_ptr()), POINTER(to), INT(m), INT(blocks)]
    kernel.launch((m, 1, found.parts), 32 * found.warps, found.shared_bytes, stream, args)
    return True


__all__ = ["Cut", "cut", "launch"]
