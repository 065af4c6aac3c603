"""Proposes what followed the last time the newest token was there. Keeps no state of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from luce_core.contracts import Commit, DrafterContext, ForwardBatch, Round, StateLayout, Tap, TokenTree


class @CLASS@:
    """`Drafter` over the history the engine keeps."""

    name = "@NAME@"
    taps: tuple[Tap, ...] = ()
    layout = StateLayout(groups=(), pages=(), best_effort=True)
    site: Literal["device", "host"] = "host"

    def __init__(self, longest: int) -> None:
        self.longest = longest

    def observe(self, batch: ForwardBatch, commit: Commit | None) -> None:
        """Committed rows; the history holds all this drafter needs."""

    def propose(self, round: Round) -> TokenTree:
        """One chain per sequence, of at most `round.capacity` nodes."""
        nodes = min(self.longest, round.capacity)
        chains = []
        for slot, length in zip(round.slot.tolist(), round.length.tolist(), strict=True):
            chains.append(follow(round.history[slot, : length + 1].tolist(), nodes))
        token = torch.zeros(len(chains), nodes, dtype=torch.int32)
        for number, chain in enumerate(chains):
            token[number, : len(chain)] = torch.tensor(chain, dtype=torch.int32)
        shape = token.shape
        return TokenTree(
            token=token,
            parent=torch.arange(-1, nodes - 1, dtype=torch.int16).expand(shape),
            survival=torch.full(shape, 0.5),
            source=torch.zeros(shape, dtype=torch.uint8),
            count=torch.tensor([len(chain) for chain in chains], dtype=torch.int32),
        )


def follow(tokens: Sequence[int], most: int) -> list[int]:
    """What came after the newest earlier occurrence of the last token."""
    for place in range(len(tokens) - 2, -1, -1):
        if tokens[place] == tokens[-1]:
            return list(tokens[place + 1 : place + 1 + most])
    return []


def make(context: DrafterContext) -> @CLASS@:
    """The factory of the part."""
    return @CLASS@(context.options.longest)
