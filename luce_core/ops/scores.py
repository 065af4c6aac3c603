"""How likely a text's own tokens are: the head over final rows, a block of them at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Scores = tuple[Tensor, Tensor, Tensor, Tensor]


def prompt_logprobs(
    ops: Any, head: Callable[[Tensor], Tensor], final: Tensor, targets: Tensor, top: int, block: int
) -> Scores:
    """How likely token `targets` i64[R] is after each row of `final` [R, final_width], R at least 1.

    Of the model itself, before any transform: log-probability f32[R], rank i64[R] (1 + how many tokens are
    likelier), and the best `top` (f32[R, top], ids i64[R, top], best first). head: [r, final_width] ->
    f32[r, V]; it is called with `block` rows at most, so that many are the logits that exist at a time.
    """
    pieces = zip(torch.split(final, block), torch.split(targets, block), strict=True)
    own, rank, values, ids = zip(*(_score(head(rows), wanted, top) for rows, wanted in pieces), strict=True)
    return torch.cat(own), torch.cat(rank), torch.cat(values), torch.cat(ids)


def _score(logits: Tensor, targets: Tensor, top: int) -> Scores:
    total = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(-1, targets[:, None])
    rank = (logits > own).sum(-1) + 1
    values, ids = logits.topk(min(top, logits.shape[-1]), dim=-1)
    return (own - total)[:, 0], rank, values - total, ids
