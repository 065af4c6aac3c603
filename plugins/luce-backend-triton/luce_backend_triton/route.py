"""Op `route`: two launches for few rows, three for many, one fewer where experts choose by the logits
themselves; none waits for the host. That of few rows makes norm(x) ready for the experts too.

Routers with groups, tables, soft caps, factors per expert or packed weights go to the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import triton
from attrs import frozen
from torch import Tensor

from luce_backend_triton import route_kernels as kernels
from luce_backend_triton.kernels import INTERPRETED
from luce_backend_triton.product import Rows, overlaps
from luce_core.contracts import ForwardBatch, Linear, Norm, RouteSpec
from luce_core.ops import moe as reference

FEW_ROWS = 32
"""Every row reads the router by itself; with more, the rows of x meet it in one product."""
TILE = 4
"""Experts of a program there."""
SIDE, MOST_IN_TURN = 4, 8
"""Programs that share few rows: more read the router more often, fewer keep fewer multiprocessors busy. And
the most rows of a program.
"""
CHOSEN_AMONG, MOST_CHOSEN = range(32, 257), 32
"""csrc/choose.cuh, csrc/moe_down.cu."""
WIDEST = 8192
MOST_EXPERTS = 1024
SCORES = ("softmax", "sigmoid")


@frozen(eq=False)
class Asked:
    """What a choice goes by: the best of softmax, shares among the chosen times `scale`."""

    logits: Tensor
    """f32[T, experts]."""
    parent: Tensor
    """i32[T], -2 for padding."""
    scale: float
    top_k: int


class Routed(tuple[Tensor, Tensor]):
    """What `route` gives, ids and weight, with the input that op `experts` most likely reads next. Experts
    that choose by themselves read what was asked instead; for all others the choice is launched when it is
    first looked at.
    """

    rows: Rows
    asked: Asked | None
    _choose: Callable[[], tuple[Tensor, Tensor]]
    _chosen: tuple[Tensor, Tensor] | None

    def __new__(cls, rows: Rows, asked: Asked | None, choose: Callable[[], tuple[Tensor, Tensor]]) -> Routed:
        made = super().__new__(cls, ())  # type: ignore[arg-type]
        made.rows, made.asked, made._choose = rows, asked, choose
        made._chosen = choose() if asked is None else None
        return made

    def both(self) -> tuple[Tensor, Tensor]:
        """ids, weight."""
        if self._chosen is None:
            self._chosen = self._choose()
        return self._chosen

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.both())

    def __getitem__(self, at: Any) -> Any:
        return self.both()[at]


def takes(w: Linear | Tensor, spec: RouteSpec) -> bool:
    """Whether the kernels do."""
    return (
        isinstance(w, Tensor)
        and w.dtype is torch.float32
        and w.is_contiguous()
        and w.shape[0] <= MOST_EXPERTS
        and w.shape[1] <= WIDEST
        and spec.score in SCORES
        and spec.groups == 1
        and not spec.softcap
        and spec.table is None
        and spec.given_bias is None
        and spec.per_expert is None
    )


def route(
    ops: Any, b: ForwardBatch, x: Tensor, norm: Norm | None, w: Linear | Tensor, spec: RouteSpec
) -> tuple[Tensor, Tensor]:
    """ids i32[T, k], weight f32[T, k], of logits w · norm(x), in f32; see `Ops.route`."""
    if not takes(w, spec) or not x.shape[0]:
        return reference.route(ops, b, x, norm, w, spec)
    assert isinstance(w, Tensor)
    x = x.float()
    x = x if x.stride(-1) == 1 else x.contiguous()
    overlap = overlaps(x.device) if x.is_cuda else False
    rows = Rows(x, norm)
    if x.shape[0] <= FEW_ROWS:
        scores = logits(x, norm, w, overlap, rows.room("gemv"))
    else:
        scores = F.linear(x if norm is None else rows.dense(torch.float32, 1)[0], w)
    asked = Asked(scores, b.parent, spec.scale, spec.top_k) if _lets_choose(x, w, spec) else None
    return Routed(rows, asked, lambda: pick(b, scores, spec, overlap))


def _lets_choose(x: Tensor, w: Tensor, spec: RouteSpec) -> bool:
    """Whether experts can choose by themselves; more rows than this go to an expert's weights together."""
    plain = spec.score == "softmax" and spec.bias is None and spec.renorm and spec.top_k <= MOST_CHOSEN
    return x.is_cuda and x.shape[0] <= 2 and plain and w.shape[0] in CHOSEN_AMONG


def logits(x: Tensor, norm: Norm | None, w: Tensor, overlap: bool, ready: Tensor | None = None) -> Tensor:
    """w · norm(x) -> f32[T, experts]: every row by itself. x f32, columns side by side. ready: where norm(x)
    is to lie as csrc/gemv.cu wants it.
    """
    rows, (count, width) = x.shape[0], w.shape
    out = torch.empty(rows, count, device=x.device)
    tile = triton.next_power_of_2(count) if INTERPRETED else TILE
    each = max(1, min(MOST_IN_TURN, triton.next_power_of_2(rows) // SIDE))
    more, views = 0, (out, out)
    if ready is not None:
        more, views = ready.shape[0], (ready.view(torch.float32), ready.view(torch.int8))
    kernels.logits[(-(-rows // each), -(-count // tile) + more)](
        x, x if norm is None else norm.weight, w, out, *views, rows, count, width, x.stride(0),
        0.0 if norm is None else norm.eps, NORM=norm is not None, TILE=tile,
        WHOLE=triton.next_power_of_2(width), ROWS=each, READY=ready is not None, num_warps=8,
        OVERLAP=overlap, launch_pdl=overlap,
    )  # fmt: skip
    return out


def pick(b: ForwardBatch, scores: Tensor, spec: RouteSpec, overlap: bool) -> tuple[Tensor, Tensor]:
    """The experts of every row by its logits [T, experts], and their weights."""
    rows, count = scores.shape
    ids = torch.empty(rows, spec.top_k, dtype=torch.int32, device=scores.device)
    weight = torch.empty(rows, spec.top_k, device=scores.device)
    kernels.pick[(rows,)](
        scores, scores if spec.bias is None else spec.bias, b.parent, ids, weight, count, spec.scale,
        K=spec.top_k, X=triton.next_power_of_2(count), SOFTMAX=spec.score == "softmax",
        BIAS=spec.bias is not None, RENORM=spec.renorm, num_warps=1, OVERLAP=overlap, launch_pdl=overlap,
    )  # fmt: skip
    return ids, weight


__all__ = ["Asked", "Routed", "logits", "pick", "route", "takes"]
