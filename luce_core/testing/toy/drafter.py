"""Drafters that know the toy's law, over a model or state of their own.

They hold what a real drafter holds, pages and slots that follow the text, and answer from nothing else: a
proposal is right exactly when the state is, and when the drafter's salt is the target's.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from attrs import evolve
from torch import Tensor

from luce_core.contracts import (
    Commit,
    DrafterContext,
    ForwardBatch,
    Round,
    StateLayout,
    Tap,
    TokenTree,
    Weights,
)
from luce_core.model.batch import chain_batch
from luce_core.testing.toy.draft_layout import head_layout
from luce_core.testing.toy.network import ToyNetwork

SURVIVAL = 0.9


class ToyModelRunner:
    """A loaded model: what an arch plugin built, behind its backend."""

    def __init__(self, context: DrafterContext) -> None:
        (model,) = context.models.values()
        self.owner = model.plan.name
        self.backend = model.backend

    def forward(self, batch: ForwardBatch) -> Tensor | None:
        return self.backend.forward(batch).logits

    def commit(self, batch: ForwardBatch, commit: Commit) -> None:
        self.backend.commit(batch, commit)


class ToyHeadRunner:
    """No model: the law over the handles of the drafter's own layout, with the target's ops."""

    def __init__(self, context: DrafterContext, name: str, layout: StateLayout) -> None:
        self.owner = name
        self.ops: Any = context.ops
        self.regions = [context.state.region(pages.name) for pages in layout.pages]
        self.slots = [context.state.slot(slot.name) for slot in layout.slots]
        # Of its weights, a toy network asks for regions and slots only.
        weights = cast("Weights", context.state)
        self.network = ToyNetwork(evolve(context.target.spec, layout=layout), weights, self.ops)

    def forward(self, batch: ForwardBatch) -> Tensor | None:
        final = self.network.trunk(batch)
        return self.network.logits(final) if batch.phase == "held" else None

    def commit(self, batch: ForwardBatch, commit: Commit) -> None:
        self.ops.commit_pages(batch, commit, self.regions)
        for slot in self.slots:
            self.ops.commit_slot(batch, commit, slot)


class ToyDrafter:
    """Proposes the chain its law says. Silent for a sequence whose earlier tokens it has no state of."""

    site: Literal["device", "host"] = "device"
    taps: tuple[Tap, ...] = ()

    def __init__(self, name: str, layout: StateLayout, runner: ToyModelRunner | ToyHeadRunner) -> None:
        self.name = name
        self.layout = layout
        self.runner = runner
        self.rounds: list[Round] = []

    def observe(self, batch: ForwardBatch, commit: Commit | None) -> None:
        """Run what the target ran, accept what it accepted."""
        own = batch.of(self.runner.owner)
        self.runner.forward(own)
        if commit is not None:
            self.runner.commit(own, commit)

    def propose(self, round: Round) -> TokenTree:
        """Token by token, each run as one held chain."""
        self.rounds.append(round)
        count, depth = len(round.slot), round.capacity
        tokens = round.anchor[:, None]
        for _ in range(depth):
            logits = self.runner.forward(chain_batch(round, tokens, self.runner.owner))
            if logits is None:
                raise AssertionError("a held batch returned no logits")
            newest = logits.view(count, tokens.shape[1], -1)[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat((tokens, newest.int()), dim=1)
        place = torch.arange(depth)
        return TokenTree(
            token=tokens[:, 1:],
            parent=(place - 1).to(torch.int16).expand(count, depth),
            survival=(SURVIVAL ** (place + 1.0)).expand(count, depth),
            source=torch.zeros(count, depth, dtype=torch.uint8),
            count=torch.where(round.usable_from == 0, round.room, 0).int(),
        )


def make_with_model(context: DrafterContext) -> ToyDrafter:
    """The factory of drafter "toy-draft"."""
    return ToyDrafter("toy-draft", StateLayout((), (), best_effort=True), ToyModelRunner(context))


def make_head(context: DrafterContext) -> ToyDrafter:
    """The factory of drafter "toy-head"."""
    layout = head_layout(context.target.spec, context.options)
    return ToyDrafter("toy-head", layout, ToyHeadRunner(context, "toy-head", layout))
