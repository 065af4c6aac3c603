"""A packed weight matrix on a device, and how it is made of the file's bytes: once, slice by slice."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from luce_backend_triton import capability
from luce_backend_triton.formats import (
    FORMATS,
    SCALE_KINDS,
    TILE_ROWS,
    RecordFormat,
    blocks_of,
    fits,
    pack,
    tiles_of,
)
from luce_core.contracts import Linear, RawLinear

log = logging.getLogger(__name__)

KINDS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MOST_LOST = 2**-12
"""Of a matrix, relative: half of what rounding to f16 costs one that fills its range."""
SLICE_BYTES = 32 << 20
"""Of the file that are on their way to the device at a time."""
COPIERS = 4
"""Threads that bring a slice from the file's pages, of which one alone is slower than the way to a device."""


@define(eq=False)
class Matrix:
    """[rows, cols] in records. `records` may become a part of a group's."""

    name: str
    format: str
    rows: int
    cols: int
    records: Tensor
    """u8[tiles, blocks, record bytes]."""

    @property
    def fmt(self) -> RecordFormat:
        return FORMATS[self.format]

    @property
    def blocks(self) -> int:
        return int(self.records.shape[1])

    def constants(self) -> dict[str, Any]:
        """What the Triton kernels are specialized on."""
        fmt = self.fmt
        return {
            "RECORD": fmt.record_bytes,
            "CODES": fmt.code_bytes,
            "BITS": fmt.bits,
            "TABLE": bool(fmt.table),
            "ZERO": fmt.zero,
            "SCALES": SCALE_KINDS.index(fmt.scales),
        }

    def views(self) -> tuple[Tensor, Tensor, Tensor]:
        """records as u8 and as f16, and the codebook."""
        return self.records, self.records.view(torch.float16), codebook(self.format, self.records.device)


@define(eq=False)
class Dense:
    """A matrix kept as floats: F32, F16, BF16, and formats without a record."""

    weight: Tensor
    """May become a part of a group's."""


@frozen(eq=False)
class Part:
    """Neighbouring members of a group that are one matrix."""

    matrix: Matrix | Dense
    members: tuple[Linear, ...]
    bias: Tensor | None
    most: Tensor | None = None
    """f32[1], where the two members may be gate and up whose product csrc/mma.cu makes ready: the most that
    |gate n| |up n| of any row is per |n|².
    """
    bounds: Any = None
    """`bounds.Bounds`, where what members give may have any."""


@frozen(eq=False)
class Group:
    """Linears on one input."""

    parts: tuple[Part, ...] = field(converter=tuple)


@cache
def codebook(name: str, device: torch.device) -> Tensor:
    """f32[16]; zeros for a format without one, which never reads it."""
    return torch.tensor(FORMATS[name].table or (0.0,) * 16, dtype=torch.float32, device=device)


def pack_matrix(raw: RawLinear, floats: Any) -> Matrix | Dense:
    """The file's bytes as records on `raw.device`. floats(format, bytes) -> f32, for what has no record."""
    device = torch.device(raw.device)
    rows, cols = raw.shape
    if raw.format == "BF16" and not capability.on(device).bf16:
        return Dense(_without_bf16(raw, device))
    if raw.format in KINDS:
        return Dense(_plain(raw, device, KINDS[raw.format]))
    if raw.format in FORMATS:
        records = _records(raw, device)
        if records is not None:
            return Matrix(raw.name, raw.format, rows, cols, records)
    log.warning(
        "Tensor %r is stored as %s, for which there is no kernel here; kept as float16, %.1f MiB for %.1f.",
        raw.name, raw.format, rows * cols * 2 / 2**20, raw.data.nbytes / 2**20,
    )  # fmt: skip
    return Dense(torch.from_numpy(floats(raw.format, raw.data)).to(device, torch.float16))


