"""The plainest drafter over an MTP block: its best guess, then its best guess behind that."""

from __future__ import annotations

from typing import Any, Literal

import torch
from attrs import evolve
from torch import Tensor

from luce_core.contracts import Commit, DrafterContext, ForwardBatch, Network, Round, Tap, TokenTree
from luce_core.model.batch import chain_batch
from luce_core.testing.nextn_hooks import KEPT, layout

FINAL = Tap("final", 0)
SURVIVAL = 0.8


class NextnDrafter:
    """Keeps the final of the newest committed token in a slot; the block's own state is the target's."""

    name = "nextn-chain"
    site: Literal["device", "host"] = "device"
    taps: tuple[Tap, ...] = (FINAL,)

    def __init__(self, context: DrafterContext) -> None:
        self.target = context.target
        self.ops: Any = context.ops
        self.kept = context.state.slot(KEPT)
        self.layout = layout(context.target.spec, context.options)
        self.axes = context.target.spec.position_axes
        self.before = torch.tensor([[1.0, 0.0]], device=self.kept.state.device).repeat(
            context.target.spec.final_width, 1
        )
        """A convolution that gives the row before each."""
        self.rounds: list[Round] = []

    def observe(self, batch: ForwardBatch, commit: Commit | None) -> None:
        """Run the block over the rows, each with the final of the row it stands behind."""
        final = batch.taps[FINAL][: len(batch.token)].float()
        own = batch.of(self.name)
        before = self.ops.conv_window(own, final, self.before, self.kept)
        self._block().trunk(evolve(batch, taps={}), before)
        if commit is not None:
            self.target.commit_nextn(batch, commit)
            self.ops.commit_slot(own, commit, self.kept)

    def propose(self, round: Round) -> TokenTree:
        """Row by row: those before it lie where committed ones would."""
        self.rounds.append(round)
        block, final, token = self._block(), self.kept.state[round.slot.long(), 0], round.anchor
        found: list[Tensor] = []
        for step in range(round.capacity):
            here = evolve(round, length=round.length + step, room=round.room - step)
            final = block.trunk(chain_batch(here, token[:, None], "target", axes=self.axes), final)
            token = block.logits(final).argmax(-1).int()
            found.append(token)
            block = block.nextn or block
        count, place = len(round.slot), torch.arange(round.capacity, device=token.device)
        return TokenTree(
            token=torch.stack(found, dim=1),
            parent=(place - 1).to(torch.int16).expand(count, -1),
            survival=(SURVIVAL ** (place + 1.0)).expand(count, -1),
            source=torch.zeros(count, round.capacity, dtype=torch.uint8, device=token.device),
            count=torch.where(round.usable_from == 0, round.room, 0).int(),
        )

    def _block(self) -> Network:
        block = self.target.nextn
        if block is None:
            raise AssertionError("the plan allocated no state for the MTP block")
        return block
