"""How each block format lies in memory on the device: records of 16 rows × 256 columns.

A matrix is `records: u8[tiles, column blocks, record bytes]`. A record is what one warp streams: the codes in
the order in which the lanes of a warp feed them to the tensor cores (csrc/gemv.cu, mma.cu), then the scales
of its rows. Nothing is re-quantized; scales of 6 bits become bytes, so Q4_K takes 4.625 bits instead of 4.5.
Rows and columns beyond the matrix are zero.

Of an element (row r, column k) of a record: g = r % 8, hi = r // 8, c = k // 64, h = k % 64 // 32,
t = k % 16 // 4, e = k % 32 // 16 * 4 + k % 4, and its lane is 4 g + t.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from attrs import frozen
from torch import Tensor

from luce_backend_triton.memory import RECORD_COLS

TILE_ROWS = 16
ScaleKind = Literal["f16", "pair", "k", "q6k", "xs", "e8", "e4m3"]
SCALE_KINDS: tuple[ScaleKind, ...] = ("f16", "pair", "k", "q6k", "xs", "e8", "e4m3")
"""Their places are the numbers csrc/common.cuh and the Triton kernels know them by.

f16   f16[16 rows][8]: w = s · (code - zero)
pair  f16[16][8] s, f16[16][8] add: w = s · code + add
k     f16[16][2] (d, -dmin), u8[16][2][8] (scales, mins): w = d · scale · code - dmin · min
q6k   f16[16] d, u8[16][16] scale + 128, of 16 columns each
xs    f16[16] d, u8[16][8] scale (32 is none)
e8    u8[16][8]: exponents of f16, already of 2^(e - 128)
e4m3  u8[16][16], of 16 columns each: seven bits which in an f16's exponent and mantissa are 1/128 of it
"""

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the value of each e2m1 code."""


@frozen
class RecordFormat:
    """One block format's record."""

    name: str
    bits: Literal[4, 5, 6, 8]
    scales: ScaleKind
    zero: int = 0
    """Subtracted from a code."""
    table: tuple[int, ...] = ()
    """Code -> value, for formats with a codebook."""

    @property
    def code_bytes(self) -> int:
        return TILE_ROWS * RECORD_COLS * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        per_row = {"f16": 16, "pair": 32, "k": 20, "q6k": 18, "xs": 10, "e8": 8, "e4m3": 16}[self.scales]
        return TILE_ROWS * per_row

    @property
    def record_bytes(self) -> int:
        return self.code_bytes + self.scale_bytes

    @property
    def bits_per_weight(self) -> float:
        return self.record_bytes * 8 / (TILE_ROWS * RECORD_COLS)


FORMATS = {
    entry.name: entry
    for entry in (
        RecordFormat("Q4_0", 4, "f16", zero=8),
        RecordFormat("Q4_1", 4, "pair"),
        RecordFormat("Q5_0", 5, "f16", zero=16),
        RecordFormat("Q5_1", 5, "pair"),
        RecordFormat("Q8_0", 8, "f16", zero=128),
        RecordFormat("Q4_K", 4, "k"),
        RecordFormat("Q5_K", 5, "k"),
        RecordFormat("Q6_K", 6, "q6k", zero=32),
        RecordFormat("IQ4_NL", 4, "f16", table=IQ4_VALUES),
        RecordFormat("IQ4_XS", 4, "xs", table=IQ4_VALUES),
        RecordFormat("MXFP4", 4, "e8", table=FP4_VALUES),
        RecordFormat("NVFP4", 4, "e4m3", table=FP4_VALUES),
    )
}

Split = tuple[Tensor, tuple[Tensor, ...]]
"""codes u8[rows, cols], and the scales as `Pack` of the kind wants them."""


def _nibbles(qs: Tensor) -> Tensor:
    """u8[..., n] -> the n low nibbles, then the n high ones."""
    return torch.cat((qs & 15, qs >> 4), -1)


def _half(data: Tensor) -> Tensor:
    """u8[..., 2 n] -> f16[..., n]."""
    return data.contiguous().view(torch.float16)


