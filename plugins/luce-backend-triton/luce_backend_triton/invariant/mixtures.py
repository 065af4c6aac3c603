"""Ops `route` and `experts`: every row, and every pair of row and expert, by itself."""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from luce_backend_triton import moe, product
from luce_backend_triton import route as plain
from luce_core.contracts import Clamp, ExpertBank, ForwardBatch, Linear, Norm, RouteSpec, SharedExpert
from luce_core.ops.moe import route as reference_route

BLOCK = 16
"""Rows of a call of the reference: always as many, so that torch sums them alike."""


def route(
    ops: Any, b: ForwardBatch, x: Tensor, norm: Norm | None, w: Linear | Tensor, spec: RouteSpec
) -> tuple[Tensor, Tensor]:
    """ids i32[T, k], weight f32[T, k]; see `Ops.route`."""
    if plain.takes(w, spec) and x.shape[0]:
        assert isinstance(w, Tensor)
        x = x.float()
        x = x if x.stride(-1) == 1 else x.contiguous()
        overlap = product.overlaps(x.device) if x.is_cuda else False
        return plain.pick(b, plain.logits(x, norm, w, overlap), spec, overlap)
    blocks = range(0, max(1, x.shape[0]), BLOCK)
    parts = [reference_route(ops, *_block(b, x, first), norm, w, spec) for first in blocks]
    ids, weight = (torch.cat(part)[: x.shape[0]] for part in zip(*parts, strict=True))
    return ids, weight


def _block(b: ForwardBatch, x: Tensor, first: int) -> tuple[ForwardBatch, Tensor]:
    """BLOCK rows of a batch, rows of zeros behind its last: what a router asks of them."""
    more = max(0, first + BLOCK - x.shape[0])
    of = slice(first, first + BLOCK)
    token, parent = (torch.nn.functional.pad(rows[of], (0, more)) for rows in (b.token, b.parent))
    given = b.embed_rows
    if given is not None:
        given = given[(given >= first) & (given < first + BLOCK)] - first
    part = evolve(b, token=token, parent=parent, embed_rows=given)
    return part, torch.nn.functional.pad(x[of], (0, 0, 0, more))


class Experts(moe.Experts):
    """The op of one layer: rows in pieces of few pairs, every pair cut as if it were alone."""

    fixed = True

    def experts(
        self,
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
        """residual + post(Σ weight · expert(norm(x)) + shared(norm(x))) -> f32[T, E]; see `Ops.experts`.

        The reference gets one row at a time: it multiplies all rows of an expert at once.
        """
        (ids, weight), per = routed, 1
        if moe.takes(bank, act):
            per = max(1, moe.FEW_PAIRS // ids.shape[1])
        run, parts = super().experts, []
        for first in range(0, max(1, x.shape[0]), per):
            of = slice(first, first + per)
            rest = None if residual is None else residual[of]
            chosen = ids[of], weight[of]
            parts.append(run(ops, x[of], norm, chosen, bank, shared, rest, post, act, clamp))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


CUDA = Experts(cuda=True)
PORTABLE = Experts(cuda=False)

__all__ = ["CUDA", "PORTABLE", "Experts", "route"]
