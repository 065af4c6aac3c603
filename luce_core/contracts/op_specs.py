"""Records of the ops around a residual of several streams: compressed entries, mixes, n-gram tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from torch import Tensor

    from luce_core.contracts.model import Norm
    from luce_core.contracts.ops import RopeSpec


@frozen
class CompressSpec:
    """How `stride` rows become one entry: softmax over the rows of each channel's gate, weighted sum, norm,
    RoPE at the index of the first row. A stride of 1 has no gate: the norm of the row, then RoPE.

    overlap: a row carries two halves of `width`; entry w takes the first halves of the rows of block w - 1
    (none for w = 0) and the second halves of block w.
    """

    stride: int
    width: int
    """Of an entry; kv and gate have width · (2 if overlap else 1) features."""
    bias: Tensor | None
    """f32[stride, features of gate], added to the gate by index mod stride."""
    norm: Norm
    rope: RopeSpec | None = None
    overlap: bool = False

    @property
    def rows(self) -> int:
        """Rows one entry pools; `shape[0]` of the slot `tail`."""
        return self.stride * (2 if self.overlap else 1)


@frozen
class StreamsSpec:
    """Hyper-connections (arXiv 2409.19606) with a Sinkhorn-normed mix, as in DeepSeek-V4. f32 throughout.

    m = fn · rms(all streams of a row); pre = sigmoid(m_pre · scale[0] + base) + hc_eps, x = Σ pre_i H_i;
    post = 2 sigmoid(m_post · scale[1] + base); mix = sinkhorn(m_mix · scale[2] + base).
    """

    streams: int
    fn: Tensor
    """f32[n + n + n·n, n·E]: pre, post, mix (source streams in rows). Only f32[n, n·E]: pre alone, the
    collapse before the head.
    """
    base: Tensor
    """f32[rows of fn]."""
    scale: Tensor
    """f32[3], or f32[1] with pre alone."""
    norm_eps: float
    eps: float = 1e-6
    iterations: int = 20


@frozen
class NgramSpec:
    """Which rows of a layer's table the n-grams that end at a token go by (Engram, DeepSeek-V4.1).

    c_0 is the token's compressed id, c_j that of the token j before it on its path; x_0 = c_0 · m_0 and
    x_j = x_(j-1) xor c_j · m_j in 64 bits. Bucket (j, head) has the row x_j mod prime + offset.
    """

    compressed: Tensor
    """i32[V]: token -> compressed id; tokens that read alike share one."""
    pad: int
    """Compressed id of "no token": before the text, and from the nearest row that was given as an embedding
    backwards.
    """
    multipliers: Tensor
    """i64[tables, n]; every product with a compressed id stays below 2^63."""
    primes: Tensor
    """i64[tables, n - 1, heads]."""
    offsets: Tensor
    """i64[tables, n - 1, heads]."""


@frozen
class RecallSpec:
    """How a looked-up value enters each stream of the residual (Engram, DeepSeek-V4.1). f32 throughout.

    d_i = Σ rms(H_i) · weight_i · rms(key_i) / sqrt(E);
    H'_i = H_i + sigmoid(copysign(sqrt(max(|d_i|, 1e-6)), d_i)) · value.
    """

    weight: Tensor
    """f32[n, E]: the weights of both norms, multiplied."""
    eps: float
