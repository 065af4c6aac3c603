"""Op layers `triton` and `triton-portable`: linears on packed weights, with what stands around them fused
in.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from luce_backend_triton import bounds, gated, measure, normed, product
from luce_backend_triton.few_floats import Behind
from luce_backend_triton.few_rows import ALONE, Beside
from luce_backend_triton.matrix import Dense, Group, Matrix, pack_matrix, pack_members
from luce_backend_triton.product import ACTS, Rows
from luce_core.contracts import Clamp, Linear, LinearGroup, Norm, RawLinear
from luce_core.ops import coarse


class Layer:
    """The ops of one layer. cuda: few rows go through CUDA C++."""

    gates = True
    """Whether rows may be made ready by what gives them: act(gate) · up by the product that gives both."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda

    # --- weights

    def pack_linear(self, ops: Any, raw: RawLinear) -> Matrix | Dense:
        """The file's bytes in records on the device; floats and unknown formats as floats."""
        measure.once(torch.device(raw.device))
        return pack_matrix(raw, ops.dequantize)

    def pack_group(self, ops: Any, members: tuple[Linear, ...]) -> Group | None:
        """One launch for neighbours of one format."""
        group = pack_members(members)
        if group is None or not self.gates:
            return group
        group = gated.bounded(group)
        return bounds.bounded(group) if self.cuda else group

    def table_rows(self, ops: Any, table: Linear, ids: Tensor) -> Tensor:
        """Rows `ids` i32[...] of the matrix, times its scale -> f32[..., in]."""
        packed = table.packed
        if isinstance(packed, Dense):
            rows = F.embedding(ids, packed.weight).float()
        else:
            rows = product.table_rows(packed, ids.reshape(-1).int()).view(*ids.shape, table.in_features)
        return rows if table.scale is None else rows * table.scale

    # --- products

    def linear(self, ops: Any, x: Tensor, w: Linear) -> Tensor:
        """x [..., in] -> f32[..., out] = (x Wᵀ) · scale + bias."""
        flat = x.reshape(-1, w.in_features)
        return self._one(ops, _rows(flat), w).view(*x.shape[:-1], w.out_features)

    def _one(self, ops: Any, rows: Rows, w: Linear, residual: Tensor | None = None) -> Tensor:
        return self._product(ops, rows, w.packed, Behind(w.scale, w.bias, residual))

    def _product(
        self, ops: Any, rows: Rows, packed: Matrix | Dense, behind: Behind, beside: Beside = ALONE
    ) -> Tensor:
        if isinstance(packed, Matrix):
            return product.product(packed, rows, self.cuda, behind, beside)
        if self.cuda:
            y = product.on_floats(packed, rows, behind)
            if y is not None:
                return y
        x = _plain(ops, rows)
        y = F.linear(x.to(packed.weight.dtype), packed.weight).float()
        if behind.scale is not None:
            y = y * behind.scale
        if behind.bias is not None:
            y = y + behind.bias
        return y if behind.residual is None else y + behind.residual

    def _all(self, ops: Any, rows: Rows, group: LinearGroup) -> tuple[Tensor, ...]:
        if not isinstance(group.packed, Group):
            return tuple(self._one(ops, rows, member) for member in group.members)
        found: list[Tensor] = []
        places = product.beside([part.matrix for part in group.packed.parts], rows, self.cuda)
        for part, place in zip(group.packed.parts, places, strict=True):
            y = self._product(ops, rows, part.matrix, Behind(bias=part.bias), place)
            outputs = y.split([member.out_features for member in part.members], 1)
            if rows.norm is not None and bounds.few(len(y)):
                bounds.note(outputs, part, rows.norm)
            found += outputs
        return tuple(found)

    def norm_linear(self, ops: Any, x: Tensor, norm: Norm | None, w: LinearGroup) -> tuple[Tensor, ...]:
        """One [T, out] per member of `w`, of norm(x)."""
        return self._all(ops, self._rows(x, norm, w), w)

    def _rows(self, x: Tensor, norm: Norm | None, w: LinearGroup) -> Rows:
        if not isinstance(w.packed, Group) or not self.cuda:
            return _rows(x, norm)
        return normed.rows_of(_flat(x), norm, [part.matrix for part in w.packed.parts])

    def linear_out(
        self,
        ops: Any,
        y: Tensor,
        w: Linear,
        residual: Tensor | None = None,
        post: Norm | None = None,
        scale: Any = 1.0,
        following: normed.Next | None = None,
    ) -> Tensor:
        """(residual + post(W y)) · scale -> [T, E]. following: `rewrite` says what reads it."""
        flat = _flat(y)
        rows = bounds.rows_of(y, w.packed, flat) if self.cuda and self.gates else Rows(flat)
        return self._out(ops, rows, w, residual, post, scale, following)

    def _out(
        self, ops: Any, rows: Rows, w: Linear, residual: Tensor | None, post: Norm | None, scale: Any,
        following: normed.Next | None = None,
    ) -> Tensor:  # fmt: skip
        plain = post is None and not isinstance(scale, Tensor) and scale == 1.0
        if following is not None and plain and residual is not None:
            made = normed.made(rows, w, _flat(residual), following)
            if made is not None:
                return made
        fused = residual if post is None else None
        out = self._one(ops, rows, w, None if fused is None else _flat(fused))
        if post is not None:
            out = ops.rms(out, post)
            if residual is not None:
                out = ops.add(residual, out)
        if isinstance(scale, Tensor) or scale != 1.0:
            out = ops.scale(out, scale)
        return out

    def gated_mlp(
        self,
        ops: Any,
        x: Tensor,
        norm: Norm | None,
        gate_up: LinearGroup,
        down: Linear,
        residual: Tensor | None = None,
        post: Norm | None = None,
        act: str = "silu",
        clamp: Clamp | None = None,
        scale: Any = 1.0,
        following: normed.Next | None = None,
    ) -> Tensor:
        """(residual + post(down(act(gate n) · up n))) · scale, n = norm(x) -> [T, E]. following: as in
        `linear_out`.
        """
        if act not in ACTS:
            return coarse.gated_mlp(ops, x, norm, gate_up, down, residual, post, act, clamp, scale)
        rows = self._rows(x, norm, gate_up)
        if clamp is None and self.gates and isinstance(gate_up.packed, Group):
            made = gated.made(gate_up.packed.parts[0], rows, act, down.packed, self.cuda)
            if made is not None:
                return self._out(ops, made, down, residual, post, scale, following)
        gate, up = self._all(ops, rows, gate_up)
        del rows  # and x as halves with it
        if gate.stride() != up.stride():
            gate, up = gate.contiguous(), up.contiguous()
        return self._out(ops, Rows(gate, None, up, act, clamp), down, residual, post, scale, following)

    def head(
        self, ops: Any, x: Tensor, norm: Norm | None, w: Linear, softcap: float = 0.0, scale: float = 1.0
    ) -> Tensor:
        """[R, E] -> f32[R, V]."""
        logits = self._one(ops, _rows(x, norm), w)
        if scale != 1.0:
            logits = ops.scale(logits, scale)
        return ops.softcap(logits, softcap) if softcap else logits


def _flat(x: Tensor) -> Tensor:
    """f32, columns side by side."""
    x = x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows(x: Tensor, norm: Norm | None = None) -> Rows:
    return Rows(_flat(x), norm)


def _plain(ops: Any, rows: Rows) -> Tensor:
    """The input itself, for matrices kept as floats."""
    x = rows.x
    if rows.norm is not None:
        x = ops.rms(x, rows.norm)
    if rows.up is not None:
        x = ops.act_mul(x, rows.up, rows.act, rows.clamp)
    return x


CUDA = Layer(cuda=True)
PORTABLE = Layer(cuda=False)

__all__ = ["CUDA", "PORTABLE", "Layer"]
