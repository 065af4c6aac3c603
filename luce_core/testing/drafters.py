"""A drafter that proposes what the test says, and checks what the engine tells it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from luce_core.contracts import Commit, ForwardBatch, Round, StateLayout, Tap, TokenTree

Script = Callable[[Sequence[int], int], tuple[Sequence[int], Sequence[int]]]
"""(tokens so far, capacity) -> (node tokens, node parents)."""


class ScriptedDrafter:
    """Proposes `script(tokens, capacity)` for every sequence. Stateless towards the cache, so always
    usable.
    """

    site: Literal["device", "host"] = "host"

    def __init__(self, script: Script, *, name: str = "scripted", taps: tuple[Tap, ...] = ()) -> None:
        self.name = name
        self.taps = taps
        self.layout = StateLayout(groups=(), pages=(), best_effort=True)
        self.script = script
        self.rounds = 0
        self.observed: dict[int, list[int]] = {}
        """Slot -> tokens observed for it since its index 0 was last seen."""
        self.tapped: list[torch.Tensor] = []

    def observe(self, batch: ForwardBatch, commit: Commit | None) -> None:
        """Keep what was committed; AssertionError when a row comes twice, out of order or not at all."""
        starts, slots = batch.query_start.tolist(), batch.slot.tolist()
        tokens, lengths = batch.token.tolist(), batch.length.tolist()
        for s, slot in enumerate(slots):
            rows = tokens[starts[s] : starts[s + 1]]
            if commit is not None:
                count = int(commit.count[s])
                rows = [rows[row] for row in commit.path[s, :count].tolist()]
            seen = self.observed.setdefault(slot, [])
            if lengths[s] < len(seen):
                del seen[lengths[s] :]  # the slot was given to another sequence, or this one was preempted
            seen += [-1] * (lengths[s] - len(seen))  # a prefix that came from the cache
            seen += rows
        self.tapped += [batch.taps[tap] for tap in self.taps]

    def propose(self, round: Round) -> TokenTree:
        """The script's trees, as the contract's tensors."""
        self.rounds += 1
        size, count = round.capacity, len(round.slot)
        tree = TokenTree(
            token=torch.zeros(count, size, dtype=torch.int32),
            parent=torch.zeros(count, size, dtype=torch.int16),
            survival=torch.zeros(count, size),
            source=torch.zeros(count, size, dtype=torch.uint8),
            count=torch.zeros(count, dtype=torch.int32),
        )
        for s in range(count):
            length = int(round.length[s])
            text = round.history[int(round.slot[s]), : length + 1].tolist()
            if text[-1] != int(round.anchor[s]):
                raise AssertionError(f"history ends with {text[-1]}, the anchor is {int(round.anchor[s])}")
            tokens, parents = self.script(text, size)
            nodes = len(tokens)
            tree.token[s, :nodes] = torch.tensor(list(tokens), dtype=torch.int32)
            tree.parent[s, :nodes] = torch.tensor(list(parents), dtype=torch.int16)
            tree.survival[s, :nodes] = 0.5
            tree.count[s] = nodes
        return tree
