"""Hyper-connections, reference: a residual of several streams, read as one and written back mixed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from luce_core.contracts import ForwardBatch, RecallSpec, StreamsSpec
from luce_core.ops.namespace import Layer

SMALLEST_LIKENESS = 1e-6
"""Of `RecallSpec`: below it, likeness counts as this much."""


def streams_in(ops: Any, h: Tensor, w: StreamsSpec) -> tuple[Tensor, Tensor]:
    pre, mix = ops.streams_gates(h, w)
    return ops.streams_collapse(h, pre), mix


def streams_gates(ops: Any, h: Tensor, w: StreamsSpec) -> tuple[Tensor, Tensor]:
    n, flat = w.streams, h.float().flatten(1)
    m = F.linear(F.rms_norm(flat, flat.shape[1:], None, w.norm_eps), w.fn)
    pre = torch.sigmoid(m[:, :n] * w.scale[0] + w.base[:n]) + w.eps
    if w.fn.shape[0] == n:
        return pre, m[:, n:]
    post = 2.0 * torch.sigmoid(m[:, n : 2 * n] * w.scale[1] + w.base[n : 2 * n])
    mix = (m[:, 2 * n :] * w.scale[2] + w.base[2 * n :]).view(-1, n, n)
    return pre, torch.cat((post, ops.sinkhorn(mix, w.iterations, w.eps).flatten(1)), -1)


def streams_collapse(ops: Any, h: Tensor, pre: Tensor) -> Tensor:
    return torch.einsum("tn,tne->te", pre, h.float())


def streams_out(ops: Any, h: Tensor, y: Tensor, mix: Tensor) -> Tensor:
    n = h.shape[1]
    post, between = torch.split(mix, [n, n * n], -1)
    kept = between.view(-1, n, n).transpose(1, 2) @ h.float()
    return post[:, :, None] * y[:, None] + kept


def streams_recall(ops: Any, b: ForwardBatch, h: Tensor, kv: Tensor, w: RecallSpec) -> Tensor:
    n, width = h.shape[1:]
    key, value = torch.split(kv.float().view(-1, n + 1, width), [n, 1], 1)
    own, other = (F.rms_norm(x.float(), (width,), None, w.eps) for x in (h, key))
    alike = (own * w.weight * other).sum(-1) * width**-0.5
    gate = torch.sigmoid(torch.copysign(alike.abs().clamp(min=SMALLEST_LIKENESS).sqrt(), alike))
    if b.embed_rows is not None:
        gate = gate.index_fill(0, b.embed_rows.long(), 0.0)
    return h + gate[:, :, None] * value


def sinkhorn(ops: Any, x: Tensor, iterations: int, eps: float) -> Tensor:
    """Logits [T, n, n] -> nearly doubly stochastic: softmax of rows, then columns and rows by turns.

    The columns are last. iterations counts divisions of columns.
    """
    m = x.softmax(-1) + eps
    m = m / (m.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        m = m / (m.sum(-1, keepdim=True) + eps)
        m = m / (m.sum(-2, keepdim=True) + eps)
    return m


OPS: Layer = {
    "streams_in": streams_in,
    "streams_gates": streams_gates,
    "streams_collapse": streams_collapse,
    "streams_out": streams_out,
    "streams_recall": streams_recall,
    "sinkhorn": sinkhorn,
}
