"""Ops `process_logits`, `sample`, `newest_tokens`, `note_picks`: what ends a step, and begins the one that
follows it.

Top-n-sigma and DRY go to the reference, with all that comes before the filters; so do the filters on a card
without atomic additions.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from luce_backend_triton import capability
from luce_backend_triton import pick_kernels as kernels
from luce_backend_triton.nucleus import Search, find_choices, find_cuts
from luce_backend_triton.product import overlaps
from luce_core.contracts import ForwardBatch
from luce_core.contracts.staged import stays_on_device
from luce_core.ops import newest as reference
from luce_core.ops import sampling
from luce_core.ops.newest import MOST_ENDS, NewestTokens
from luce_core.ops.sampling import FILTERS, HOST_FLAGS, PROCESSED, StepParams

STEP = 1024
"""Columns a program looks at in one go."""
MOST_PARTS = 256
"""Of a row."""
HERE = frozenset({"bias", "penalty", "min_tokens", "noise"})
"""Of what is done before the filters."""


def process_logits(ops: Any, logits: Tensor, b: ForwardBatch, params: StepParams) -> Tensor:
    """See `luce_core.ops.sampling`. One launch, and the same bits."""
    flags, table = params.flags, params.table
    wanted = flags & PROCESSED
    if b.mask is None and not wanted:
        return logits
    if wanted - HERE or not logits.is_contiguous() or not logits.numel():
        return sampling.process_logits(ops, logits, b, params)
    (rows, vocab), out = logits.shape, torch.empty_like(logits)
    bias = logits if table.bias is None else table.bias  # never read where not needed
    marks = logits if table.marks.table is None else table.marks.table
    mask = logits if b.mask is None else b.mask
    kernels.process[rows, triton.cdiv(vocab, STEP)](
        logits, out, b.wanted, b.seq, b.slot, b.index, b.token, b.sees, b.query_start, b.sure,
        mask, bias, marks, table.repetition, table.frequency, table.presence, table.min_index,
        table.temperature, vocab, 1 + b.token.shape[0] - b.slot.shape[0], b.sees.shape[1], mask.shape[1],
        MASK=b.mask is not None, BIAS="bias" in flags,
        PENALTY="penalty" in flags, MIN_TOKENS="min_tokens" in flags, NOISE="noise" in flags, STEP=STEP,
        enable_fp_fusion=False, **_told(logits),
    )  # fmt: skip
    return out


def _told(x: Tensor) -> dict[str, bool]:
    """What every launch is told: whether it begins beside the one before it."""
    overlap = x.is_cuda and overlaps(x.device)
    return {"OVERLAP": overlap, "launch_pdl": overlap}


def _ordered(params: StepParams) -> frozenset[str]:
    """Filters of the step that put candidates in order: others search for where they cut."""
    searched = capability.on(torch.device(params.table.device)).atomics
    return frozenset() if searched else params.flags & FILTERS


def _takes(params: StepParams) -> bool:
    """Whether what is left waits for nothing, and puts no more than the best few candidates in order."""
    few = not _ordered(params) or not params.flags & {"wide", "typical"}
    return few and not params.flags & HOST_FLAGS


@stays_on_device(_takes)
def sample(ops: Any, logits: Tensor, b: ForwardBatch, params: StepParams) -> Tensor:
    """Processed logits f32[R, V] -> picked token ids i64[R]: argmax, with noise, among what filters leave.
    Where they cut is searched for, not sorted for.
    """
    rows, vocab = logits.shape
    if _ordered(params) or not logits.is_contiguous() or not rows:
        return sampling.sample(ops, logits, b, params)
    table, device, flags = params.table, logits.device, params.flags
    noise = "noise" in flags
    min_p, xtc = noise and "min_p" in flags, noise and "xtc" in flags
    cut, stages = noise and bool(flags & FILTERS), 3 if "typical" in flags else 1
    part = STEP * -(-vocab // (STEP * MOST_PARTS))
    parts = -(-vocab // part)
    grid, most, told = (rows, parts), triton.next_power_of_2(parts), _told(logits)
    best = torch.empty(rows, parts, device=device)
    where = torch.empty(rows, parts, dtype=torch.int32, device=device)
    tops = cuts = sums = best  # never read where not needed
    if min_p or cut:
        search, tops = Search.of(rows, stages, device), torch.empty(rows, parts, device=device)
        kernels.top_of_part[grid](
            logits, tops, vocab, part, b.wanted, b.seq, b.slot, table.temperature, table.top_k,
            table.top_p, table.typical_p, search.shares, search.limits, search.above, search.found,
            search.cuts, search.sums, rows, CUT=cut, STAGES=stages, STEP=STEP, **told,
        )  # fmt: skip
        cuts, sums = search.cuts, search.sums
        find_cuts(logits, tops, search, flags, told)
        if xtc:
            find_choices(logits, tops, search, flags, b, table, told)
    kernels.best_of_part[grid](
        logits, b.wanted, b.seq, b.slot, b.index, table.temperature, table.seed, table.min_p,
        table.xtc_probability, table.xtc_threshold, tops, cuts, sums, best, where, rows, vocab, part, parts,
        NOISE=noise, MIN_P=min_p, CUT=cut, STAGES=stages, XTC=xtc, STEP=STEP, P=most, **told,
    )  # fmt: skip
    out = torch.empty(rows, dtype=torch.int64, device=device)
    kernels.best_of_parts[(rows,)](best, where, out, parts, P=most, num_warps=1, **told)
    return out


def newest_tokens(ops: Any, token: Tensor, slot: Tensor, newest: NewestTokens) -> tuple[Tensor, Tensor]:
    """See `luce_core.ops.newest`. One launch, for any number of sequences."""
    num_seqs = token.shape[0]
    out, count = torch.empty_like(token), torch.empty_like(token)
    size = max(16, triton.next_power_of_2(num_seqs))
    kernels.fill_tokens[(1,)](token, slot, newest.token, out, count, num_seqs, S=size, num_warps=1)
    return out, count


def note_picks(
    ops: Any, picks: Tensor, count: Tensor, slot: Tensor, newest: NewestTokens, marks: Tensor | None = None
) -> Tensor:
    """See `luce_core.ops.newest`. One launch."""
    if picks.dtype is not torch.int64:
        return reference.note_picks(ops, picks, count, slot, newest, marks)
    out = torch.empty_like(picks)
    vocab = 0 if marks is None else marks.shape[1]
    kernels.note[(picks.shape[0],)](
        picks, count, slot, newest.ends, newest.token, out, out if marks is None else marks, vocab,
        ENDS=MOST_ENDS, MARKS=marks is not None, num_warps=1, **_told(picks),
    )  # fmt: skip
    return out


__all__ = ["newest_tokens", "note_picks", "process_logits", "sample"]
