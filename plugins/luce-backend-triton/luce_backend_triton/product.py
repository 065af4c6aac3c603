"""x Wᵀ: which kernel, fed with what. One `Rows` is one input, however many matrices it meets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
from attrs import define, evolve, field
from torch import Tensor

from luce_backend_triton import capability, few_floats, few_rows, kernels, ready, shapes
from luce_backend_triton.few_floats import Behind
from luce_backend_triton.few_rows import ALONE, X_BYTES, Beside, Divide, Kind, Shape
from luce_backend_triton.formats import RECORD_COLS, blocks_of
from luce_backend_triton.given import Given
from luce_backend_triton.matrix import Dense, Matrix
from luce_backend_triton.memory import SCRATCH_BYTES
from luce_backend_triton.notes import Notes
from luce_core.contracts import Clamp, Norm

CHUNK, WIDEST = 1024, 8192
"""Columns a program of a row kernel reads at a time; of one that has to wait for them: all, up to WIDEST."""
BLOCKS = 4
"""Of 256 columns of a row that one program makes ready for csrc/mma.cu: where there is a norm, it reads the
whole row. The same for any number of rows, since a block's sums have the order of a program's warps.
"""
MOST_MADE, MOST_NORMED = 1, 2
"""Blocks of 256 columns of the only row that a warp of csrc/gemv.cu makes ready, of x and of norm(x), for
which programs of another launch would each have to read the whole row.
"""
PORTABLE_LIMIT = 64
"""Most rows the Triton product takes; more go through dense weights."""
PORTABLE_TILE, PORTABLE_SMALL = 32, 16
"""Rows of x it takes at a time, and where Triton has no tensor cores."""
PORTABLE_ROWS, PORTABLE_WARPS = 16, 8
"""Of W, and warps of a program: what the codes of more become finds no registers (LOG.md 2026-12-01)."""
ACTS = ("silu", "gelu", "gelu_tanh", "relu")
NOTHING = Behind()
SQUARES: Notes[Tensor] = Notes()
"""f32[m], Σ of each row's squares, of tensors whose norm some product has read."""


def overlaps(device: torch.device) -> bool:
    """Whether a launch may begin beside the one before it."""
    return few_rows.OVERLAP and capability.on(device).overlap


