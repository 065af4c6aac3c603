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
LISTED = 1024
"""Columns of the range with the cut that programs look at in one go."""
COUNTED = 4096
"""Of them, the most of which each is compared with all others; one program searches more."""
TOGETHER, PROGRAMS = (256, 2) if INTERPRETED else (8, 128)
"""Of them, whose places one program counts in one go; and programs of a row."""


@frozen
class Search:
    """(dev) What `kernels.top_of_part` has to write before it can begin."""

    shares: Tensor
    """f32[rows]: the mass each row keeps, 1 where it keeps all."""
    limits: Tensor
    """i32[rows]: how many each row keeps at most, 0 where as many as there are."""
    above: Tensor
    """i64[2, rows, COPIES, RANGES], zeros."""
    found: Tensor
    """i32[rows], zeros."""
    cuts: Tensor
    """i64[2, rows], NONE_KEPT: of top-k, and of all."""
    masses: Tensor
    """i64[rows], zeros: of what top-k leaves."""

    @staticmethod
    def of(rows: int, device: torch.device) -> Search:
        """Not filled yet."""
        copies, ranges = kernels.COPIES.value, kernels.RANGES.value
        return Search(
            torch.empty(rows, device=device),
            torch.empty(rows, dtype=torch.int32, device=device),
            torch.empty(2, rows, copies, ranges, dtype=torch.int64, device=device),
            torch.empty(rows, dtype=torch.int32, device=device),
            torch.empty(2, rows, dtype=torch.int64, device=device),
            torch.empty(rows, dtype=torch.int64, device=device),
        )


def find_cuts(
    logits: Tensor, tops: Tensor, search: Search, flags: frozenset[str], told: Mapping[str, bool]
) -> Tensor:
    """logits f32[rows, V], tops f32[rows, parts] -> i64[rows], `kernels.packed`. flags: "top_k", "top_p", or
    both. Four launches, five with both. told: as `picks` tells every launch.
    """
    rows, vocab = logits.shape
    parts, splits = tops.shape[1], triton.cdiv(vocab, STEP)
    most = triton.next_power_of_2(parts)
    listed = torch.empty(rows, vocab, dtype=torch.int32, device=logits.device)
    few, cuts = search.cuts
    given = logits, tops, search.shares, search.limits, search.above
    for done in range(2):
        kernels.add_masses[(rows, splits)](
            *given, rows, vocab, parts, DONE=done, STEP=STEP, P=most, num_warps=8, **told
        )
    kernels.list_range[(rows, splits)](
        *given, search.found, listed, rows, vocab, parts, STEP=STEP, P=most, num_warps=4, **told
    )
    limited = "top_k" in flags
    for by_number in (True, False):
        if ("top_k" if by_number else "top_p") in flags:
            kernels.find_cut[(rows, PROGRAMS)](
                *given, search.found, listed, few, few if by_number else cuts, search.masses, rows, vocab,
                parts, BY_NUMBER=by_number, AFTER=limited and not by_number, N=TOGETHER, C=LISTED,
                MOST=COUNTED, P=most, num_warps=8, **told,
            )  # fmt: skip
    return cuts if "top_p" in flags else few
