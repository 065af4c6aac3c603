"""Codecs of the cache: how keys and values become bytes. Facts only; `luce_core.ops.codecs` does it in torch.

A quantized field is kept as u8. One vector (a head of one token) is contiguous: the codes of its numbers, the
first lowest in its byte, then the f16 scales of its groups, then zeros up to a whole word.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

WORD_BYTES = 4
"""Vectors begin at words, so that entries can be moved and read by the word."""
SCALE_BYTES = 2


@frozen
class CacheCodec:
    """One way to keep vectors in fewer bytes."""

    name: str
    """What `--cache-type-k` and `--cache-type-v` call it."""
    code_bits: int
    groups: tuple[int, ...]
    """Numbers that share a scale, best first: the first that divides a vector is taken; each divides the one
    before it.
    """
    scaled: bool = True
    turns: tuple[int, ...] = (128, 64, 32)
    """Numbers that are turned together before they are encoded, likewise.

    A turn is orthogonal: R(x) = Hadamard(s · x) / √n with fixed signs s. It spreads what stands out, as some
    features of keys do in every token (docs/cache-types.md has what that is worth). Queries may be turned
    instead of keys turned back, and a sum of values turned back once: (R q) · (R k) = q · k.
    """

    @property
    def unit(self) -> int:
        """Vectors are a multiple of so many numbers."""
        return max(self.groups[-1], self.turns[-1])

    def fits(self, width: int) -> bool:
        """Whether vectors of so many numbers can be kept."""
        return width > 0 and width % self.unit == 0

    def group(self, width: int) -> int:
        """Numbers that share a scale. Raises ValueError where it does not fit."""
        return self._of(self.groups, width)

    def turn(self, width: int) -> int:
        """Numbers that are turned together. Raises ValueError where it does not fit."""
        return self._of(self.turns, width)

    def code_bytes(self, width: int) -> int:
        """Where the scales of a vector begin."""
        return -(-width * self.code_bits // 8)

    def vector_bytes(self, width: int) -> int:
        """Bytes of one vector of so many numbers."""
        scales = SCALE_BYTES * -(-width // self.group(width)) if self.scaled and self.fits(width) else 0
        return -(-(self.code_bytes(width) + scales) // WORD_BYTES) * WORD_BYTES

    def _of(self, sizes: tuple[int, ...], width: int) -> int:
        for size in sizes:
            if self.fits(width) and width % size == 0:
                return size
        raise ValueError(f"cache type {self.name} keeps multiples of {self.unit} numbers, got {width}")


CODECS: Mapping[str, CacheCodec] = {
    codec.name: codec
    for codec in (
        CacheCodec("q8_0", 8, (32,)),
        CacheCodec("fp8", 8, (1,), scaled=False),
        CacheCodec("q4_0", 4, (32,)),
        CacheCodec("tq3_0", 3, (128, 64), turns=(128, 64)),
    )
}


@frozen
class CodedField:
    """How a field of a region is kept: u8[num_blocks, block_entries, ..., codec.vector_bytes(width)]."""

    codec: CacheCodec
    width: int
    """Numbers of a vector."""


def signs(size: int) -> tuple[int, ...]:
    """The signs s of a turn of `size` numbers: ±1, by place; what every implementation uses.

    The 16th bit of a hash of the place in 32 bits, which a kernel makes where it needs it.
    """
    return tuple(1 - 2 * (_mixed(place + 1) >> 16 & 1) for place in range(size))


def _mixed(x: int) -> int:
    x = x * SIGN_FACTORS[0] & 0xFFFFFFFF
    x ^= x >> 15
    return x * SIGN_FACTORS[1] & 0xFFFFFFFF


SIGN_FACTORS = (0x2545F491, 0x1B873593)
"""Odd, below 2³¹."""

LEVELS = (0.242792, 0.743503, 1.333117, 2.157355)
"""tq3_0: magnitudes of the 8 levels that least distort (Lloyd-Max) the numbers of a vector of 128 in any
direction, in root mean squares of that vector.
"""
BOUNDS = (0.4931475, 1.03831, 1.745236)
"""tq3_0: magnitudes from which the next level is nearer."""

__all__ = ["BOUNDS", "CODECS", "LEVELS", "CacheCodec", "CodedField", "signs"]