@define(eq=False)
class Rows:
    """One input [m, k] of linears: x, or norm(x), or act(x) · up; made ready once for each kernel."""

    x: Tensor
    """f32[m, k], rows at any stride."""
    norm: Norm | None = None
    up: Tensor | None = None
    act: str = ""
    clamp: Clamp | None = None
    even: bool = False
    """Whether a row that came made ready has one factor in all its columns."""
    divide: Divide | None = None
    """What norm(x) that came made ready lacks."""
    lengths: bool = False
    """Whether what `few("mma")` gave tells |norm(x)|² of each row: from csrc/ready.cu, or with `divide`."""
    _few: dict[Kind, Tensor] = field(factory=dict)
    _dense: dict[tuple[torch.dtype, int], tuple[Tensor, Tensor]] = field(factory=dict)

    def _common(self) -> tuple[tuple[Tensor, Tensor, Tensor], float, float, dict[str, object]]:
        x = self.x
        up = x if self.up is None else self.up
        weight = x if self.norm is None else self.norm.weight
        modes = {"before": 1, "after": 2}
        constants = {
            "NORM": self.norm is not None,
            "ACT": self.act,
            "CLAMP": modes[self.clamp.at] if self.clamp else 0,
            "CHUNK": CHUNK,
        }
        limit = self.clamp.limit if self.clamp else 0.0
        return (x, up, weight), self.norm.eps if self.norm else 0.0, limit, constants

    @classmethod
    def ready(cls, kind: Kind, made: Tensor, k: int) -> Rows:
        """Of what another launch makes as `few` gives it, u8[blocks, m, X_BYTES], with one factor for a row:
        x itself is nowhere.
        """
        return cls(torch.empty(made.shape[1], k, device="meta"), even=True, few={kind: made})

    def part(self, first: int, count: int) -> Rows:
        """Rows first .. first + count of this input, fewer at its end."""
        of = slice(first, first + count)
        return Rows(self.x[of], self.norm, None if self.up is None else self.up[of], self.act, self.clamp)

    def given(self) -> Given | None:
        """For the kernel that makes x ready itself; None: it cannot."""
        if self.clamp is not None:
            return None
        weight, eps = (None, 0.0) if self.norm is None else (self.norm.weight, self.norm.eps)
        given = Given(self.x, self.up, weight, eps, self.act)
        return given if given.readable() else None

    def made(self, kind: Kind) -> Tensor | None:
        """What `few` gives, where it was made already."""
        return self._few.get(kind)

    def room(self, kind: Kind) -> Tensor:
        """u8[blocks, m, X_BYTES], where another launch makes what `few` gives, instead of one of its own."""
        m, k = self.x.shape
        self._few[kind] = torch.empty(blocks_of(k), m, X_BYTES, dtype=torch.uint8, device=self.x.device)
        return self._few[kind]

    def few(self, kind: Kind) -> Tensor:
        """As csrc/gemv.cu or csrc/mma.cu wants it."""
        if kind not in self._few:
            (x, up, weight), eps, limit, constants = self._common()
            m, k = x.shape
            out = self.room(kind)
            given = self.given() if kind == "mma" and x.is_cuda else None
            squares = None
            if given is not None and self.norm is not None:
                squares = torch.empty(m, device=x.device)
            if given is not None and ready.launch(given, out, squares):
                if squares is not None:
                    SQUARES.put(x, squares)
                    self.lengths = True
                return out
            views = (out.view(torch.float16), out.view(torch.float32), out.view(torch.int8))
            overlap = x.is_cuda and overlaps(x.device)
            if self.norm is not None:
                constants["CHUNK"] = min(WIDEST, triton.next_power_of_2(k))
            per = BLOCKS if kind == "mma" else 1
            kernels.prepare[(m, -(-out.shape[0] // per))](
                x, up, weight, *views, m, k, x.stride(0), eps, limit, MMA=kind == "mma", PER=per,
                OVERLAP=overlap, num_warps=4 if k <= 2048 else 8, launch_pdl=overlap, **constants,
            )  # fmt: skip
        return self._few[kind]

    def read(self) -> None:
        """A product has read what `few("mma")` gave."""
        if self.divide is not None:
            SQUARES.put(self.x, self.divide.squares)

    def dense(self, dtype: torch.dtype = torch.float16, align: int = RECORD_COLS) -> tuple[Tensor, Tensor]:
        """[m, columns up to a multiple of `align`], and the factor f32[m] of each row."""
        if (dtype, align) not in self._dense:
            (x, up, weight), eps, limit, constants = self._common()
            m, k = x.shape
            wide = -(-k // align) * align
            out = torch.empty(m, wide, dtype=dtype, device=x.device)
            factors = torch.empty(m, dtype=torch.float32, device=x.device)
            kernels.prepare_dense[(m,)](
                x, up, weight, out, factors, k, wide, x.stride(0), eps, limit, num_warps=8, **constants
            )
            self._dense[dtype, align] = (out, factors)
        return self._dense[dtype, align]


def few_of(matrix: Matrix, m: int, cuda: bool) -> tuple[Shape, int] | None:
    """The kernel of CUDA C++ for m rows of x, and its thread blocks."""
    device = matrix.records.device
    room = shapes.room_of(device.index or 0) if cuda and device.type == "cuda" else None
    if room is None or m > room.most_rows:
        return None
    return shapes.choose(matrix.fmt, m, matrix.records.shape[0], matrix.blocks, room)


def beside(matrices: Sequence[Matrix | Dense], rows: Rows, cuda: bool) -> list[Beside]:
    """How the products of one x lie beside each other, when launched in this order."""
    m, kinds = rows.x.shape[0], []
    for matrix in matrices:
        found = few_of(matrix, m, cuda) if isinstance(matrix, Matrix) else None
        kinds.append(None if found is None else found[0].kind)
    found_places: list[Beside] = []
    for at, kind in enumerate(kinds):
        follows = at > 0 and kind is not None and kinds[at - 1] == kind
        place = found_places[-1].place + 1 if follows else 0
        found_places.append(Beside(place, kind is None or kind != (*kinds, None)[at + 1]))
    return found_places


def product(
    matrix: Matrix, rows: Rows, cuda: bool, behind: Behind = NOTHING, beside: Beside = ALONE
) -> Tensor:
    """-> f32[m, matrix.rows] = rows Wᵀ · scale + bias + residual. cuda: CUDA C++ may be used."""
    m = rows.x.shape[0]
    device = matrix.records.device
    scale, bias, residual = behind.scale, behind.bias, behind.residual
    found = few_of(matrix, m, cuda)
    if found is not None:
        shape, grid = found
        given = _unready(shape, matrix, rows)
        if given is not None:
            shape = evolve(shape, makes=-(-matrix.blocks // shape.warps))
        if shape.kind == "mma" and rows.even:
            shape = evolve(shape, even=True)
        y = torch.empty(m, matrix.rows, device=device)
        few_rows.launch(
            matrix.format, matrix.records, matrix.rows, rows.few(shape.kind) if given is None else given, y,
            shape, grid,
            scale=scale, bias=bias, residual=residual, beside=beside, divide=rows.divide,
        )  # fmt: skip
        rows.read()
        return y
    if m <= PORTABLE_LIMIT:
        most = PORTABLE_TILE if capability.on(device).matrix else PORTABLE_SMALL
        return portable(matrix, rows, behind, max(16, min(most, triton.next_power_of_2(m))))
    return _finish(_many(matrix, rows), rows.dense()[1], behind)


def _unready(shape: Shape, matrix: Matrix, rows: Rows) -> Given | None:
    """What the kernel makes ready itself; None: `Rows.few` does."""
    if shape.kind != "gemv" or rows.x.shape[0] != 1 or rows.up is not None or rows.made("gemv") is not None:
        return None
    most = MOST_MADE if rows.norm is None else MOST_NORMED
    return rows.given() if matrix.blocks <= most * shape.warps else None


def on_floats(dense: Dense, rows: Rows, behind: Behind) -> Tensor | None:
    """The same with floats; None: nothing the kernels can read."""
    m, weight = rows.x.shape[0], dense.weight
    if weight.is_cuda and m > few_floats.MOST_ROWS and weight.dtype in (torch.float16, torch.bfloat16):
        x, factors = rows.dense(weight.dtype, 1)
        return _finish(torch.mm(x, weight.t(), out_dtype=torch.float32), factors, behind)
    given = rows.given() if weight.is_cuda and m <= few_floats.MOST_ROWS else None
    if given is None:
        return None
    y = torch.empty(m, weight.shape[0], device=weight.device)
    return y if few_floats.launch(weight, given, y, behind) else None


def portable(matrix: Matrix, rows: Rows, behind: Behind, block: int) -> Tensor:
    """`product` in Triton, `block` rows of x in a program."""
    scale, bias, residual = behind.scale, behind.bias, behind.residual
    x, factors = rows.dense()
    m = x.shape[0]
    y = torch.empty(m, matrix.rows, device=x.device)
    tile = max(16, min(512, triton.next_power_of_2(matrix.rows)) if kernels.INTERPRETED else PORTABLE_ROWS)
    kernels.linear[(-(-matrix.rows // tile), -(-m // block))](
        x, factors, *matrix.views(), y,
        y if scale is None else scale, y if bias is None else bias, y if residual is None else residual,
        m, matrix.rows, matrix.blocks, 0 if residual is None else residual.stride(0), y.stride(0),
        HAS_SCALE=scale is not None, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, M=block,
        ROWS=tile, num_warps=PORTABLE_WARPS, **matrix.constants(),
    )  # fmt: skip
    return y


def dense_rows(matrix: Matrix, first: int, count: int, out: Tensor) -> None:
    """Rows first .. first + count as floats -> out [count, at least matrix.cols]."""
    grid = (-(-count // 16), matrix.blocks)
    kernels.dequantize[grid](
        *matrix.views(), out, out, count, first, out.shape[1], matrix.blocks, out.stride(0),
        IDS=False, ROWS=16, num_warps=4, **matrix.constants(),
    )  # fmt: skip


def most_of_pairs(matrix: Matrix) -> Tensor:
    """f32[rows / 2]: of each of gate's rows and up's beside it, the most that |gate n| |up n| is per |n|²."""
    return _by_rows(kernels.most_of_pairs, matrix, matrix.rows // 2)


def lengths(matrix: Matrix) -> Tensor:
    """f32[rows], of each row."""
    return _by_rows(kernels.lengths, matrix, matrix.rows, ROOT=True)


def magnitudes(matrix: Matrix) -> Tensor:
    """f32[rows], of each row the sum of magnitudes."""
    return _by_rows(kernels.lengths, matrix, matrix.rows, ROOT=False)


def _by_rows(kernel: Any, matrix: Matrix, count: int, **more: Any) -> Tensor:
    """-> f32[count], a number of every row."""
    out = torch.empty(count, device=matrix.records.device)
    with torch.cuda.device_of(out):
        kernel[(-(-count // 16),)](
            *matrix.views(), out, count, matrix.blocks, ROWS=16, num_warps=4, **matrix.constants(), **more
        )
    return out


def table_rows(matrix: Matrix, ids: Tensor) -> Tensor:
    """Rows `ids` i32[n] -> f32[n, cols]."""
    out = torch.empty(ids.numel(), matrix.cols, device=ids.device)
    rows = 16 if kernels.INTERPRETED else 1
    kernels.dequantize[(-(-ids.numel() // rows), matrix.blocks)](
        *matrix.views(), ids, out, ids.numel(), 0, matrix.cols, matrix.blocks, out.stride(0), IDS=True,
        ROWS=rows, num_warps=4, **matrix.constants(),
    )  # fmt: skip
    return out


@cache
def _scratch(device: torch.device, count: int) -> Tensor:
    """f16[count], the one place of a device where dense weights are made."""
    return torch.empty(count, dtype=torch.float16, device=device)


def _many(matrix: Matrix, rows: Rows) -> Tensor:
    """Weights as f16, a slice at a time, and torch's product; without the factors of the rows."""
    x, _ = rows.dense()
    wide = x.shape[1]
    step = min(matrix.rows, max(128, SCRATCH_BYTES // 2 // wide // 128 * 128))
    parts = []
    for first in range(0, matrix.rows, step):
        count = min(step, matrix.rows - first)
        need = count * wide
        scratch = _scratch(x.device, max(need, SCRATCH_BYTES // 2 if x.is_cuda else need))[:need].view(
            count, wide
        )
        dense_rows(matrix, first, count, scratch)
        if x.is_cuda:
            parts.append(torch.mm(x, scratch.t(), out_dtype=torch.float32))
        else:
            parts.append(x.float() @ scratch.float().t())
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _finish(y: Tensor, factors: Tensor, behind: Behind) -> Tensor:
    """y · factors · scale + bias + residual, in place."""
    scale, bias, residual = behind.scale, behind.bias, behind.residual
    if residual is not None and (residual.dtype is not torch.float32 or residual.stride(-1) != 1):
        residual = residual.float().contiguous()
    m, n = y.shape
    kernels.finish[(m,)](
        y, factors, y if scale is None else scale, y if bias is None else bias,
        y if residual is None else residual, n, 0 if residual is None else residual.stride(0),
        HAS_SCALE=scale is not None, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        CHUNK=min(2 * CHUNK, triton.next_power_of_2(n)), num_warps=8,
    )  # fmt: skip
    return y
