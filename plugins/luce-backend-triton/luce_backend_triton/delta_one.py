"""One held row of Gated DeltaNet in CUDA C++: one launch for all sequences of one row."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from luce_backend_triton import delta_trees, few_rows, nvrtc
from luce_core.contracts import DeltaSpec, ForwardBatch, SlotState

WARPS = 8
"""Of a thread block."""
PLACES = 1 << 32
"""Of a tensor, that the kernel can count."""


def defines_of(key_heads: int) -> dict[str, int]:
    """What csrc/delta_one.cu is compiled with."""
    own = {"X_ROWS": 1, "TILES": 1, "WARPS": WARPS, "KEY_HEADS": key_heads, "SHARED": shared_bytes()}
    return delta_trees.PLACEHOLDERS | own


def shared_bytes() -> int:
    """Of one thread block, `Shared` of csrc/delta_one.cu."""
    dim = delta_trees.DIM
    return 4 * (2 * dim + WARPS * 2 * (dim + 16) + (2 + 1 + 1 + 2) * WARPS)


@cache
def _loaded(device: int, key_heads: int) -> nvrtc.Kernel:
    """Compiled and loaded once."""
    return few_rows.load(device, "delta_one", "delta_one", defines_of(key_heads), delta_trees.FRONT)


def launch(
    b: ForwardBatch, given: list[Tensor], out: Tensor, conv: SlotState, state: SlotState, spec: DeltaSpec
) -> bool:
    """All sequences of one row. False where the kernel cannot: nothing was done."""
    device = out.device
    kept = (conv.state, state.state, *conv.log.values(), *state.log.values())
    if device.type != "cuda" or torch.version.hip or max(x.numel() for x in kept) >= PLACES:
        return False
    if not delta_trees.readable(given, conv, state, spec):
        return False
    held = delta_trees.arguments(b, given, out, conv, state, spec, 0)
    stream = torch.cuda.current_stream(device).cuda_stream
    grid = spec.value_heads, 1, b.slot.shape[0]
    _loaded(device.index or 0, spec.key_heads).launch(grid, 32 * WARPS, shared_bytes(), stream, [held])
    return True
