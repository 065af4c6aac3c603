"""What drafters are asked before held rows run, and what is made of their answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve

from luce_core.contracts import BackendPlan, BlockManager, Drafter, Round, SeqId, SeqTable
from luce_core.engine.sequence import Sequence as Seq
from luce_core.errors import PluginError
from luce_core.model.batch import make_tables
from luce_core.ops.noise import CounterNoise
from luce_core.ops.sampling import ParamTable
from luce_core.speculation.tree import Candidates, check_tree, merge, read_tree


class Proposer:
    """Asks every drafter of a plan, and merges their trees. Engine thread only."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        plan: BackendPlan,
        blocks: BlockManager,
        table: ParamTable,
        *,
        device: str,
        vocab: int,
    ) -> None:
        self.drafters = tuple(drafters)
        self.blocks = blocks
        self.table = table
        self.device = device
        self.vocab = vocab
        self.owners = [_owners(plan, name) for name in plan.parts["drafter"]]
        # The tables of the target are of use to a drafter only where it runs the target's MTP block.
        self.hidden_groups = "" if plan.models[0].spec.runs_nextn else f"{plan.models[0].name}/"
        self.noise = CounterNoise()
        slots, context = plan.number("engine.max_sequences"), plan.number("context")
        self.history = (
            torch.zeros(slots, context, dtype=torch.int32, device=device) if self.drafters else None
        )

    def write(self, slot: int, first: int, tokens: Sequence[int]) -> None:
        """What drafters may read of a text: its tokens from `first` on."""
        if self.history is not None:
            ids = torch.tensor(tokens, dtype=torch.int32)
            self.history[slot, first : first + len(tokens)] = ids

    def propose(self, held: Sequence[tuple[Seq, SeqId, int]]) -> list[Candidates]:
        """One candidate tree per (sequence, its handle, rows it was given)."""
        nothing = [Candidates()] * len(held)
        capacity = max(rows for _, _, rows in held) - 1
        if not self.drafters or capacity < 1 or self.history is None:
            return nothing
        handles = [handle for _, handle, _ in held]
        usable = [self.blocks.usable_from(handle) for handle in handles]
        room = [min(rows - 1, seq.last_index - len(seq.tokens)) for seq, _, rows in held]
        shifts = [seq.media.shift if seq.media else 0 for seq, _, _ in held]
        view = Round(
            slot=self._i32([self.blocks.slot(handle) for handle in handles]),
            anchor=self._i32([seq.tokens[-1] for seq, _, _ in held]),
            length=self._i32([self.blocks.length(handle) for handle in handles]),
            usable_from=self._i32([0] * len(held)),
            history=self.history,
            params=self.table,
            noise=self.noise,
            capacity=capacity,
            room=self._i32(room),
            shift=self._i32(shifts) if any(shifts) else None,
            table=make_tables([self._tables(handle) for handle in handles], self.device),
        )
        proposals = []
        for number, (drafter, owners) in enumerate(zip(self.drafters, self.owners, strict=True)):
            lacking = [max((item[owner] for owner in owners), default=0) for item in usable]
            own = evolve(view, usable_from=self._i32(lacking))
            proposals.append(self._checked(drafter.name, read_tree(drafter.propose(own), number)))
        return [merge([trees[s] for trees in proposals], most) for s, most in enumerate(room)]

    def _tables(self, handle: SeqId) -> dict[str, SeqTable]:
        """By "owner/group", as `Round.table` has them."""
        tables, hidden = self.blocks.tables(handle), self.hidden_groups
        return {key: one for key, one in tables.items() if not (hidden and key.startswith(hidden))}

    def _i32(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _checked(self, name: str, trees: list[Candidates]) -> list[Candidates]:
        for tree in trees:
            problem = check_tree(tree, self.vocab)
            if problem:
                raise PluginError(
                    f"Drafter {name!r} proposed a bad tree: {problem}. Report it to its authors."
                )
        return trees


def _owners(plan: BackendPlan, drafter: str) -> list[str]:
    """Whose state the drafter needs: its models' and its own."""
    own = [drafter] if drafter in plan.layouts else []
    return own + [model.name for model in plan.models if model.part == f"drafter.{drafter}"]
