"""What kernels of experts of few rows are given: structures of csrc/moe.cu, moe_down.cu and choose.cuh."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor

from luce_backend_triton.few_rows import Shape, Shares, inverse
from luce_backend_triton.formats import RecordFormat
from luce_backend_triton.product import ACTS, Rows
from luce_backend_triton.route import Asked
from luce_core.contracts import Clamp, Norm


class Logits(ctypes.Structure):
    """`Logits` of csrc/choose.cuh; empty where ids are given."""

    _fields_ = (
        ("of", ctypes.c_void_p),
        ("parent", ctypes.c_void_p),
        ("count", ctypes.c_int),
        ("scale", ctypes.c_float),
    )


class Stack(ctypes.Structure):
    """`Stack` of csrc/moe.cu."""

    _fields_ = (
        ("records", ctypes.c_void_p * 2),
        ("beside", ctypes.c_void_p * 2),
        ("ids", ctypes.c_void_p),
        ("lut", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("x", "norm", "ready", "y")),
        *((name, ctypes.c_int) for name in ("n", "used", "known", "width", "ldx", "act", "clamp")),
        *((name, ctypes.c_float) for name in ("limit", "eps")),
        ("logits", Logits),
    )


class Cut(ctypes.Structure):
    """`Cut` of csrc/moe.cu."""

    _fields_ = (
        ("tiles", Shares),
        *((name, ctypes.c_int) for name in ("blocks", "parts", "each", "rows", "sums")),
        *((name, ctypes.c_uint) for name in ("by_blocks", "by_parts", "by_each", "by_per", "expert_bytes")),
    )


class Down(ctypes.Structure):
    """`Down` of csrc/moe_down.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("records", "beside", "ids", "lut", "given", "weights")),
        *((name, ctypes.c_void_p) for name in ("x", "norm", "mix", "residual", "y")),
        *((name, ctypes.c_int) for name in ("used", "hidden", "width", "n", "ldw", "ldx", "ldr")),
        ("eps", ctypes.c_float),
        ("logits", Logits),
    )


class DownCut(ctypes.Structure):
    """`DownCut` of csrc/moe_down.cu."""

    _fields_ = (
        ("tiles", Shares),
        *((name, ctypes.c_int) for name in ("blocks", "parts", "room")),
        *((name, ctypes.c_uint) for name in ("by_blocks", "expert_bytes")),
    )


@cache
def cut_of(
    fmt: RecordFormat, shape: Shape, tiles: int, blocks: int, grid: int, matrices: int, pairs: int, each: int,
    per: int,
) -> Cut:  # fmt: skip
    """Of an expert's matrix of tiles × blocks records, by `grid` thread blocks a pair. each: pairs of a row;
    per: pairs that meet one row of x.
    """
    parts = sharing(shape, tiles, blocks, grid, matrices)
    return Cut(
        Shares(*divmod(tiles, grid)), blocks, parts, each, pairs // per,
        sums_of(shape, tiles, blocks, grid, matrices), *map(inverse, (blocks, parts, each, per)),
        tiles * blocks * fmt.record_bytes,
    )  # fmt: skip


def sharing(shape: Shape, tiles: int, blocks: int, grid: int, matrices: int) -> int:
    """moe_gemv: the most warps that share a tile of one matrix."""
    return shape.parts(tiles // grid * matrices, blocks, 1)


def sums_of(shape: Shape, tiles: int, blocks: int, grid: int, matrices: int) -> int:
    """moe_gemv: f32 of all parts, in a thread block."""
    return matrices * -(-tiles // grid) * sharing(shape, tiles, blocks, grid, matrices) * 16 * shape.x_rows


@cache
def down_cut_of(fmt: RecordFormat, tiles: int, blocks: int, grid: int, each: int) -> DownCut:
    """Likewise, by `grid` thread blocks a row."""
    most = -(-tiles // grid)
    sizes = (blocks, each * blocks, most, inverse(blocks), tiles * blocks * fmt.record_bytes)
    return DownCut(Shares(*divmod(tiles, grid)), *sizes)


def _given_by(who: Tensor | Asked) -> tuple[int | None, Logits]:
    """ids, or what is chosen by."""
    if isinstance(who, Asked):
        count = who.logits.shape[1]
        return None, Logits(who.logits.data_ptr(), who.parent.data_ptr(), count, who.scale)
    return who.data_ptr(), Logits()


def stack_of(
    records: Sequence[Tensor], beside: Sequence[Tensor], who: Tensor | Asked, lut: Tensor, rows: Rows,
    y: Tensor, used: int, act: str, clamp: Clamp | None,
) -> Stack:  # fmt: skip
    """The arguments of `moe_gemv`."""
    assert rows.up is None
    norm, ready, (ids, logits) = rows.norm, rows.made("gemv"), _given_by(who)
    return Stack(
        _two(records), _two(beside), ids, lut.data_ptr(), rows.x.data_ptr(),
        None if norm is None else norm.weight.data_ptr(), None if ready is None else ready.data_ptr(),
        y.data_ptr(), y.shape[1], used, lut.numel(),
        rows.x.shape[1], rows.x.stride(0), 1 + ACTS.index(act),
        0 if clamp is None else 1 if clamp.at == "before" else 2, 0.0 if clamp is None else clamp.limit,
        0.0 if norm is None else norm.eps, logits,
    )  # fmt: skip


def down_of(
    records: Tensor, beside: Tensor | None, who: Tensor | Asked, used: int, lut: Tensor, rows: Rows,
    weight: Tensor | None, mix: Tensor | None, x: Tensor, norm: Norm | None, residual: Tensor | None,
    y: Tensor,
) -> Down:  # fmt: skip
    """The arguments of `moe_down`."""
    first, others = (records, beside), (lut, rows.x, weight, x, norm and norm.weight, mix, residual, y)
    ids, logits = _given_by(who)
    return Down(
        *(None if one is None else one.data_ptr() for one in first), ids,
        *(None if one is None else one.data_ptr() for one in others),
        used, rows.x.shape[1], x.shape[1], y.shape[1], 0 if weight is None else weight.stride(0), x.stride(0),
        0 if residual is None else residual.stride(0), 0.0 if norm is None else norm.eps, logits,
    )  # fmt: skip


def _two(tensors: Sequence[Tensor]) -> Any:
    """Addresses of at most two."""
    return (ctypes.c_void_p * 2)(*(one.data_ptr() for one in tensors))
