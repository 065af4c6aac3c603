"""N-gram tables, reference: which rows the newest tokens of a path name, and those rows from the file."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from luce_core.contracts import ForwardBatch, NgramSpec, SlotState, StoredTable
from luce_core.ops.namespace import Layer
from luce_core.ops.state import advance_window, path_windows


def ngram_rows(ops: Any, b: ForwardBatch, history: SlotState, spec: NgramSpec) -> Tensor:
    own = spec.compressed[b.token.long()].long() + 1
    if b.embed_rows is not None:
        own = own.index_fill(0, b.embed_rows.long(), 0)
    before = history.state.shape[1]
    past = history.state[b.slot.long()].flatten().long()
    newest = torch.cat((past, own))[path_windows(b, before)].flip(1)  # i64[T, n], the row itself first
    advance_window(ops, b, own[:, None], history)
    over = (newest == 0).cumsum(1) > 0
    part = torch.where(over, spec.pad, newest - 1)[:, None] * spec.multipliers
    mixed, rows = part[:, :, 0], []
    for j in range(1, before + 1):
        mixed = mixed ^ part[:, :, j]
        rows.append(mixed[:, :, None] % spec.primes[:, j - 1] + spec.offsets[:, j - 1])
    return torch.cat(rows, -1).to(torch.int32)


def stored_rows(ops: Any, table: StoredTable, rows: Tensor) -> Tensor:
    return torch.from_numpy(table.read(rows.cpu().numpy())).to(rows.device)


OPS: Layer = {"ngram_rows": ngram_rows, "stored_rows": stored_rows}
