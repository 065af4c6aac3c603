"""Compressed entries, reference: several rows pooled into one, and which of them a row attends to.

`luce_core.ops.pages` says which entries a row sees and where they lie.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from luce_core.contracts import CompressSpec, ForwardBatch, Region, RopeSpec, SlotState
from luce_core.ops.namespace import Layer
from luce_core.ops.pages import closed_entries, only_field, row_blocks, sequence_rows
from luce_core.ops.state import advance_window, entry_of, path_windows


def compress(
    ops: Any, b: ForwardBatch, kv: Tensor, gate: Tensor, tail: SlotState, out: Region, spec: CompressSpec
) -> None:
    index = b.index.long()
    row = torch.cat((kv.float(), gate.float() + spec.bias[index % spec.stride]), -1)
    closing = (((index + 1) % spec.stride == 0) & (b.parent != -2)).nonzero()[:, 0]
    if closing.numel():
        past = tail.state[b.slot.long()].float()
        windows = path_windows(b, spec.rows, closing)[:, 1:]  # the row itself and spec.rows - 1 before it
        rows = torch.cat((past.flatten(0, 1), row))[windows]
        entry = _entries(ops, rows, index[closing] // spec.stride, spec)
        _keep(b, entry, closing, index[closing], out)
    advance_window(ops, b, row, tail)


def _entries(ops: Any, rows: Tensor, number: Tensor, spec: CompressSpec) -> Tensor:
    """rows [n, spec.rows, 2 · features] -> entries [n, width] with these numbers."""
    kv, gate = rows.chunk(2, -1)
    if spec.overlap:
        kv, gate = (_two_blocks(x, spec) for x in (kv, gate))
        before = torch.arange(spec.rows, device=rows.device) < spec.stride
        nothing = (number == 0)[:, None] & before  # block -1
        gate = gate.masked_fill(nothing[:, :, None], -math.inf)
    entry = ops.rms(ops.pool_softmax(kv, gate), spec.norm)
    if spec.rope is not None:
        entry = ops.rope(entry[:, None], (number * spec.stride)[None], spec.rope)[:, 0]
    return entry  # type: ignore[no-any-return]


def _two_blocks(x: Tensor, spec: CompressSpec) -> Tensor:
    """[n, 2 · stride, 2 · width] -> [n, 2 · stride, width]: first halves of one block, second of the next."""
    return torch.cat((x[:, : spec.stride, : spec.width], x[:, spec.stride :, spec.width :]), 1)


def _keep(b: ForwardBatch, entry: Tensor, closing: Tensor, index: Tensor, out: Region) -> None:
    """prefill: into pages; held: into the log, at the row that closed it."""
    pages = only_field(out)
    seq = b.seq.long()[closing]
    if b.phase == "held":
        (log,) = out.log.values()
        row = closing - b.query_start.long()[seq]
        log[b.slot.long()[seq], row] = entry.to(log.dtype).view(-1, *log.shape[2:])
        return
    flat = pages.view(-1, *pages.shape[2:])
    place = entry_of(b, out, seq, index // out.stride * out.stride)
    flat[place] = entry.to(flat.dtype).view(-1, *flat.shape[1:])


def pool_softmax(ops: Any, x: Tensor, gate: Tensor) -> Tensor:
    """Σ over m of softmax_m(gate) · x, per channel: both [..., m, d] -> [..., d]. -inf: no row."""
    return (gate.softmax(-2) * x).sum(-2)


def select(
    ops: Any, b: ForwardBatch, q: Tensor, weight: Tensor, keys: Region, top_k: int, rope: RopeSpec | None
) -> Tensor:
    if rope is not None:
        q = ops.rope(q, b.position, rope)
    heads = q.shape[1]
    out = torch.full((q.shape[0], top_k), -1, dtype=torch.int32, device=q.device)
    for rows in sequence_rows(b):
        closed = closed_entries(b, rows, keys)
        count = closed.number.shape[0]
        if not count:
            continue
        for part in row_blocks(rows, heads * count):
            hits = torch.einsum("thd,nd->thn", q[part].float(), closed.value).relu()
            score = torch.einsum("th,thn->tn", weight[part].float(), hits)
            seen = closed.visible(b, part)
            place = ops.topk(score.masked_fill(~seen, -math.inf), min(top_k, count)).long()
            number = closed.number[place].masked_fill(~seen.gather(1, place), -1)
            out[part, : place.shape[1]] = number.to(torch.int32)
    return out


OPS: Layer = {"compress": compress, "select": select, "pool_softmax": pool_softmax}
