"""The cache's codecs in torch, reference: vectors to bytes and back. `contracts.codec` says how they lie.

Rounding is half away from zero. Numbers that were turned together with one that is not finite are all NaN
when they are read, so nothing wrong in a network is hidden by its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor

from luce_core.contracts.codec import BOUNDS, LEVELS, CodedField, signs

FP8_MAX = 448.0
"""Of float8 e4m3fn; larger numbers are kept as this."""


def encode(field: CodedField, x: Tensor) -> Tensor:
    """x [..., width] -> u8[..., vector_bytes]."""
    codec, width = field.codec, field.width
    x = turn(x.float(), codec.turn(width))
    codes, scales = _ENCODE[codec.name](grouped(x, codec.group(width)))
    parts = [codes]
    if scales is not None:
        parts.append(scales.half().contiguous().view(torch.uint8))
    packed = torch.cat(parts, -1)
    return torch.nn.functional.pad(packed, (0, codec.vector_bytes(width) - packed.shape[-1]))


def decode(field: CodedField, data: Tensor) -> Tensor:
    """data u8[..., vector_bytes] -> f32[..., width]."""
    codec, width = field.codec, field.width
    end = codec.code_bytes(width)
    numbers = _DECODE[codec.name](data[..., :end])
    if codec.scaled:
        groups = width // codec.group(width)
        scales = data[..., end : end + 2 * groups].contiguous().view(torch.float16).float()
        numbers = (grouped(numbers, codec.group(width)) * scales[..., None]).flatten(-2)
    return turn_back(numbers, codec.turn(width))


def grouped(x: Tensor, size: int) -> Tensor:
    """[..., n · size] -> [..., n, size]."""
    return x.reshape(*x.shape[:-1], -1, size)


# --- the turn


def turn(x: Tensor, size: int) -> Tensor:
    """R x for each `size` numbers of x f32[..., width]."""
    return torch.matmul(grouped(x, size), _turn_matrix(size, x.device).T).flatten(-2)


def turn_back(y: Tensor, size: int) -> Tensor:
    """Rᵀ y: the inverse of `turn`."""
    return torch.matmul(grouped(y, size), _turn_matrix(size, y.device)).flatten(-2)


@cache
def _turn_matrix(size: int, device: torch.device) -> Tensor:
    """R f32[size, size] = H · diag(s) / √size."""
    rows = torch.ones(1, 1)
    while rows.shape[0] < size:
        rows = torch.cat((torch.cat((rows, rows), 1), torch.cat((rows, -rows), 1)))
    matrix: Tensor = rows * torch.tensor(signs(size)) / size**0.5
    return matrix.to(device)


# --- codes: groups f32[..., n, size] -> codes u8[..., code_bytes], scales [..., n]


def _poison(x: Tensor) -> Tensor:
    """0 of every group, NaN where a number is not finite."""
    return (x * 0).sum(-1)


def _rounded(x: Tensor) -> Tensor:
    return torch.where(x < 0, (x - 0.5).ceil(), (x + 0.5).floor())


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale, 0 for 0; [..., 1]."""
    return torch.where(scale == 0, 0.0, 1 / scale)[..., None]


def _encode_q8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1) / 127
    codes = _rounded(x * _inverse(scale)).nan_to_num().clamp(-127, 127)
    return codes.to(torch.int8).view(torch.uint8).flatten(-2), scale + _poison(x)


def _decode_q8(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.int8).float()


def _encode_q4(x: Tensor) -> tuple[Tensor, Tensor]:
    """The number of largest magnitude is code 0: -8 scales; of two such, the positive one."""
    high, low = x.amax(-1), x.amin(-1)
    scale = torch.where(high >= -low, high, low) / -8
    codes = (x * _inverse(scale) + 8.5).nan_to_num().clamp(0, 15).to(torch.uint8)
    return _pack(codes.flatten(-2), 4), scale + _poison(x)


def _decode_q4(codes: Tensor) -> Tensor:
    return _unpack(codes, 4).float() - 8


def _encode_fp8(x: Tensor) -> tuple[Tensor, None]:
    kept = torch.where(x.isfinite(), x.clamp(-FP8_MAX, FP8_MAX), torch.nan)
    return kept.to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2), None


def _decode_fp8(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.float8_e4m3fn).float()


def _encode_tq3(x: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of a group over their root mean square, as sign and one of four magnitudes.

    Magnitudes of the whole vector come first, four of 2 bits to a byte, then its signs, eight to a byte. The
    scale makes the norm right again.
    """
    size, norm = x.shape[-1], x.norm(dim=-1)
    bounds = torch.tensor(BOUNDS, device=x.device)
    level = torch.bucketize((x * (size**0.5 * _inverse(norm))).abs().nan_to_num(), bounds, right=True)
    scale = norm / torch.tensor(LEVELS, device=x.device)[level].norm(dim=-1)
    codes = torch.cat((_pack(level.flatten(-2), 2), _pack((x < 0).flatten(-2), 1)), -1)
    return codes, scale + _poison(x)


def _pack(values: Tensor, bits: int) -> Tensor:
    """Small numbers, the first lowest in its byte."""
    groups = grouped(values.long(), 8 // bits)
    return (groups << torch.arange(0, 8, bits, device=values.device)).sum(-1).to(torch.uint8)


def _unpack(data: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, device=data.device, dtype=torch.uint8)
    return (data[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


def _decode_tq3(codes: Tensor) -> Tensor:
    end = codes.shape[-1] // 3 * 2
    levels = torch.tensor(LEVELS, device=codes.device)[_unpack(codes[..., :end], 2).long()]
    return torch.where(_unpack(codes[..., end:], 1) == 1, -levels, levels)


_ENCODE: Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor | None]]] = {
    "q8_0": _encode_q8,
    "q4_0": _encode_q4,
    "fp8": _encode_fp8,
    "tq3_0": _encode_tq3,
}
_DECODE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "q8_0": _decode_q8,
    "q4_0": _decode_q4,
    "fp8": _decode_fp8,
    "tq3_0": _decode_tq3,
}

__all__ = ["FP8_MAX", "decode", "encode", "turn", "turn_back"]
