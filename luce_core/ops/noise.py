"""Counter-based noise: sampling depends on (seed, index, token) and on nothing else, so no batch, tree or
channel can
change a text.

Gumbel-max: argmax(logits / T + g) with independent g ~ Gumbel(0, 1) draws from softmax(logits / T)
(Gumbel 1954; Maddison, Tarlow, Minka 2014, "A* Sampling").
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_TOKEN_STEP = 0x9E3779B1  # 2^32 / golden ratio, odd: distinct tokens stay distinct
_LARGEST = 1.0 - 2.0**-24  # largest float32 below 1


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit values (held in int64) in which every input bit moves every output bit."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)


class CounterNoise:
    """`Noise` of contracts/speculation.py as torch integer arithmetic: equal on every device up to the
    logarithm.
    """

    def uniform(self, seed: Tensor, index: Tensor, token: Tensor) -> Tensor:
        """f32 in (0, 1), 2^-33 apart near zero. seed i64, index and token integers; all broadcast
        together.
        """
        seed = seed.to(torch.int64)
        key = _mix(seed & _MASK) ^ _mix(((seed >> 32) & _MASK) ^ 0x5851F42D)
        key = _mix(key ^ _mix(index.to(torch.int64) & _MASK))
        bits = _mix(_mix((token.to(torch.int64) * _TOKEN_STEP) & _MASK) ^ key)
        return ((bits.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=_LARGEST)

    def gumbel(self, seed: Tensor, index: Tensor, token: Tensor) -> Tensor:
        """f32 Gumbel(0, 1). -log1p(-u) keeps the resolution where it matters, in the upper tail."""
        return -torch.log(-torch.log1p(-self.uniform(seed, index, token)))
