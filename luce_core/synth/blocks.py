"""Random weights: valid blocks of every format, sized so that no activation grows or vanishes.

Random numbers are slow to make and fast to copy. So for each format one pool of random blocks is made, and
tensors are cut from it: a tensor starts where its name says and goes round. The number of blocks in a pool is
prime, so no two rows of a matrix start at the same block before every block was a start.

Weights of a row of n have the variance 1 / n: a normed input gives an output of the same size. They get it
from the scale fields of their blocks, which are written over the random bytes; those of codes that are not
centred get their offset or a random sign, so that the mean is 0. Everything follows from the seed alone, by
PCG64's raw stream, which NumPy keeps as it is.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from math import floor, isqrt, log2, sqrt
from typing import Final

import numpy as np
import numpy.typing as npt
from attrs import frozen

from luce_core.errors import UsageError
from luce_core.gguf.formats import BlockFormat

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

POOL_BLOCKS: Final = 1 << 17
POOL_BYTES: Final = 4 << 20
"""A pool is the larger of both, if the file has as much."""
SAMPLE_BLOCKS: Final = 4096
"""Of a pool, to measure what its codes amount to."""


@frozen
class Scale:
    """Where a block format keeps its factors, all float16."""

    at: int
    """Byte of the factor of the codes."""
    offset_at: int | None = None
    """Byte of the factor of what is added or subtracted."""
    offset: float = 0.0
    """That factor, in factors of the codes, which makes the mean 0."""
    signed: bool = False
    """The factor gets a random sign by block: codes are not centred, and there is no offset."""


SCALES: Final[Mapping[str, Scale]] = {
    "Q4_0": Scale(0, signed=True),
    "Q4_1": Scale(0, 2, -7.5),
    "Q5_0": Scale(0, signed=True),
    "Q5_1": Scale(0, 2, -15.5),
    "Q8_0": Scale(0, signed=True),
    "Q2_K": Scale(80, 82, 1.5),
    "Q3_K": Scale(108, signed=True),
    "Q4_K": Scale(0, 2, 7.5),
    "Q5_K": Scale(0, 2, 15.5),
    "Q6_K": Scale(208, signed=True),
    "IQ4_NL": Scale(0, signed=True),
    "IQ4_XS": Scale(0, signed=True),
}
PLAIN: Final = ("F32", "F16", "BF16")
MXFP4: Final = "MXFP4"
"""Its scale is a power of two in one byte; its codes have a sign each."""
MXFP4_ONE: Final = 128
"""That byte of the scale 1, as codes are halves."""
KNOWN: Final = (*PLAIN, *SCALES, MXFP4)


class Pools:
    """The random blocks of one file, made when a format is first met."""

    def __init__(self, seed: int, needed: Mapping[str, int]) -> None:
        """needed: blocks of the file, by format; a pool has no more."""
        self.seed = seed
        self._needed = needed
        self._bodies: dict[str, _Body] = {}
        self._scaled: dict[tuple[str, int], Bytes] = {}

    def cut(self, name: str, block: BlockFormat, row: int, num_bytes: int) -> Iterator[memoryview]:
        """The bytes of the tensor `name`, with rows of `row` weights, in pieces of one pool or less.

        Raises UsageError for a format nothing random is known of.
        """
        pool = self._pool(block, row)
        num_blocks = len(pool) // block.block_bytes
        at = zlib.crc32(f"{self.seed} {name}".encode()) % num_blocks * block.block_bytes
        flat = pool.data
        while num_bytes:
            piece = flat[at : min(len(pool), at + num_bytes)]
            yield piece
            num_bytes -= len(piece)
            at = 0

    def _pool(self, block: BlockFormat, row: int) -> Bytes:
        key = (block.name, row)
        if key not in self._scaled:
            if block.name not in KNOWN:
                raise UsageError(
                    f"No random blocks of format {block.name!r} can be made. Choose one of "
                    f"{', '.join(KNOWN)}."
                )
            if block.name not in self._bodies:
                most = max(POOL_BLOCKS, POOL_BYTES // block.block_bytes)
                count = prime_from(min(most, self._needed[block.name]))
                self._bodies[block.name] = _Body.of(block, count, _raw(self.seed, f"pool {block.name}"))
            self._scaled[key] = self._bodies[block.name].scaled(1 / sqrt(row))
        return self._scaled[key]


def uniform(seed: int, name: str, count: int, low: float, high: float) -> Floats:
    """`f32[count]` of the range, for a small tensor."""
    words = _raw(seed, name)(count)
    spread = (words >> np.uint64(40)).astype(np.float64) / 2**24
    return (low + (high - low) * spread).astype(np.float32)


def distinct(seed: int, name: str, rows: int, row: int, low: int, high: int) -> npt.NDArray[np.int32]:
    """`i32[rows, row]`: numbers from low to high, no two of a row alike. Needs row <= high - low + 1."""
    count = high - low + 1
    if row > count:
        raise UsageError(f"Tensor {name!r} has rows of {row} distinct numbers; {low} to {high} has {count}.")
    words = _raw(seed, name)(2 * rows).reshape(rows, 2)
    step = 1 + (words[:, 1:] % np.uint64(max(1, (count - 1) // max(1, row - 1)))).astype(np.int64)
    first = (words[:, :1] % np.uint64(count)).astype(np.int64)
    return (low + (first + step * np.arange(row)) % count).astype(np.int32)


# --- pools


@frozen(eq=False)
class _Body:
    """Random blocks whose factor is 1, and the deviation of their weights."""

    block: BlockFormat
    data: Bytes
    chance: Floats
    """f32[blocks] from 0 to 1: what is decided by block."""
    deviation: float

    @classmethod
    def of(cls, block: BlockFormat, count: int, words: Callable[[int], npt.NDArray[np.uint64]]) -> _Body:
        chance = (words(count) >> np.uint64(40)).astype(np.float32) / np.float32(2**24)
        if block.name in PLAIN:  # uniform, in units of its own deviation
            return cls(block, (np.float32(sqrt(3)) * (2 * chance - 1)).view(np.uint8), chance, 1.0)
        num_words = -(-count * block.block_bytes // 8)
        data = words(num_words).view(np.uint8)[: count * block.block_bytes].reshape(count, -1)
        _tie_offsets(data, block.name)
        body = cls(block, data, chance, 1.0)
        sample = block.dequantize(body._with_factor(1.0)[:SAMPLE_BLOCKS])
        return cls(block, data, chance, float(np.sqrt(np.mean(np.square(sample, dtype=np.float64)))))

    def scaled(self, deviation: float) -> Bytes:
        """The blocks as bytes, with weights of that deviation."""
        if self.block.name in PLAIN:
            return _plain(self.data.view(np.float32) * np.float32(deviation), self.block.name)
        return self._with_factor(deviation / self.deviation).reshape(-1)

    def _with_factor(self, factor: float) -> Bytes:
        data = self.data.copy()
        if self.block.name == MXFP4:
            exponent = floor(log2(factor))
            doubled = ((factor / 2**exponent) ** 2 - 1) / 3  # the share of blocks of twice the size
            data[:, 0] = MXFP4_ONE + exponent + (self.chance < doubled)
            return data
        scale = SCALES[self.block.name]
        signs = np.where(self.chance < 0.5, np.float32(-1), np.float32(1)) if scale.signed else np.float32(1)
        factors = np.broadcast_to(signs * np.float32(factor), len(data))
        _put_half(data, scale.at, factors)
        if scale.offset_at is not None:
            _put_half(data, scale.offset_at, np.float32(scale.offset) * factors)
        return data


def _tie_offsets(data: Bytes, name: str) -> None:
    """Give groups of weights with a scale and an offset of their own the same number for both."""
    if name == "Q2_K":  # a byte each: scale in the low half, offset in the high one
        data[:, :16] = (data[:, :16] & 15) * 17
    if name in ("Q4_K", "Q5_K"):  # six bits each: four whole ones, then their rests and halves
        data[:, 8:12] = data[:, 4:8]
        data[:, 12:16] = (data[:, 12:16] & 15) * 17


def _put_half(data: Bytes, at: int, values: Floats) -> None:
    data[:, at : at + 2] = values.astype("<f2").reshape(-1, 1).view(np.uint8)


def _plain(values: Floats, name: str) -> Bytes:
    if name == "F32":
        return values.view(np.uint8)
    if name == "F16":
        return values.astype("<f2").view(np.uint8)
    return (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)


def _raw(seed: int, name: str) -> Callable[[int], npt.NDArray[np.uint64]]:
    """A stream of random words of its own."""
    bits = np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))
    return lambda count: np.atleast_1d(np.asarray(bits.random_raw(count), np.uint64))


@cache
def prime_from(least: int) -> int:
    """The first prime not below `least`."""
    number = max(3, least) | 1
    while any(number % divisor == 0 for divisor in range(3, isqrt(number) + 1, 2)):
        number += 2
    return number