def _bits(data: Tensor, count: int) -> Tensor:
    """u8[..., n] -> u8[..., 8 n] of its first `count` bits, lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data[..., None] >> shifts) & 1).flatten(-2)[..., :count]


def _q4_0(block: Tensor) -> Split:
    return _nibbles(block[..., 2:]), (_half(block[..., :2])[..., 0],)


def _q4_1(block: Tensor) -> Split:
    return _nibbles(block[..., 4:]), (_half(block[..., :2])[..., 0], _half(block[..., 2:4])[..., 0])


def _q5_0(block: Tensor) -> Split:
    high = _bits(block[..., 2:6], 32) << 4
    return _nibbles(block[..., 6:]) | high, (_half(block[..., :2])[..., 0],)


def _q5_1(block: Tensor) -> Split:
    high = _bits(block[..., 4:8], 32) << 4
    return _nibbles(block[..., 8:]) | high, (_half(block[..., :2])[..., 0], _half(block[..., 2:4])[..., 0])


def _q8_0(block: Tensor) -> Split:
    return block[..., 2:] ^ 0x80, (_half(block[..., :2])[..., 0],)


def _k_scales(block: Tensor) -> tuple[Tensor, Tensor]:
    """(d, -dmin) f16[..., 2]; (scales, mins) u8[..., 2, 8] of a K block with 6-bit scales."""
    d = _half(block[..., :4])
    first, second, third = block[..., 4:8], block[..., 8:12], block[..., 12:16]
    scale = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), -1)
    minimum = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), -1)
    return d * d.new_tensor([1, -1]), torch.stack((scale, minimum), -2)


def _k_nibbles(qs: Tensor) -> Tensor:
    """u8[..., 128] -> u8[..., 256]: each 32 bytes hold 32 weights, then the next 32."""
    return _nibbles(qs.unflatten(-1, (4, 32))).flatten(-2)


def _q4_k(block: Tensor) -> Split:
    return _k_nibbles(block[..., 16:]), _k_scales(block)


def _q5_k(block: Tensor) -> Split:
    shifts = torch.arange(8, dtype=torch.uint8, device=block.device)[:, None]
    high = ((block[..., None, 16:48] >> shifts) & 1).flatten(-2)
    return _k_nibbles(block[..., 48:]) | (high << 4), _k_scales(block)


def _q6_k(block: Tensor) -> Split:
    low, high = block[..., :128].unflatten(-1, (2, 64)), block[..., 128:192].unflatten(-1, (2, 32))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=block.device)[:, None]
    high = ((high[..., None, :] >> shifts) & 3).flatten(-2)
    codes = (_nibbles(low) | (high << 4)).flatten(-2)
    return codes, (_half(block[..., 208:])[..., 0], block[..., 192:208] ^ 0x80)


def _iq4_xs(block: Tensor) -> Split:
    shifts = torch.arange(8, device=block.device)
    high = (block[..., 2].int() | (block[..., 3].int() << 8))[..., None] >> (2 * shifts)
    low = torch.stack((block[..., 4:8] & 15, block[..., 4:8] >> 4), -1).flatten(-2)
    scale = low | ((high & 3) << 4).to(torch.uint8)
    codes = _nibbles(block[..., 8:].unflatten(-1, (8, 16))).flatten(-2)
    return codes, (_half(block[..., :2])[..., 0], scale)


LOWEST_E8, HIGHEST_E8 = 114, 143
"""Exponents whose 2^(e - 128) is a normal f16."""


def _mxfp4(block: Tensor) -> Split:
    return _nibbles(block[..., 1:]), ((block[..., 0].int() - 113).clamp(0, 30).to(torch.uint8),)


def _nvfp4(block: Tensor) -> Split:
    """Scales ue4m3 of 16 weights. Half of one, as codes are doubled, is 128 times the f16 of its bits."""
    scale, codes = block[..., :4], _nibbles(block[..., 4:].unflatten(-1, (4, 8))).flatten(-2)
    return codes, (torch.where(scale == NO_E4M3, 0, scale & 0x7F).to(torch.uint8),)


NO_E4M3 = 0x7F
"""Not a number, which the format takes for 0."""
SPLIT: dict[str, Callable[[Tensor], Split]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k, "IQ4_NL": _q4_0, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}  # fmt: skip
BLOCKS = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "IQ4_NL": (32, 18), "IQ4_XS": (256, 136),
    "MXFP4": (32, 17), "NVFP4": (64, 36),
}  # fmt: skip
"""Format -> (weights, bytes) of a block of the file."""


def fits(name: str, raw: Tensor) -> bool:
    """Whether every value of these rows has a place in a record: MXFP4 exponents must be those of f16."""
    if name != "MXFP4":
        return name in FORMATS
    block = raw.unflatten(-1, (-1, 17))
    e, empty = block[..., 0], ((block[..., 1:] & 0x77) == 0).all(-1)
    return bool((((e >= LOWEST_E8) & (e <= HIGHEST_E8)) | empty).all())


def blocks_of(cols: int) -> int:
    """Records across a row."""
    return -(-cols // RECORD_COLS)


def tiles_of(rows: int) -> int:
    """Records down a column."""
    return -(-rows // TILE_ROWS)


def pack(name: str, raw: Tensor) -> Tensor:
    """u8[rows, row bytes] as in the file -> u8[tiles, column blocks, record bytes] on the same device."""
    weights, size = BLOCKS[name]
    codes, scales = SPLIT[name](raw.unflatten(-1, (-1, size)))
    codes = _padded(codes.flatten(-2), RECORD_COLS)
    blocks = codes.shape[1] // RECORD_COLS
    per_record = RECORD_COLS // weights
    parts = [_codes(FORMATS[name], codes.unflatten(1, (blocks, RECORD_COLS)).unflatten(0, (-1, TILE_ROWS)))]
    for scale in scales:
        padded = _padded(scale, per_record).unflatten(0, (-1, TILE_ROWS)).unflatten(2, (blocks, per_record))
        parts.append(padded.movedim(2, 1).flatten(2).contiguous().view(torch.uint8))
    return torch.cat(parts, -1)


def _padded(x: Tensor, cols: int) -> Tensor:
    """Zeros to whole tiles of rows and whole `cols` of the second axis."""
    rows = -x.shape[0] % TILE_ROWS
    more = -x.shape[1] % cols
    if not rows and not more:
        return x
    full = x.new_zeros(x.shape[0] + rows, x.shape[1] + more, *x.shape[2:])
    full[: x.shape[0], : x.shape[1]] = x
    return full


def _codes(fmt: RecordFormat, codes: Tensor) -> Tensor:
    """u8[tiles, 16, blocks, 256] -> u8[tiles, blocks, code bytes]."""
    # tiles, hi, g, blocks, c, h, s, t, e -> tiles, blocks, c, g, t, h, hi, (s, e): words of a lane together
    tiles, _, blocks, _ = codes.shape
    x = codes.view(tiles, 2, 8, blocks, 4, 2, 2, 4, 4).permute(0, 3, 4, 2, 7, 5, 1, 6, 8).flatten(-2)
    if fmt.bits == 8:  # lanes have 16 bytes of each h, so that a warp reads 512 in a row
        x = x.unflatten(-1, (2, 4))[..., list(BYTE_ORDER)].flatten(-2)
        return x.permute(0, 1, 2, 5, 3, 4, 6, 7).reshape(tiles, blocks, -1)
    parts = [_low(fmt, x).reshape(tiles, blocks, -1)]
    if fmt.bits == 5:
        parts.append(_plane(x >> 4, 1).reshape(tiles, blocks, -1))
    if fmt.bits == 6:
        parts.append(_plane(x >> 4, 2).reshape(tiles, blocks, -1))
    return torch.cat(parts, -1)


BYTE_ORDER = (0, 2, 1, 3)
"""Weights of a word's bytes: pairs (0, 1) and (2, 3) are halves 0 and 2, 1 and 3 of it."""


