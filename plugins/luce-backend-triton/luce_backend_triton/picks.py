"""Ops `sample`, `newest_tokens`, `note_picks`: what ends a step, and begins the one that follows it.

Sampling that puts candidates in order (top-k, top-p, typical-p, XTC) goes to the reference.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from luce_backend_triton import pick_kernels as kernels
from luce_core.contracts import ForwardBatch
from luce_core.ops import newest as reference
from luce_core.ops import sampling
from luce_core.ops.newest import MOST_ENDS, NewestTokens
from luce_core.ops.sampling import FILTERS, StepParams

STEP = 1024
PROGRAMS = 256
"""Of a step, about: parts of a row are larger where there are many rows."""


def sample(ops: Any, logits: Tensor, b: ForwardBatch, params: StepParams) -> Tensor:
    """Processed logits f32[R, V] -> picked token ids i64[R]: argmax, with noise, above a floor (min-p)."""
    rows, vocab = logits.shape
    if params.flags & FILTERS or not logits.is_contiguous() or not rows:
        return sampling.sample(ops, logits, b, params)
    table, noise = params.table, "noise" in params.flags
    floor = None
    if noise and "min_p" in params.flags:
        slot = b.slot.long()[b.seq.long()[b.wanted.long()]]
        floor = logits.amax(dim=-1) + torch.log(table.min_p[slot])
    part = STEP * -(-vocab // (STEP * max(1, PROGRAMS // rows)))
    parts = -(-vocab // part)
    best = torch.empty(rows, parts, device=logits.device)
    where = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    kernels.best_of_part[(rows, parts)](
        logits, best if floor is None else floor, b.wanted, b.seq, b.slot, b.index, table.temperature,
        table.seed, best, where, rows, vocab, part, NOISE=noise, FLOOR=floor is not None, STEP=STEP,
    )  # fmt: skip
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    kernels.best_of_parts[(rows,)](best, where, out, parts, P=triton.next_power_of_2(parts), num_warps=1)
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
