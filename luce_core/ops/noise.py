"""Counter-based noise: sampling depends on (seed, index, token) and on nothing else, so no batch, tree or
channel can change a text.

Gumbel-max: argmax(logits / T + g) with independent g ~ Gumbel(0, 1) draws from softmax(logits / T)
(Gumbel 1954; Maddison, Tarlow, Minka 2014, "A* Sampling").
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_TOKEN_STEP = 0x9E3779B1  # 2^32 / golden ratio, odd: distinct tokens stay distinct
_LARGEST = 1.0 - 2.0**-24  # largest float32 below 1
_FIRST, _SECOND = 0x21F0AAAD, 0x735A2D97
_HIGH = 0x5851F42D  # keeps the two halves of a seed apart


def _mix(x: Any) -> Any:
    """A bijection of 32-bit values in which every input bit moves every output bit.

    x: int64 tensor of values below 2^32, or a uint32 array: products of the latter wrap by themselves.
    """
    if isinstance(x, np.ndarray):
        x = (x ^ (x >> np.uint32(16))) * np.uint32(_FIRST)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(_SECOND)
        return x ^ (x >> np.uint32(15))
    x = ((x ^ (x >> 16)) * _FIRST) & _MASK
    x = ((x ^ (x >> 15)) * _SECOND) & _MASK
    return x ^ (x >> 15)


class CounterNoise:
    """`Noise` of contracts/speculation.py: the same integers everywhere, so equal up to the logarithm."""

    def bits(self, seed: Tensor, index: Tensor, token: Tensor) -> Tensor:
        """32 random bits in an int64. seed i64, index and token integers; all broadcast together."""
        seed = seed.to(torch.int64)
        key = _mix(seed & _MASK) ^ _mix(((seed >> 32) & _MASK) ^ _HIGH)
        key = _mix(key ^ _mix(index.to(torch.int64) & _MASK))
        bits: Tensor = _mix(_mix((token.to(torch.int64) * _TOKEN_STEP) & _MASK) ^ key)
        return bits

    def uniform(self, seed: Tensor, index: Tensor, token: Tensor) -> Tensor:
        """f32 in (0, 1), 2^-33 apart near zero."""
        if token.device.type == "cpu":
            return torch.from_numpy(self._uniform_cpu(seed, index, token))
        bits = self.bits(seed, index, token)
        return ((bits.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=_LARGEST)

    def _uniform_cpu(self, seed: Tensor, index: Tensor, token: Tensor) -> np.ndarray:
        """The same integers in 32-bit lanes: half the bytes to move."""
        halves = seed.numpy().astype(np.int64, copy=False)
        low, high = (halves & _MASK).astype(np.uint32), (halves >> 32 & _MASK).astype(np.uint32)
        key = _mix(low) ^ _mix(high ^ np.uint32(_HIGH))
        key = _mix(key ^ _mix(index.numpy().astype(np.uint32)))
        bits = _mix(_mix(token.numpy().astype(np.uint32) * np.uint32(_TOKEN_STEP)) ^ key)
        uniform = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
        smallest: np.ndarray = np.minimum(uniform, np.float32(_LARGEST))
        return smallest

    def gumbel(self, seed: Tensor, index: Tensor, token: Tensor) -> Tensor:
        """f32 Gumbel(0, 1). -log1p(-u) keeps the resolution where it matters, in the upper tail."""
        return -torch.log(-torch.log1p(-self.uniform(seed, index, token)))
