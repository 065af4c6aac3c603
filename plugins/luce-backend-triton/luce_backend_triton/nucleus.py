"""Where top-k and top-p cut the rows of a step: without an order, or waiting for the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
from attrs import frozen
from torch import Tensor

from luce_backend_triton import nucleus_kernels as kernels
from luce_backend_triton.kernels import INTERPRETED

STEP = 1024 if INTERPRETED else 512
"""Columns of a program: a row of 250,000 is one for each of 500."""
LISTED = 2048
"""Columns of the range with the cut that the search holds in registers; more are read again and again."""


@frozen
class Search:
    """(dev) What `kernels.top_of_part` has to write before it can begin."""

    shares: Tensor
    """f32[rows]: the mass each row keeps, 1 where it keeps all."""
    limits: Tensor
    """i32[rows]: how many each row keeps at most, 0 where as many as there are."""
    above: Tensor
    """i64[2, rows, 32], zeros."""
    found: Tensor
    """i32[rows], zeros."""

    @staticmethod
    def of(rows: int, device: torch.device) -> Search:
        """Not filled yet."""
        return Search(
            torch.empty(rows, device=device),
            torch.empty(rows, dtype=torch.int32, device=device),
            torch.empty(2, rows, kernels.RANGES.value, dtype=torch.int64, device=device),
            torch.empty(rows, dtype=torch.int32, device=device),
        )


def find_cuts(
    logits: Tensor, tops: Tensor, search: Search, told: Mapping[str, bool]
) -> tuple[Tensor, Tensor]:
    """logits f32[rows, V], tops f32[rows, parts] -> (cut, last) i32[rows]: kept is what has a key above
    `cut`, or that key and an id up to `last`. Four launches. told: as `picks` tells every
    launch.
    """
    rows, vocab = logits.shape
    parts, splits = tops.shape[1], triton.cdiv(vocab, STEP)
    most = triton.next_power_of_2(parts)
    listed = torch.empty(rows, vocab, dtype=torch.int32, device=logits.device)
    cut, last = (torch.empty_like(search.found) for _ in range(2))
    given = logits, tops, search.shares, search.limits, search.above
    for done in range(2):
        kernels.add_masses[(rows, splits)](
            *given, rows, vocab, parts, DONE=done, STEP=STEP, P=most, num_warps=8, **told
        )
    kernels.list_range[(rows, splits)](
        *given, search.found, listed, rows, vocab, parts, STEP=STEP, P=most, num_warps=4, **told
    )
    kernels.find_cut[(rows,)](
        *given, search.found, listed, cut, last, rows, vocab, parts, C=LISTED, P=most, num_warps=8, **told
    )
    return cut, last
