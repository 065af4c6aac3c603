"""One or two rows of x against a matrix of floats: csrc/dense.cu, which makes x ready itself."""

from __future__ import annotations

from functools import cache

import torch
import triton
from attrs import frozen
from torch import Tensor

from luce_backend_triton import few_rows, nvrtc
from luce_backend_triton.few_rows import INT, POINTER
from luce_backend_triton.given import Given, in_of
from luce_backend_triton.shapes import room_of

MOST_ROWS = 2
WARPS, BLOCKS = 16, 2
"""Of a thread block; blocks per multiprocessor."""
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
ROWS = 4
CHUNK = 256


@cache
def _loaded(device: int, defines: tuple[tuple[str, int], ...]) -> nvrtc.Kernel:
    """Compiled and loaded once."""
    return few_rows.load(device, "dense", "dense_linear", dict(defines))


@frozen(eq=False)
class Behind:
    """What comes behind the product."""

    scale: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _out(y: Tensor, behind: Behind) -> few_rows._Out:
    residual = behind.residual
    ldr = 0 if residual is None else residual.stride(0)
    extras = (_at(behind.scale), _at(behind.bias), _at(residual))
    return few_rows._Out(*extras, _at(y), None, y.shape[0], y.shape[1], ldr, y.stride(0))


def defines_of(kind: int, m: int, k: int) -> dict[str, int]:
    """What csrc/dense.cu is compiled with."""
    split = min(WARPS, triton.next_power_of_2(-(-k // (2 * CHUNK))))
    placeholders = {"BITS": 8, "TABLE": 0, "ZERO": 0, "SCALES": 0, "RECORD": 512, "CODES": 0, "STAGES": 2}
    return {**placeholders, "X_ROWS": m, "TILES": 1, "WARPS": WARPS, "KIND": kind, "SPLIT": split}


def shared_bytes(m: int, wide: int) -> int:
    """Of one thread block: x in whole chunks, sums of warps, squares."""
    return 4 * m * (wide + WARPS * ROWS + WARPS)


def launch(weight: Tensor, given: Given, y: Tensor, behind: Behind) -> bool:
    """y f32[m, n] = f(x) Wᵀ · scale + bias + residual, weight [n, k]. False: it cannot, nothing was done."""
    (n, k), m = weight.shape, given.x.shape[0]
    room = room_of(weight.device.index or 0)
    wide = -(-k // CHUNK) * CHUNK
    shared = shared_bytes(m, wide)
    kind = KINDS.get(weight.dtype)
    if kind is None or k % 8 or not weight.is_contiguous() or weight.data_ptr() % 16:
        return False
    if not room.fits(shared, 1):
        return False
    defines = defines_of(kind, m, k)
    teams = WARPS // defines["SPLIT"]
    per = BLOCKS if room.fits(shared, BLOCKS) else 1
    groups = -(-n // ROWS)
    grid = min(room.multiprocessors * per, -(-groups // teams))
    args = [POINTER(weight.data_ptr()), in_of(given), _out(y, behind), INT(wide)]
    stream = torch.cuda.current_stream(weight.device).cuda_stream
    kernel = _loaded(weight.device.index or 0, tuple(defines.items()))
    kernel.launch((grid, 1, 1), 32 * WARPS, shared, stream, args)
    return True


__all__ = ["Behind", "defines_of", "launch"]