def _slices(raw: RawLinear, device: torch.device) -> Any:
    """(first row, bytes of the rows on the device), whole tiles at a time."""
    count = max(TILE_ROWS, SLICE_BYTES // raw.data.shape[1] // TILE_ROWS * TILE_ROWS)
    staging = torch.empty(
        min(count, raw.shape[0]), raw.data.shape[1], dtype=torch.uint8, pin_memory=device.type == "cuda"
    )
    for first in range(0, raw.shape[0], count):
        part = raw.data[first : first + count]
        _copy(staging.numpy()[: len(part)], part)
        yield first, staging[: len(part)].to(device, copy=True)


@cache
def _copiers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(COPIERS, "luce-copy")


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    """Rows of bytes."""
    if source.nbytes < SLICE_BYTES // COPIERS:
        np.copyto(target, source)
        return
    step = -(-len(source) // COPIERS)
    parts = [slice(first, first + step) for first in range(0, len(source), step)]
    for _ in _copiers().map(lambda of: np.copyto(target[of], source[of]), parts):
        pass


def _give_back(device: torch.device) -> None:
    """What packing left of the matrix before: a weight laid into it would keep the rest of it from all else.

    By the rules of torch's allocator 1.0 GB of Qwen3.5-27B in Q4_K_M, for 480 such calls.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _records(raw: RawLinear, device: torch.device) -> Tensor | None:
    """None when a value has no place in a record."""
    rows, cols = raw.shape
    shape = (tiles_of(rows), blocks_of(cols), FORMATS[raw.format].record_bytes)
    _give_back(device)
    records = torch.empty(shape, dtype=torch.uint8, device=device)
    for first, part in _slices(raw, device):
        if not fits(raw.format, part):
            return None
        made = pack(raw.format, part)
        records[first // TILE_ROWS : first // TILE_ROWS + len(made)] = made
    return records


def _plain(raw: RawLinear, device: torch.device, kind: torch.dtype) -> Tensor:
    """The floats of the file as `kind`."""
    _give_back(device)
    weight = torch.empty(raw.shape, dtype=kind, device=device)
    for first, part in _slices(raw, device):
        weight[first : first + len(part)] = part.view(KINDS[raw.format])
    return weight


def _without_bf16(raw: RawLinear, device: torch.device) -> Tensor:
    """BF16 for a card that does not multiply it: as f16 where that loses next to nothing, else as f32."""
    halves = _plain(raw, device, torch.float16)
    lost = total = 0.0
    for first, part in _slices(raw, device):
        exact = part.view(torch.bfloat16).float()
        lost += float((halves[first : first + len(part)].float() - exact).square().sum())
        total += float(exact.square().sum())
    if lost <= MOST_LOST**2 * total:
        return halves
    log.warning(
        "Tensor %r is stored as BF16, with numbers f16 has no place for, and this card does not multiply "
        "BF16; kept as float32, %.1f MiB for %.1f.",
        raw.name, raw.data.nbytes * 2 / 2**20, raw.data.nbytes / 2**20,
    )  # fmt: skip
    return _plain(raw, device, torch.float32)


def pack_members(members: tuple[Linear, ...]) -> Group | None:
    """Neighbours of one format side by side in one matrix; the members' own become parts of it."""
    if any(member.scale is not None for member in members):
        return None
    parts: list[list[Linear]] = []
    for member in members:
        if parts and _joins(parts[-1][-1], member):
            parts[-1].append(member)
        else:
            parts.append([member])
    return Group(tuple(_part(part) for part in parts))


def _joins(one: Linear, other: Linear) -> bool:
    """Whether rows of the other may follow those of the one."""
    a, b = one.packed, other.packed
    if isinstance(a, Dense) or isinstance(b, Dense):
        return isinstance(a, Dense) and isinstance(b, Dense) and a.weight.dtype == b.weight.dtype
    return one.format == other.format and one.out_features % TILE_ROWS == 0


def _part(members: list[Linear]) -> Part:
    first = members[0].packed
    rows = sum(member.out_features for member in members)
    matrix = first
    if len(members) > 1 and isinstance(first, Dense):
        matrix = Dense(torch.cat([member.packed.weight for member in members]))
        parts = matrix.weight.split([member.out_features for member in members])
        for member, part in zip(members, parts, strict=True):
            member.packed.weight = part
    elif len(members) > 1:
        joined = torch.cat([member.packed.records for member in members])
        matrix = Matrix(first.name, first.format, rows, first.cols, joined)
        at = 0
        for member in members:
            tiles = tiles_of(member.out_features)
            member.packed.records = joined[at : at + tiles]
            at += tiles
    bias = None
    if any(member.bias is not None for member in members):
        like = next(member.bias for member in members if member.bias is not None)
        bias = torch.cat(
            [
                like.new_zeros(member.out_features) if member.bias is None else member.bias
                for member in members
            ]
        )
    return Part(matrix, tuple(members), bias)
