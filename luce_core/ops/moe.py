"""Mixtures of experts, reference: which experts a row goes to, and their weighted sum.

Rows are grouped by expert, so every expert in use is read once and nothing has the size rows x experts, but
for the router's logits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor

from luce_core.contracts import Clamp, ExpertBank, ForwardBatch, Linear, Norm, RouteSpec, SharedExpert
from luce_core.errors import PluginError
from luce_core.ops.namespace import Layer

HIDDEN_ELEMENTS = 1 << 25
"""Numbers of routed rows held at once (128 MiB of f32): longer batches go through in blocks of rows."""


def route(
    ops: Any, b: ForwardBatch, x: Tensor, norm: Norm | None, w: Linear | Tensor, spec: RouteSpec
) -> tuple[Tensor, Tensor]:
    if norm is not None:
        x = ops.rms(x, norm)
    logits = F.linear(x.float(), w) if isinstance(w, Tensor) else ops.linear(x, w).float()
    if spec.softcap:
        logits = ops.softcap(logits, spec.softcap)
    scores = _scores(ops, logits, spec)
    given = None if spec.given_bias is None or b.embed_rows is None else b.embed_rows.long()
    if spec.table is not None:
        ids = spec.table[b.token.long()].long()
        if given is not None:
            best = ops.topk(_eligible(scores[given], spec.given_bias, spec), spec.top_k)
            ids = ids.index_copy(0, given, best.long())
    else:
        ids = ops.topk(_eligible(scores, _bias(scores, given, spec), spec), spec.top_k).long()
    weight = scores.gather(1, ids)
    if spec.renorm:
        weight = weight / (weight.sum(1, keepdim=True) + 1e-20)
    weight = weight * spec.scale
    if spec.per_expert is not None:
        weight = weight * spec.per_expert[ids]
    padding = (b.parent == -2)[:, None]
    return ids.masked_fill(padding, -1).to(torch.int32), weight.masked_fill(padding, 0.0)


def _scores(ops: Any, logits: Tensor, spec: RouteSpec) -> Tensor:
    if spec.score == "softmax":
        return logits.softmax(-1)
    if spec.score == "sigmoid":
        return ops.act(logits, "sigmoid")  # type: ignore[no-any-return]
    return ops.act(logits, "softplus").sqrt()  # type: ignore[no-any-return]


def _bias(scores: Tensor, given: Tensor | None, spec: RouteSpec) -> Tensor | None:
    """Of all rows, or one per row where rows given as embeddings have their own."""
    if given is None or spec.given_bias is None:
        return spec.bias
    text = torch.zeros_like(scores) if spec.bias is None else spec.bias.expand_as(scores)
    return text.index_copy(0, given, spec.given_bias.expand(given.shape[0], -1))


def _eligible(scores: Tensor, bias: Tensor | None, spec: RouteSpec) -> Tensor:
    """What the choice goes by: biased scores, -inf outside the best groups."""
    if bias is not None:
        scores = scores + bias
    if spec.groups == 1:
        return scores
    grouped = scores.view(scores.shape[0], spec.groups, -1)
    total = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
    best = total.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_groups]
    out = torch.ones_like(total, dtype=torch.bool).scatter(1, best, False)
    return grouped.masked_fill(out[:, :, None], -math.inf).view_as(scores)


def experts(
    ops: Any,
    x: Tensor,
    norm: Norm | None,
    routed: tuple[Tensor, Tensor],
    bank: ExpertBank,
    shared: SharedExpert | None = None,
    residual: Tensor | None = None,
    post: Norm | None = None,
    act: str = "silu",
    clamp: Clamp | None = None,
) -> Tensor:
    if bank.mailbox is not None:
        raise PluginError(
            "The reference of op 'experts' runs resident experts only. Use the op layer that belongs to the "
            "expert store, or keep every expert resident."
        )
    n = x if norm is None else ops.rms(x, norm)
    ids, weight = routed
    place = torch.where(ids < 0, -1, bank.lut[ids.long().clamp(min=0)].to(torch.int32))
    widest = max(w.out_features // bank.stack.count for w in (*bank.stack.gate_up, bank.stack.down))
    size = max(1, HIDDEN_ELEMENTS // (widest * ids.shape[1]))
    out = torch.cat(
        [
            _routed(ops, n[rows], place[rows], weight[rows], bank, act, clamp)
            for rows in (slice(start, start + size) for start in range(0, n.shape[0], size))
        ]
        or [torch.zeros_like(n)]
    )
    if shared is not None:
        out = ops.add(out, _shared(ops, n, shared, act))
    if post is not None:
        out = ops.rms(out, post)
    return out if residual is None else ops.add(residual, out)


def _routed(
    ops: Any, n: Tensor, place: Tensor, weight: Tensor, bank: ExpertBank, act: str, clamp: Clamp | None
) -> Tensor:
    """The weighted sum of the routed experts of these rows."""
    stack = bank.stack
    made = [ops.moe_linear(n, place, w, stack.count) for w in stack.gate_up]
    gate, up = made if len(made) == 2 else made[0].chunk(2, -1)
    hidden = ops.act_mul(gate, up, act, clamp)
    y = ops.moe_linear(hidden, place, stack.down, stack.count)
    return torch.einsum("tke,tk->te", y, weight.to(y.dtype))


def _shared(ops: Any, n: Tensor, shared: SharedExpert, act: str) -> Tensor:
    out: Tensor = ops.gated_mlp(n, None, shared.gate_up, shared.down, act=act, clamp=shared.clamp)
    if shared.gate is None:
        return out
    factor = ops.act((n.float() * shared.gate).sum(-1, keepdim=True), "sigmoid")
    return ops.mul(out, factor)  # type: ignore[no-any-return]


def moe_linear(ops: Any, x: Tensor, ids: Tensor, w: Linear, count: int) -> Tensor:
    """Expert ids[t, j] of `w`, a stack of `count` matrices [out, in], applied to its row -> [T, k, out].

    x [T, in], the same row for all its experts, or [T, k, in]. ids i32[T, k]: places in the stack; -1: zeros.
    """
    out_features = w.out_features // count
    rows = (x if x.dim() == 3 else x[:, None].expand(-1, ids.shape[1], -1)).reshape(-1, w.in_features)
    y = rows.new_zeros(rows.shape[0], out_features)
    per_expert = w.scale if w.scale is not None and w.scale.numel() > 1 else None
    plain = w if per_expert is None else evolve(w, scale=None)
    flat = ids.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat + 1, minlength=count + 1).tolist()
    for place, pairs in enumerate(torch.split(order, counts), start=-1):
        if place < 0 or not pairs.numel():
            continue
        own = torch.arange(place * out_features, (place + 1) * out_features, device=x.device)
        out = F.linear(rows[pairs], ops.table_rows(plain, own.to(torch.int32)))
        if per_expert is not None:
            out = out * per_expert[place]
        y[pairs] = out if w.bias is None else out + w.bias[own]
    return y.view(ids.shape[0], ids.shape[1], out_features)


OPS: Layer = {"route": route, "experts": experts, "moe_linear": moe_linear}
