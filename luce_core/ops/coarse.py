"""References of the coarse ops, written with fine ones through the namespace, so that a layer's are used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from luce_core.contracts import Clamp, ForwardBatch, Linear, LinearGroup, Norm
from luce_core.ops.namespace import Layer


def embed(ops: Any, b: ForwardBatch, table: Linear, scale: float = 1.0, given: bool = True) -> Tensor:
    x: Tensor = ops.table_rows(table, b.token)
    if scale != 1.0:
        x = ops.scale(x, scale)
    if given and b.embeds is not None and b.embed_rows is not None:
        x = x.index_copy(0, b.embed_rows.long(), b.embeds.to(x.dtype))
    return x


def norm_linear(ops: Any, x: Tensor, norm: Norm | None, w: LinearGroup) -> tuple[Tensor, ...]:
    if norm is not None:
        x = ops.rms(x, norm)
    return tuple(ops.linear(x, member) for member in w.members)


def linear_out(
    ops: Any, y: Tensor, w: Linear, residual: Tensor | None = None, post: Norm | None = None, scale: Any = 1.0
) -> Tensor:
    out: Tensor = ops.linear(y, w)
    if post is not None:
        out = ops.rms(out, post)
    if residual is not None:
        out = ops.add(residual, out)
    if isinstance(scale, Tensor) or scale != 1.0:
        out = ops.scale(out, scale)
    return out


def head_linear(ops: Any, x: Tensor, w: Linear) -> Tensor:
    """[T, G, in] × [G, out, in] -> [T, G, out]; the matrix is stored as [G · out, in]."""
    groups = x.shape[1]
    rows = ops.table_rows(w, torch.arange(w.out_features, device=x.device))
    y: Tensor = x.transpose(0, 1) @ rows.view(groups, -1, w.in_features).transpose(1, 2)
    return y.transpose(0, 1)


def gated_mlp(
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
) -> Tensor:
    gate, up = ops.norm_linear(x, norm, gate_up)
    return ops.linear_out(ops.act_mul(gate, up, act, clamp), down, residual, post, scale)  # type: ignore[no-any-return]


def head(
    ops: Any, x: Tensor, norm: Norm | None, w: Linear, softcap: float = 0.0, scale: float = 1.0
) -> Tensor:
    if norm is not None:
        x = ops.rms(x, norm)
    logits: Tensor = ops.linear(x, w)
    if scale != 1.0:
        logits = ops.scale(logits, scale)
    return ops.softcap(logits, softcap) if softcap else logits


def tap(ops: Any, b: ForwardBatch, layer: int, x: Tensor) -> None:
    for where, buffer in b.taps.items():
        if where.kind == "residual" and where.layer == layer:
            buffer[: x.shape[0]].copy_(x.reshape(x.shape[0], -1))


OPS: Layer = {
    "embed": embed,
    "norm_linear": norm_linear,
    "linear_out": linear_out,
    "head_linear": head_linear,
    "gated_mlp": gated_mlp,
    "head": head,
    "tap": tap,
}
