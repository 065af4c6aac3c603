"""norm(y) made ready by the product that gives y: the residual stream from one layer to the next.

Nobody there has a whole row. So the division is left to the products that read it, which add up Σ of squares
beside their sums; and f16 are times a power of two that no number exceeds: |y| is at most the length of the
residual, which is known since its own norm was read, and what W can add to it: Σ |w| of a row times the most
that x can be by its own factor. Which norm follows is known of recorded programs (`rewrite`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from luce_backend_triton import bounds, few_rows, gated, product
from luce_backend_triton.few_rows import X_BYTES, Divide, Then
from luce_backend_triton.formats import RECORD_COLS
from luce_backend_triton.matrix import Dense, Matrix
from luce_backend_triton.notes import Notes
from luce_backend_triton.product import SQUARES, Rows, few_of
from luce_core.contracts import Linear, Norm, OpCall, Program, Ref

MADE = True
"""Whether it is; otherwise csrc/ready.cu makes it of y."""
UNEVEN, UNEVEN_ROWS = 64.0, 2048.0
"""How much larger than their root of mean squares the largest weight of a norm may be; and than that of its
rows' lengths the largest Σ |w| of a matrix's row (without outliers it is 0.8 times the root of their number).
Above it, most of y could lie too far below the bound for f16, which has all bits down to 2^-25 of it.
"""
WARPS = 4
"""Of a thread block, which has 128 columns of y."""
READ_BY = {"norm_linear": ("x", "norm", "w"), "gated_mlp": ("x", "norm", "gate_up", "down")}
"""Ops that read norm(y), and their first arguments."""
GIVEN_BY = {"linear_out": ("y", "w"), "gated_mlp": READ_BY["gated_mlp"]}
"""Ops that give y."""
PREFIX = "triton."
"""Of this layer's own ops."""


@frozen(eq=False)
class Next:
    """The norm behind a matrix, whose rows are y."""

    norm: Norm
    bound: Tensor
    """f32[2]: what |norm's weight · y| is at most, per length of the residual, and per factor of x's f16."""

    @classmethod
    def of(cls, norm: Norm, magnitudes: Tensor) -> Next:
        """magnitudes: of the matrix, `product.magnitudes`."""
        most = norm.weight.abs().amax()
        each = magnitudes.amax() * bounds.HIGHEST
        return cls(norm, most * torch.stack((torch.ones_like(most), each)))


@frozen(eq=False)
class Left:
    """norm(y) but for the division."""

    norm: Norm
    ready: Tensor
    """u8[blocks, m, X_BYTES]."""
    divide: Divide


_left: Notes[Left] = Notes()


def rows_of(x: Tensor, norm: Norm | None, packed: Iterable[Matrix | Dense]) -> Rows:
    """norm(x), f32[m, k], in front of products with these matrices."""
    found = None if norm is None else _left.get(x)
    if found is None or found.norm is not norm:
        return Rows(x, norm)
    if not all(isinstance(one, Dense) or one.fmt.scales not in gated.TIMES_32 for one in packed):
        return Rows(x, norm)
    return Rows(x, norm, even=True, divide=found.divide, lengths=True, few={"mma": found.ready})


def made(rows: Rows, w: Linear, residual: Tensor | None, following: Next) -> Tensor | None:
    """residual + rows Wᵀ -> f32[m, n], of which norm(..) is left ready; None: it is not, nothing was done."""
    m, matrix, before = rows.x.shape[0], w.packed, None if residual is None else SQUARES.get(residual)
    if not MADE or not bounds.few(m) or before is None or not rows.even or residual is None:
        return None
    whole = isinstance(matrix, Matrix) and matrix.rows % RECORD_COLS == 0
    found = few_of(matrix, m, True) if whole else None
    if found is None or found[0].kind != "mma" or (found[0].tiles, found[0].warps) != (gated.TILES, WARPS):
        return None
    if w.scale is not None or w.bias is not None:
        return None
    shape, grid = found
    y = residual.new_empty(m, matrix.rows)
    ready = torch.empty(matrix.rows // RECORD_COLS, m, X_BYTES, dtype=torch.uint8, device=y.device)
    few_rows.launch(
        matrix.format, matrix.records, matrix.rows, rows.few("mma"), y,
        evolve(shape, even=True, then=True), grid,
        residual=residual, then=Then(following.norm.weight, following.bound, before, ready),
    )  # fmt: skip
    divide = Divide(torch.empty(m, device=y.device), matrix.rows, following.norm.eps)
    _left.put(y, Left(following.norm, ready, divide))
    return y


# --- programs


def rewrite(program: Program, ops: Any) -> Program:
    """Ops of this layer that give y are told which norm all read it by, where there is one. A network with
    experts stays as it is: nearly all of its halves of layers begin or end with those.
    """
    if any(call.op == "experts" for call in program.calls):
        return program
    readers: dict[int, list[Norm]] = {}
    for call in program.calls:
        if call.op in READ_BY:
            given = _named(call)
            if isinstance(given.get("x"), Ref) and given.get("norm") is not None:
                readers.setdefault(given["x"].value, []).append(given["norm"])
    calls = tuple(_told(call, ops, readers) for call in program.calls)
    return program if calls == program.calls else evolve(program, calls=calls)


def _named(call: OpCall) -> dict[str, Any]:
    return {**dict(zip((READ_BY | GIVEN_BY)[call.op], call.args, strict=False)), **call.kwargs}


def _told(call: OpCall, ops: Any, readers: dict[int, list[Norm]]) -> OpCall:
    norms = readers.get(call.outs[0], []) if call.op in GIVEN_BY else []
    if not norms or any(one is not norms[0] for one in norms) or not _ours(call.op, ops):
        return call
    given = _named(call)
    following = _next(given["w" if call.op == "linear_out" else "down"], norms[0])
    if following is None:
        return call
    return evolve(call, op=PREFIX + call.op, kwargs={**call.kwargs, "following": following})


def _ours(op: str, ops: Any) -> bool:
    """Whether no other layer lies above this one's."""
    own, found = (getattr(ops, name).func if name in ops else None for name in (PREFIX + op, op))
    return own is not None and own == found


def _next(w: Linear, norm: Norm) -> Next | None:
    matrix, weight = w.packed, norm.weight
    plain = weight.dtype is torch.float32 and weight.is_contiguous()
    if not isinstance(matrix, Matrix) or not gated.useful(matrix) or not plain:
        return None
    magnitudes = product.magnitudes(matrix)
    if not even(weight, weight, UNEVEN) or not even(magnitudes, product.lengths(matrix), UNEVEN_ROWS):
        return None
    return Next.of(norm, magnitudes)


def even(largest: Tensor, beside: Tensor, most: float) -> bool:
    """Whether none of the former is more than so many times the latter's root of mean squares."""
    return bool(largest.abs().amax() <= most * beside.square().mean().sqrt())


__all__ = ["Next", "even", "made", "rewrite", "rows_of"]
