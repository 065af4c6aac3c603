"""Compressed entries, reference: several rows pooled into one, and which of them a row attends to.

`luce_core.ops.pages` says which entries a row sees and where they lie.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from luce_core.contracts import CompressSpec, ForwardBatch, Linear, Norm, Region, RopeSpec, SlotState
from luce_core.errors import PluginError
from luce_core.ops.namespace import Layer
from luce_core.ops.pages import ClosedEntries, closed_entries, only_field, row_blocks, sequence_rows
from luce_core.ops.state import advance_window, entry_of, path_windows


def compress(
    ops: Any,
    b: ForwardBatch,
    kv: Tensor,
    gate: Tensor | None,
    tail: SlotState | None,
    out: Region,
    spec: CompressSpec,
    keys: tuple[Region, Linear, Norm] | None = None,
) -> None:
    _check_strides(spec, out, gate, tail)
    if gate is None or tail is None:
        closing = (b.parent != -2).nonzero()[:, 0]
        if closing.numel():
            _close(ops, b, ops.rms(kv[closing], spec.norm), closing, out, spec, keys)
        return
    index = b.index.long()
    gate = gate.float() if spec.bias is None else gate.float() + spec.bias[index % spec.stride]
    row = torch.cat((kv.float(), gate), -1)
    closing = (((index + 1) % spec.stride == 0) & (b.parent != -2)).nonzero()[:, 0]
    if closing.numel():
        past = tail.state[b.slot.long()].float()
        windows = path_windows(b, spec.rows, closing)[:, 1:]  # the row itself and spec.rows - 1 before it
        rows = torch.cat((past.flatten(0, 1), row))[windows]
        latent = _latents(ops, rows, index[closing] // spec.stride, spec)
        _close(ops, b, latent, closing, out, spec, keys)
    advance_window(ops, b, row, tail)


def _check_strides(spec: CompressSpec, out: Region, gate: Tensor | None, tail: SlotState | None) -> None:
    if spec.stride != out.stride:
        raise PluginError(
            f"Op 'compress' makes an entry per {spec.stride} tokens; region {out.name!r} has one per "
            f"{out.stride}."
        )
    wanted = spec.stride > 1
    if (gate is not None, tail is not None) != (wanted, wanted):
        needs = "a gate and a tail" if wanted else "no gate and no tail"
        raise PluginError(f"Op 'compress' with an entry per {spec.stride} tokens takes {needs}.")


def _latents(ops: Any, rows: Tensor, number: Tensor, spec: CompressSpec) -> Tensor:
    """rows [n, spec.rows, 2 · features] -> entries [n, width] with these numbers, before their RoPE."""
    kv, gate = rows.chunk(2, -1)
    if spec.overlap:
        kv, gate = (_two_blocks(x, spec) for x in (kv, gate))
        before = torch.arange(spec.rows, device=rows.device) < spec.stride
        nothing = (number == 0)[:, None] & before  # block -1
        gate = gate.masked_fill(nothing[:, :, None], -math.inf)
    return ops.rms(ops.pool_softmax(kv, gate), spec.norm)  # type: ignore[no-any-return]


def _two_blocks(x: Tensor, spec: CompressSpec) -> Tensor:
    """[n, 2 · stride, 2 · width] -> [n, 2 · stride, width]: first halves of one block, second of the next."""
    return torch.cat((x[:, : spec.stride, : spec.width], x[:, spec.stride :, spec.width :]), 1)


def _close(
    ops: Any,
    b: ForwardBatch,
    latent: Tensor,
    closing: Tensor,
    out: Region,
    spec: CompressSpec,
    keys: tuple[Region, Linear, Norm] | None,
) -> None:
    """Keep what the rows `closing` closed: the entry, and what it is found by."""
    index = b.index.long()[closing]
    first = (index // spec.stride * spec.stride)[None]

    def turned(x: Tensor) -> Tensor:
        return x if spec.rope is None else ops.rope(x[:, None], first, spec.rope)[:, 0]

    _keep(b, turned(latent), closing, index, out)
    if keys is not None:
        region, matrix, norm = keys
        _keep(b, turned(ops.rms(ops.linear(latent, matrix), norm)), closing, index, region)


def _keep(b: ForwardBatch, entry: Tensor, closing: Tensor, index: Tensor, out: Region) -> None:
    """prefill: into pages. held: into the log, at the row that closed it; stride 1: pages, length + row."""
    pages = only_field(out)
    seq = b.seq.long()[closing]
    row = closing - b.query_start.long()[seq]
    if b.phase == "held" and out.stride > 1:
        (log,) = out.log.values()
        log[b.slot.long()[seq], row] = entry.to(log.dtype).view(-1, *log.shape[2:])
        return
    flat = pages.view(-1, *pages.shape[2:])
    token = b.length.long()[seq] + row if b.phase == "held" else index // out.stride * out.stride
    place = entry_of(b, out, seq, token)
    flat[place] = entry.to(flat.dtype).view(-1, *flat.shape[1:])


def pool_softmax(ops: Any, x: Tensor, gate: Tensor) -> Tensor:
    """Σ over m of softmax_m(gate) · x, per channel: both [..., m, d] -> [..., d]. -inf: no row."""
    return (gate.softmax(-2) * x).sum(-2)


# --- which entries


def select(
    ops: Any,
    b: ForwardBatch,
    q: Tensor,
    weight: Tensor,
    keys: Region,
    top_k: int,
    rope: RopeSpec | None,
    within: tuple[Tensor, int] | None = None,
) -> Tensor:
    out = torch.full((q.shape[0], top_k), -1, dtype=torch.int32, device=q.device)
    for part, closed, liked in _scores(ops, b, q, weight, keys, rope):
        score = liked
        if within is not None:
            blocks, size = within
            score = liked.masked_fill(~_inside(closed, blocks[part], size), -math.inf)
        place = ops.topk(score, min(top_k, score.shape[1])).long()
        number = closed.number[place].masked_fill(score.gather(1, place) == -math.inf, -1)
        out[part, : place.shape[1]] = number.to(torch.int32)
    return out


def select_blocks(
    ops: Any,
    b: ForwardBatch,
    q: Tensor,
    weight: Tensor,
    keys: Region,
    count: int,
    size: int,
    rope: RopeSpec | None,
) -> Tensor:
    out = torch.full((q.shape[0], count), -1, dtype=torch.int32, device=q.device)
    for part, closed, score in _scores(ops, b, q, weight, keys, rope):
        block = closed.number // size
        best = score.new_full((score.shape[0], int(block.max()) + 1), -math.inf)
        best.scatter_reduce_(1, block.expand_as(score), score, "amax")
        seen = torch.where(score > -math.inf, block, -1).amax(1, keepdim=True)  # the newest; -1: none
        newest = torch.arange(best.shape[1], device=best.device) == seen
        best = best.masked_fill(newest, math.inf)
        place = ops.topk(best, min(count, best.shape[1])).long()
        number = place.masked_fill(best.gather(1, place) == -math.inf, -1)
        out[part, : place.shape[1]] = number.to(torch.int32)
    return out


def _scores(
    ops: Any, b: ForwardBatch, q: Tensor, weight: Tensor, keys: Region, rope: RopeSpec | None
) -> Iterator[tuple[slice, ClosedEntries, Tensor]]:
    """Rows, the entries of their sequence, f32[rows, n] how well each is liked; -inf where it is not seen."""
    if rope is not None:
        q = ops.rope(q, b.position, rope)
    for rows in sequence_rows(b):
        closed = closed_entries(b, rows, keys)
        count = closed.number.shape[0]
        if not count:
            continue
        every = closed.values()
        for part in row_blocks(rows, q.shape[1] * count):
            hits = torch.einsum("thd,nd->thn", q[part].float(), every).relu()
            score = torch.einsum("th,thn->tn", weight[part].float(), hits)
            yield part, closed, score.masked_fill(~closed.visible(b, part), -math.inf)


def _inside(closed: ClosedEntries, blocks: Tensor, size: int) -> Tensor:
    """bool[rows, n]: entries that lie in one of the row's blocks i32[rows, k], -1 = none."""
    block = closed.number // size
    total = int(block.max()) + 1
    allowed = torch.zeros(blocks.shape[0], total + 1, dtype=torch.bool, device=blocks.device)
    allowed.scatter_(1, torch.where(blocks < 0, total, blocks).long(), True)
    return allowed[:, block]


OPS: Layer = {
    "compress": compress,
    "select": select,
    "select_blocks": select_blocks,
    "pool_softmax": pool_softmax,
}
