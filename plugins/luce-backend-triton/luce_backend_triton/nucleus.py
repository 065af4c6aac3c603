"""Where top-k, typical-p and top-p cut the rows of a step, and what XTC takes out: without an order, or
waiting for the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
from attrs import frozen
from torch import Tensor

from luce_backend_triton import choice_kernels, list_kernels
from luce_backend_triton import nucleus_kernels as kernels
from luce_backend_triton.kernels import INTERPRETED
from luce_core.contracts import ForwardBatch
from luce_core.ops.sampling import ParamTable

STEP = 1024 if INTERPRETED else 512
"""Columns of a program: a row of 250,000 is one for each of 500."""
LISTED = 1024
"""Columns of the range with the cut that programs look at in one go."""
COUNTED = 4096
"""Of the list, the most of which each is compared with all others; one program searches more."""
ENOUGH = 2048
"""Of the range with the cut: where more may lie in it, another pass takes a part of it."""
TOGETHER = 256 if INTERPRETED else 8
"""Of the list, whose places one program counts in one go."""
MOST_PROGRAMS, FEWEST, PROGRAMS = (2, 2, 2) if INTERPRETED else (256, 16, 1024)
"""The most and the fewest of a row, and those of all rows of a step. One row of noise with a spread of 1.4
leaves 1,100 on the list, which are counted at once.
"""


@frozen
class Search:
    """(dev) What `top_of_part` has to write before the filters of some rows can begin, by stage."""

    shares: Tensor
    """f32[stages, rows]: the mass each row keeps, 1 where it keeps all."""
    limits: Tensor
    """i32[stages, rows]: how many each row keeps at most, 0 where as many as there are."""
    above: Tensor
    """i64[stages, PASSES, rows, COPIES, RANGES], zeros."""
    found: Tensor
    """i32[stages, rows], zeros."""
    cuts: Tensor
    """i64[3, rows], `kernels.packed`, NONE_KEPT where one is to be found, else ALL_KEPT: of top-k, of
    typical-p, of top-p.
    """
    sums: Tensor
    """i64[SUMS, rows], zeros; the last of them NONE_KEPT."""

    @staticmethod
    def of(rows: int, stages: int, device: torch.device) -> Search:
        """Not filled yet. stages: see nucleus_kernels; 1 without typical-p."""
        passes, copies, ranges = kernels.PASSES.value, kernels.COPIES.value, kernels.RANGES.value
        return Search(
            torch.empty(stages, rows, device=device),
            torch.empty(stages, rows, dtype=torch.int32, device=device),
            torch.empty(stages, passes, rows, copies, ranges, dtype=torch.int64, device=device),
            torch.empty(stages, rows, dtype=torch.int32, device=device),
            torch.empty(3, rows, dtype=torch.int64, device=device),
            torch.empty(choice_kernels.SUMS.value, rows, dtype=torch.int64, device=device),
        )


def find_cuts(
    logits: Tensor, tops: Tensor, search: Search, flags: frozenset[str], told: Mapping[str, bool]
) -> None:
    """logits f32[rows, V], tops f32[rows, parts] -> `search.cuts`. flags: of the step. Six launches, seven
    with top-k and top-p; with typical-p six for each filter and one. told: as `picks` tells every launch.
    """
    rows, vocab = logits.shape
    parts = tops.shape[1]
    listed = torch.empty(rows, vocab, dtype=torch.int32, device=logits.device)
    grid = {"STEP": STEP, "P": triton.next_power_of_2(parts), **told}
    cut = flags & {"top_k", "top_p"}
    if "typical" in flags:
        if "top_k" in flags:
            _stage(0, frozenset({"top_k"}), logits, tops, search, listed, told)
        choice_kernels.add_moments[(rows, triton.cdiv(vocab, STEP))](
            logits, tops, search.shares, search.cuts, search.sums, rows, vocab, parts, **grid
        )
        _stage(1, frozenset({"typical"}), logits, tops, search, listed, told)
        if "top_p" in flags:
            _stage(2, frozenset({"top_p"}), logits, tops, search, listed, told)
    elif cut:
        _stage(0, cut, logits, tops, search, listed, told)


def _stage(
    stage: int,
    filters: frozenset[str],
    logits: Tensor,
    tops: Tensor,
    search: Search,
    listed: Tensor,
    told: Mapping[str, bool],
) -> None:
    (rows, vocab), parts = logits.shape, tops.shape[1]
    splits, most = triton.cdiv(vocab, STEP), triton.next_power_of_2(parts)
    given = logits, tops, search.shares, search.limits, search.above, search.cuts, search.sums
    for done in range(kernels.PASSES.value):
        kernels.add_masses[(rows, splits)](
            *given, rows, vocab, parts, STAGE=stage, DONE=done, ENOUGH=ENOUGH, STEP=STEP, P=most,
            num_warps=8, **told,
        )  # fmt: skip
    given = *given, search.found, listed
    kernels.list_range[(rows, splits)](
        *given, rows, vocab, parts, STAGE=stage, ENOUGH=ENOUGH, STEP=STEP, P=most, num_warps=4, **told
    )
    for by_number in sorted({one == "top_k" for one in filters}, reverse=True):
        list_kernels.find_cut[(rows, max(FEWEST, min(MOST_PROGRAMS, PROGRAMS // rows)))](
            *given, rows, vocab, parts, BY_NUMBER=by_number, AFTER="top_k" in filters and not by_number,
            STAGE=stage, N=TOGETHER, C=LISTED, MOST=COUNTED, ENOUGH=ENOUGH, P=most, num_warps=8, **told,
        )  # fmt: skip


def find_choices(
    logits: Tensor,
    tops: Tensor,
    search: Search,
    flags: frozenset[str],
    b: ForwardBatch,
    table: ParamTable,
    told: Mapping[str, bool],
) -> None:
    """What XTC must know of each row that the filters left something of -> `search.sums`. Two launches."""
    (rows, vocab), parts = logits.shape, tops.shape[1]
    for likely in (False, True):
        choice_kernels.add_choices[(rows, triton.cdiv(vocab, STEP))](
            logits, tops, search.cuts, search.sums, b.wanted, b.seq, b.slot, b.index, table.temperature,
            table.seed, table.min_p, table.xtc_probability, table.xtc_threshold, rows, vocab, parts,
            LIKELY_ONES=likely, CUT=True, STAGES=search.shares.shape[0], MIN_P="min_p" in flags, STEP=STEP,
            P=triton.next_power_of_2(parts), **told,
        )  # fmt: skip
