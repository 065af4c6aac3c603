"""The toy's law over the engine's state. Integer arithmetic in torch; not ops-only, since it is a test
double.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from luce_core.contracts import ForwardBatch, ModelSpec, Network, Region, SlotState, Weights
from luce_core.ops.attention import sequences
from luce_core.testing.toy.law import FOLD, FOLD_START, MASK, TAIL

SPOILT = 0x5A5A5A5A


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
        self.nextn = ToyNextn(weights.region("nextn"), ops, self) if spec.runs_nextn else None

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
        return to_lanes(mix(own ^ mix(torch.tensor(self.salt))))

    def logits(self, final: Tensor) -> Tensor:
        """[R, 4] -> f32[R, V]."""
        own = from_lanes(final)
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


class ToyNextn:
    """The MTP block: knows what comes next if its pages hold the text and the right finals, and only then.

    The law can be told from the text alone, so every final it was given is held against what it must be; a
    single wrong one spoils all answers behind it.
    """

    def __init__(self, region: Region, ops: Any, target: ToyNetwork) -> None:
        self.region = region
        self.ops = ops
        self.target = target
        self.nextn: Network | None = self
        """Its own finals are the target's."""

    def trunk(self, batch: ForwardBatch, final: Tensor | None = None) -> Tensor:
        """final [T, 4]: of the token before each; zeros before the first -> [T, 4]."""
        if final is None:
            raise AssertionError("an MTP block ran without the finals of the tokens before")
        entry = torch.cat((batch.index.float()[:, None], final), dim=1)
        self.ops.append(batch, batch.token.float()[:, None, None], entry[:, None], self.region)
        out = torch.zeros(batch.token.shape[0], dtype=torch.int64)
        for seq in sequences(batch, self.region):
            for rows in seq.row_blocks(1):
                seen = seq.entries_seen(batch, rows, None)
                mask = seq.visible(batch, rows, seen, None)
                for number, row in enumerate(range(*rows.indices(len(out)))):
                    visible = seq.entry[seen] if mask is None else seq.entry[seen][mask[number]]
                    out[row] = self._answer(visible)
        return to_lanes(out)

    def logits(self, final: Tensor) -> Tensor:
        """[R, 4] -> f32[R, V]."""
        return self.target.logits(final)

    def _answer(self, entry: Tensor) -> Tensor:
        """The hash of the text in these entries; padding sees none."""
        if not len(entry):
            return torch.tensor(0)
        kept = self.region.fields["v"].view(-1, 5)[entry]
        places, order = kept[:, 0].long().sort()
        tokens = self.region.fields["k"].view(-1)[entry].long()[order]
        sums = mix(tokens * 0x10001 + places * 7919).cumsum(0) & MASK
        hashes = mix(sums ^ mix(torch.tensor(self.target.salt)))
        wanted = torch.where(places > 0, hashes.roll(1), 0)
        whole = torch.equal(places, torch.arange(len(places)))
        right = whole and torch.equal(from_lanes(kept[order, 1:]), wanted)
        return hashes[-1] if right else hashes[-1] ^ SPOILT


def to_lanes(own: Tensor) -> Tensor:
    """32-bit values in four lanes of eight bits: f32[..., 4]."""
    return torch.stack([(own >> shift & 0xFF).float() for shift in (0, 8, 16, 24)], dim=-1)


def from_lanes(lanes: Tensor) -> Tensor:
    """The values again: i64[...]."""
    whole = lanes.long()
    return whole[..., 0] | whole[..., 1] << 8 | whole[..., 2] << 16 | whole[..., 3] << 24


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
