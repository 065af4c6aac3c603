"""Hyper-connections, reference: a residual of several streams, read as one and written back mixed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from luce_core.contracts import StreamsSpec
from luce_core.ops.namespace import Layer


def streams_in(ops: Any, h: Tensor, w: StreamsSpec) -> tuple[Tensor, Tensor]:
    n, flat = w.streams, h.float().flatten(1)
    m = F.linear(F.rms_norm(flat, flat.shape[1:], None, w.norm_eps), w.fn)
    pre = torch.sigmoid(m[:, :n] * w.scale[0] + w.base[:n]) + w.eps
    x = torch.einsum("tn,tne->te", pre, h.float())
    if w.fn.shape[0] == n:
        return x, m[:, n:]
    post = 2.0 * torch.sigmoid(m[:, n : 2 * n] * w.scale[1] + w.base[n : 2 * n])
    mix = (m[:, 2 * n :] * w.scale[2] + w.base[2 * n :]).view(-1, n, n)
    return x, torch.cat((post, ops.sinkhorn(mix, w.iterations, w.eps).flatten(1)), -1)


def streams_out(ops: Any, h: Tensor, y: Tensor, mix: Tensor) -> Tensor:
    n = h.shape[1]
    post, between = torch.split(mix, [n, n * n], -1)
    kept = between.view(-1, n, n).transpose(1, 2) @ h.float()
    return post[:, :, None] * y[:, None] + kept


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


OPS: Layer = {"streams_in": streams_in, "streams_out": streams_out, "sinkhorn": sinkhorn}