def _low(fmt: RecordFormat, x: Tensor) -> Tensor:
    """u8[..., 8] -> u8[..., 4], the nibbles of one word: low nibbles are weights 0-3, high ones weights 4-7.

    So one mask makes two pairs of halves, or four bytes, of it. With a table, nibbles lie one after another.
    """
    x = (x & 15).unflatten(-1, (2, 4))[..., list(BYTE_ORDER)]
    if fmt.table:
        return x[..., ::2].flatten(-2) | (x[..., 1::2].flatten(-2) << 4)
    return x[..., 0, :] | (x[..., 1, :] << 4)


def _plane(x: Tensor, bits: int) -> Tensor:
    """High bits u8[..., h, hi, 8] -> the words of a lane, fields of `bits` bits each.

    Byte b of a word holds those of byte b of the codes: of word a = 2 h + hi its low nibbles' field 2 a, its
    high ones' field 2 a + 1. With two bits a word holds one h.
    """
    x = x.unflatten(-1, (2, 4))[..., list(BYTE_ORDER)]  # [..., h, hi, nibble, byte]
    x = x.movedim(-1, -4)  # [..., byte, h, hi, nibble]
    if bits == 2:
        x = x.movedim(-4, -3)  # [..., h, byte, hi, nibble]
    x = x.flatten(-2) if bits == 2 else x.flatten(-3)
    out = x[..., 0].clone()
    for place in range(1, x.shape[-1]):
        out |= x[..., place] << (bits * place)
    return out.flatten(-2) if bits == 2 else out
