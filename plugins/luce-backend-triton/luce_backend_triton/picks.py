"""Ops `sample`, `newest_tokens`, `note_picks`: what ends a step, and begins the one that follows it.

Sampling that puts candidates in order (top-k, typical-p, XTC) goes to the reference.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from luce_backend_triton import pick_kernels as kernels
from luce_backend_triton.kernels import INTERPRETED
from luce_core.contracts import ForwardBatch
from luce_core.contracts.staged import stays_on_device
from luce_core.ops import newest as reference
from luce_core.ops import sampling
from luce_core.ops.newest import MOST_ENDS, NewestTokens
from luce_core.ops.sampling import FILTERS, HOST_FLAGS, StepParams

STEP, SEARCH_STEP = 1024, 1024 if INTERPRETED else 128
"""Columns a program looks at in one go; while it searches a cut, each beside 32 candidates."""
MOST_PARTS = 128
"""Of a row. How many follows from its length alone, so that sums come in the same order beside any others."""
PASSES = 7
"""Of the search for the cut of top-p: five of 32 bits each, and the rest."""


def _takes(params: StepParams) -> bool:
    """Whether what is left waits for nothing, and puts no more than the best few candidates in order."""
    flags = params.flags
    few = not flags & FILTERS - {"top_p"} or not flags & {"wide", "typical"}
    return few and not flags & (HOST_FLAGS | {"penalty"})


@stays_on_device(_takes)
def sample(ops: Any, logits: Tensor, b: ForwardBatch, params: StepParams) -> Tensor:
    """Processed logits f32[R, V] -> picked token ids i64[R]: argmax, with noise, among what top-p and min-p
    leave. Their cut is searched for, not sorted for.
    """
    rows, vocab = logits.shape
    if params.flags & FILTERS - {"top_p"} or not logits.is_contiguous() or not rows:
        return sampling.sample(ops, logits, b, params)
    table, device, flags = params.table, logits.device, params.flags
    noise = "noise" in flags
    min_p, top_p = noise and "min_p" in flags, noise and "top_p" in flags
    part = STEP * -(-vocab // (STEP * MOST_PARTS))
    parts = -(-vocab // part)
    grid, most = (rows, parts), triton.next_power_of_2(parts)
    best = torch.empty(rows, parts, device=device)
    where = torch.empty(rows, parts, dtype=torch.int32, device=device)
    tops = above = totals = ties = lows = best  # never read where not needed
    if min_p or top_p:
        tops = torch.empty(rows, parts, device=device)
        kernels.top_of_part[grid](logits, tops, vocab, part, STEP=STEP)
    if top_p:
        above = torch.empty(PASSES, rows, parts, 32, device=device)
        ties = torch.empty(rows, parts, 32, dtype=torch.int32, device=device)
        lows = torch.empty(PASSES, rows, dtype=torch.int64, device=device)
        totals = torch.empty(rows, parts, device=device)
        for number in range(PASSES):
            kernels.mass_above[grid](
                logits, b.wanted, b.seq, b.slot, table.top_p, tops, above, lows, totals, ties, rows, vocab,
                part, parts, PASS=number, LAST=number == PASSES - 1, STEP=SEARCH_STEP, P=most,
            )  # fmt: skip
    kernels.best_of_part[grid](
        logits, b.wanted, b.seq, b.slot, b.index, table.temperature, table.seed, table.min_p, table.top_p,
        tops, above, lows, totals, ties, best, where, rows, vocab, part, parts, NOISE=noise, MIN_P=min_p,
        PASSES=PASSES if top_p else 0, STEP=STEP, P=most,
    )  # fmt: skip
    out = torch.empty(rows, dtype=torch.int64, device=device)
    kernels.best_of_parts[(rows,)](best, where, out, parts, P=most, num_warps=1)
    return out


def newest_tokens(ops: Any, token: Tensor, slot: Tensor, newest: NewestTokens) -> tuple[Tensor, Tensor]:
    """See `luce_core.ops.newest`. One launch, for any number of sequences."""
    num_seqs = token.shape[0]
    out, count = torch.empty_like(token), torch.empty_like(token)
    size = max(16, triton.next_power_of_2(num_seqs))
    kernels.fill_tokens[(1,)](token, slot, newest.token, out, count, num_seqs, S=size, num_warps=1)
    return out, count


def note_picks(ops: Any, picks: Tensor, count: Tensor, slot: Tensor, newest: NewestTokens) -> Tensor:
    """See `luce_core.ops.newest`. One launch."""
    if picks.dtype is not torch.int64:
        return reference.note_picks(ops, picks, count, slot, newest)
    out = torch.empty_like(picks)
    kernels.note[(picks.shape[0],)](
        picks, count, slot, newest.ends, newest.token, out, ENDS=MOST_ENDS, num_warps=1
    )
    return out


__all__ = ["newest_tokens", "note_picks", "sample"]
