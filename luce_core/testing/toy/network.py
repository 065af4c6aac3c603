"""The toy's law over the engine's state. Integer arithmetic in torch; not ops-only, since it is a test
double.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from luce_core.contracts import ForwardBatch, ModelSpec, Network, SlotState, Weights
from luce_core.ops.attention import sequences
from luce_core.testing.toy.law import FOLD, FOLD_START, MASK, TAIL


def build(spec: ModelSpec, weights: Weights, ops: Any) -> ToyNetwork:
    """The network of a toy file."""
    return ToyNetwork(spec, weights, ops)


class ToyNetwork:
    nextn: Network | None = None

    def __init__(self, spec: ModelSpec, weights: Weights, ops: Any) -> None:
        self.ops = ops
        self.vocab = spec.vocab
        self.salt = int(spec.details["salt"])
        self.window = int(spec.details["window"]) or None
        self.region = weights.region("tokens")
        self.slots = (weights.slot("rolled"), weights.slot("newest")) if spec.layout.slots else None
        self.tail = torch.tensor([TAIL])

    def trunk(self, batch: ForwardBatch, final: Tensor | None = None) -> Tensor:
        """[T, 4]: the row's 32-bit hash in four lanes of eight bits, exact in any float type."""
        token, index = batch.token.long(), batch.index.long()
        self.ops.append(batch, token.float()[:, None, None], index.float()[:, None, None], self.region)
        own = self._seen(batch)
        if self.slots is not None:
            rolled, newest = self.slots
            own = own ^ mix(self._rolled(batch, rolled))
            shifted = torch.where(token > 0, token + 1, 0).float()[:, None]
            own = own ^ mix(self.ops.conv_window(batch, shifted, self.tail, newest)[:, 0].long() + 0x5EED)
        own = mix(own ^ mix(torch.tensor(self.salt)))
        return torch.stack([(own >> shift & 0xFF).float() for shift in (0, 8, 16, 24)], dim=1)

    def logits(self, final: Tensor) -> Tensor:
        """[R, 4] -> f32[R, V]."""
        lanes = final.long()
        own = lanes[:, 0] | lanes[:, 1] << 8 | lanes[:, 2] << 16 | lanes[:, 3] << 24
        return (mix(own[:, None] ^ mix(torch.arange(self.vocab))) >> 12).float() * 2.0**-16

    def _seen(self, batch: ForwardBatch) -> Tensor:
        """Sum over all visible entries, read back from the pages."""
        out = torch.zeros(batch.token.shape[0], dtype=torch.int64)
        tokens = self.region.fields["k"].view(-1).long()
        places = self.region.fields["v"].view(-1).long()
        for seq in sequences(batch, self.region):
            for rows in seq.row_blocks(1):
                seen = seq.entries_seen(batch, rows, self.window)
                mask = seq.visible(batch, rows, seen, self.window)
                entry = seq.entry[seen]
                values = mix(tokens[entry] * 0x10001 + places[entry] * 7919)
                out[rows] = (values if mask is None else torch.where(mask, values, 0)).sum(-1) & MASK
        return out

    def _rolled(self, batch: ForwardBatch, slot: SlotState) -> Tensor:
        """The rolling hash at every row: state folded with the rows above it and itself."""
        if batch.phase == "held":
            self.ops.write_log(batch, slot, "token", batch.token[:, None])
        out = torch.empty(batch.token.shape[0], dtype=torch.int64)
        bounds, tokens, parents = batch.query_start.tolist(), batch.token.tolist(), batch.parent.tolist()
        for s, number in enumerate(batch.slot.tolist()):
            start = int(slot.state[number, 0]) or FOLD_START
            rows: list[int] = []
            for row in range(bounds[s], bounds[s + 1]):
                parent = parents[row] if batch.phase == "held" else len(rows) - 1
                before = rows[parent] if parent >= 0 else start
                rows.append(((before ^ (tokens[row] + 1)) * FOLD) & MASK)
            out[bounds[s] : bounds[s + 1]] = torch.tensor(rows, dtype=torch.int64)
            if batch.phase == "prefill" and rows:
                slot.state[number, 0] = rows[-1]
        return out


def fold(ops: Any, state: Tensor, log: dict[str, Tensor], count: Tensor) -> Tensor:
    """Op "toy.fold": state i64[S, 1], log token i64[S, P, 1], count i32[S] -> i64[S, 1]. A zero state is a
    fresh one.
    """
    state = torch.where(state == 0, FOLD_START, state)
    for step in range(log["token"].shape[1]):
        folded = ((state ^ (log["token"][:, step] + 1)) * FOLD) & MASK
        state = torch.where((step < count)[:, None], folded, state)
    return state


def mix(x: Tensor) -> Tensor:
    """`law.mix` over int64 tensors."""
    x = x & MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)
