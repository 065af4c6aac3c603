"""What checks of kernels are given: matrices of random blocks, states of Gated DeltaNet; and how far off a
result is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from luce_backend_triton.formats import BLOCKS
from luce_core.contracts import DeltaSpec, Linear, Norm, RawLinear, SlotState
from luce_core.gguf import FORMATS as KNOWN

HALVES = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": (), "NVFP4": (),
}  # fmt: skip
"""Where blocks keep half floats, if not in front alone."""
FLOATS = ("F32", "F16", "BF16")
ROUNDED = 2e-3
"""Relative error of halves."""
BLOCK, SLOTS = 16, 4


def matrix(
    namespace: Any, name: str, out: int, width: int, device: str, seed: int = 0
) -> tuple[Linear, Tensor]:
    """Packed, and exact as float64."""
    data = _random_blocks(name, out, width, seed)
    packed = namespace.pack_linear(RawLinear("w", name, (out, width), data, device))
    exact = torch.from_numpy(np.array(KNOWN.by_name(name).dequantize(data))).view(out, width)
    bias = torch.randn(out, device=device)
    return Linear("w", out, width, name, packed, bias), exact.to(device, torch.float64)


def _random_blocks(name: str, rows: int, cols: int, seed: int) -> np.ndarray:
    """u8[rows, row bytes]; factors of ordinary size, all other bits as they come."""
    rng = np.random.default_rng(rows + seed)
    if name in FLOATS:
        kind = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
        values = torch.from_numpy(rng.standard_normal((rows, cols)).astype(np.float32) * 0.05)
        return values.to(kind).view(torch.uint8).numpy()
    weights, size = BLOCKS[name]
    blocks = rng.integers(0, 256, (rows * cols // weights, size), dtype=np.uint8)
    for at in HALVES.get(name, (0,)):
        factors = (rng.standard_normal(len(blocks)) * 0.02).astype("<f2")
        blocks[:, at : at + 2] = factors.view(np.uint8).reshape(-1, 2)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(114, 130, len(blocks))
    return blocks.reshape(rows, -1)


def delta_state(rng: torch.Generator, device: str, held: int) -> tuple[SlotState, SlotState, DeltaSpec]:
    """Window, states and what a layer is, for so many held rows: two heads of 128, which share a key."""
    key_heads, heads, dim = 1, 2, 128
    channels = (2 * key_heads + heads) * dim

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).to(device)

    def slot(shape: tuple[int, ...], fold: str, **log: tuple[int, ...]) -> SlotState:
        rows = {name: rand(SLOTS, held, *one) for name, one in log.items()}
        return SlotState("slot", 0.1 * rand(SLOTS, *shape), rows, fold)

    conv = slot((3, channels), "shift", row=(channels,))
    log = {"k": (key_heads, dim), "u": (heads, dim), "g": (heads,)}
    memory = slot((heads, dim, dim), "delta_fold", **log)
    spec = DeltaSpec(
        0, key_heads, heads, dim, dim, Norm(1 + 0.1 * rand(dim), 1e-6), rand(channels, 4), -rand(heads).abs(),
        rand(heads),
    )  # fmt: skip
    return conv, memory, spec


def error_of(got: Tensor, want: Tensor) -> float:
    """Relative, beside float64."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def normed(x: Tensor, norm: Norm) -> Tensor:
    """norm(x) as float64."""
    return torch.nn.functional.rms_norm(x.double(), x.shape[1:], norm.weight.double(), norm.eps)


__all__ = ["BLOCK", "FLOATS", "ROUNDED", "SLOTS", "delta_state", "error_of", "matrix", "normed"]
