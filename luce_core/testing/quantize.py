"""Quantization for tests: the `gguf` package's, and plain rounding for the K formats it can only read.

The K encoders choose scales by range, not by error: good blocks to compute with, not good models.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Levels = npt.NDArray[np.int32]

BLOCK_WEIGHTS = 256


def quantize(weights: Floats, format_name: str) -> npt.NDArray[np.generic]:
    """`f32[..., row_weights]` to `u8[..., row_bytes]`, plain formats to their dtype, or ValueError."""
    kind = gguf.GGMLQuantizationType[format_name]
    block_weights, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if weights.shape[-1] % block_weights:
        raise ValueError(
            f"rows of {weights.shape[-1]} weights for {format_name}; wanted a multiple of {block_weights}"
        )
    if format_name in _ENCODERS:
        blocks = _ENCODERS[format_name](np.ascontiguousarray(weights, np.float32).reshape(-1, BLOCK_WEIGHTS))
        return blocks.reshape(*weights.shape[:-1], weights.shape[-1] // BLOCK_WEIGHTS * block_bytes)
    try:
        quantized: npt.NDArray[np.generic] = gguf.quantize(weights, kind)
    except NotImplementedError as error:
        raise ValueError(f"nothing here quantizes to {format_name}; give the tensor as `Blocks`") from error
    return quantized


def _half(values: Floats) -> Floats:
    """Rounded to float16, the precision scales are stored in."""
    return values.astype(np.float16).astype(np.float32)


def _half_bytes(values: Floats) -> Bytes:
    return values.astype("<f2").reshape(-1, 1).view(np.uint8)


def _ratio(numerator: Floats, denominator: Floats) -> Floats:
    """0 where the denominator is."""
    safe = np.where(denominator == 0, np.float32(1), denominator)
    ratio: Floats = np.where(denominator == 0, np.float32(0), numerator / safe).astype(np.float32)
    return ratio


def _levels(values: Floats, low: int, high: int) -> Levels:
    return np.clip(np.rint(values), low, high).astype(np.int32)


def _scale_min(
    blocks: Floats, groups: int, top: int, steps: int
) -> tuple[Floats, Floats, Levels, Levels, Levels]:
    """w = d*scale*q - dmin*min per group, q in 0..top, scale and min in 0..steps: d, dmin, scale, min, q."""
    x = blocks.reshape(len(blocks), groups, -1)
    offset = np.maximum(-x.min(-1), 0)
    step = (x.max(-1) + offset).clip(0) / top
    d = _half(step.max(-1, keepdims=True) / steps)
    dmin = _half(offset.max(-1, keepdims=True) / steps)
    scale = _levels(_ratio(step, d), 0, steps)
    minimum = _levels(_ratio(offset, dmin), 0, steps)
    unit = (d * scale)[..., None].astype(np.float32)
    q = _levels(_ratio(x + (dmin * minimum)[..., None], unit), 0, top)
    return d, dmin, scale, minimum, q


def _symmetric(blocks: Floats, groups: int, low: int, steps: int) -> tuple[Floats, Levels, Levels]:
    """w = d*scale*q per group, q in low..-low-1, scale in -steps-1..steps: d, scale, q."""
    x = blocks.reshape(len(blocks), groups, -1)
    extreme = np.take_along_axis(x, np.abs(x).argmax(-1, keepdims=True), -1)[..., 0]
    step = (extreme / low).astype(np.float32)
    d = _half(np.abs(step).max(-1, keepdims=True) / steps)
    scale = _levels(_ratio(step, d), -steps - 1, steps)
    unit = (d * scale)[..., None].astype(np.float32)
    return d, scale, _levels(_ratio(x, unit), low, -low - 1)


def _pack_six_bits(scale: Levels, minimum: Levels) -> Bytes:
    """Eight scales and minima of 6 bits in 12 bytes: the upper bits of the last four sit above the first."""
    first_scales = (scale[:, :4] & 63) | (scale[:, 4:] >> 4 << 6)
    first_mins = (minimum[:, :4] & 63) | (minimum[:, 4:] >> 4 << 6)
    rest = (scale[:, 4:] & 15) | ((minimum[:, 4:] & 15) << 4)
    return np.concatenate([first_scales, first_mins, rest], 1).astype(np.uint8)


def _q4_k(blocks: Floats) -> Bytes:
    d, dmin, scale, minimum, q = _scale_min(blocks, 8, 15, 63)
    pairs = q.reshape(-1, 4, 2, 32)
    low_high = (pairs[:, :, 0] | pairs[:, :, 1] << 4).astype(np.uint8).reshape(-1, 128)
    return np.concatenate([_half_bytes(d), _half_bytes(dmin), _pack_six_bits(scale, minimum), low_high], 1)


def _q5_k(blocks: Floats) -> Bytes:
    d, dmin, scale, minimum, q = _scale_min(blocks, 8, 31, 63)
    pairs = (q & 15).reshape(-1, 4, 2, 32)
    low_high = (pairs[:, :, 0] | pairs[:, :, 1] << 4).astype(np.uint8).reshape(-1, 128)
    fifth = ((q >> 4) << np.arange(8).reshape(1, 8, 1)).sum(1).astype(np.uint8)
    head = [_half_bytes(d), _half_bytes(dmin), _pack_six_bits(scale, minimum)]
    return np.concatenate([*head, fifth, low_high], 1)


def _q6_k(blocks: Floats) -> Bytes:
    d, scale, q = _symmetric(blocks, 16, -32, 127)
    stored = (q + 32).reshape(-1, 2, 4, 32)
    low = (stored & 15)[:, :, :2] | ((stored & 15)[:, :, 2:] << 4)
    high = ((stored >> 4) << np.array([0, 2, 4, 6]).reshape(1, 1, 4, 1)).sum(2)
    parts = [low.reshape(-1, 128), high.reshape(-1, 64)]
    packed = [part.astype(np.uint8) for part in parts]
    return np.concatenate([*packed, scale.astype(np.int8).view(np.uint8), _half_bytes(d)], 1)


def _q2_k(blocks: Floats) -> Bytes:
    d, dmin, scale, minimum, q = _scale_min(blocks, 16, 3, 15)
    quads = q.reshape(-1, 2, 4, 32) << np.array([0, 2, 4, 6]).reshape(1, 1, 4, 1)
    packed = quads.sum(2).astype(np.uint8).reshape(-1, 64)
    head = (scale | minimum << 4).astype(np.uint8)
    return np.concatenate([head, packed, _half_bytes(d), _half_bytes(dmin)], 1)


def _q3_k(blocks: Floats) -> Bytes:
    d, scale, q = _symmetric(blocks, 16, -4, 31)
    stored = (q + 4).reshape(-1, 2, 4, 32)
    quads = (stored & 3) << np.array([0, 2, 4, 6]).reshape(1, 1, 4, 1)
    third = ((stored >> 2).reshape(-1, 8, 32) << np.arange(8).reshape(1, 8, 1)).sum(1)
    wide = scale + 32
    low = (wide[:, :8] & 15) | ((wide[:, 8:] & 15) << 4)
    high = ((wide >> 4).reshape(-1, 4, 4) << np.array([0, 2, 4, 6]).reshape(1, 4, 1)).sum(1)
    parts = [third, quads.sum(2).reshape(-1, 64), low, high]
    return np.concatenate([*(part.astype(np.uint8) for part in parts), _half_bytes(d)], 1)


_ENCODERS: dict[str, Callable[[Floats], Bytes]] = {
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
