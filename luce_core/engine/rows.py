"""The rows of a step, of sequences as they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from luce_core.contracts import BlockManager, SeqId, SeqTable, Step
from luce_core.engine.sequence import Sequence as Request
from luce_core.errors import EngineError
from luce_core.model.batch import RowSet
from luce_core.ops.newest import AHEAD
from luce_core.speculation.tree import Candidates

Masks = Sequence[np.ndarray | None]


class RowMaker:
    """Reads sequences and the block manager; changes neither."""

    def __init__(self, blocks: BlockManager, target: str) -> None:
        """target: name of the model whose groups go by their bare names."""
        self.blocks = blocks
        self._own_groups = f"{target}/"

    def prefill(self, prompts: Sequence[tuple[Request, int]]) -> Step:
        """So many rows of each prompt."""
        rows = [self._prompt(seq, count) for seq, count in prompts]
        targets = [
            [seq.tokens[row.length + place + 1] for place in row.wanted or ()]
            for (seq, _), row in zip(prompts, rows, strict=True)
        ]
        top = [seq.request.prompt_logprobs or 0 for seq, _ in prompts]
        return _step("prefill", rows, top, targets=targets)

    def verify(
        self,
        held: Sequence[Request],
        trees: Sequence[Candidates],
        masks: Masks | None = None,
        ahead: int = 0,
        steps: int = 1,
    ) -> Step:
        """The newest token of each, and candidates behind it. masks: of each, see `RowSet.mask`. ahead: steps
        of one row that were submitted and are not read; then the tokens are not known. steps: so many, of
        which the rows are the first's.
        """
        masks = masks or [None] * len(held)
        rows = [
            self._held(seq, tree, mask, ahead) for seq, tree, mask in zip(held, trees, masks, strict=True)
        ]
        return _step("verify", rows, [seq.request.params.logprobs for seq in held], steps=steps)

    def _tables(self, handle: SeqId) -> dict[str, SeqTable]:
        """By group for the target, by "owner/group" for everyone else."""
        tables = self.blocks.tables(handle)
        return {key.removeprefix(self._own_groups): table for key, table in tables.items()}

    def _prompt(self, seq: Request, count: int) -> RowSet:
        handle = handle_of(seq)
        length = self.blocks.length(handle)
        return RowSet(
            slot=self.blocks.slot(handle),
            length=length,
            tokens=seq.tokens[length : length + count],
            tables=self._tables(handle),
            wanted=seq.unscored(length, count),
            positions=seq.media.positions(length, count) if seq.media else None,
            embeds=seq.media.rows(length, count) if seq.media else (),
        )

    def _held(self, seq: Request, tree: Candidates, mask: np.ndarray | None, ahead: int) -> RowSet:
        handle = handle_of(seq)
        length = self.blocks.length(handle) + ahead
        parents = [-1, *(parent + 1 for parent in tree.parents)]
        return RowSet(
            slot=self.blocks.slot(handle),
            length=length,
            tokens=[AHEAD if ahead else seq.tokens[-1], *tree.tokens],
            sure=1,
            parents=parents,
            tables=self._tables(handle),
            wanted=range(1 + len(tree)),
            positions=seq.media.held_positions(length, parents) if seq.media else None,
            mask=mask,
        )


def handle_of(seq: Request) -> SeqId:
    """Of a sequence that has state."""
    if seq.handle is None:
        raise EngineError(f"Request {seq.request.request!r} has no state; this is a bug of the engine.")
    return seq.handle


def _step(program: str, rows: Sequence[RowSet], top: Sequence[int], **more: object) -> Step:
    return Step(program, (sum(len(row.tokens) for row in rows),), {"rows": rows, "top": top, **more})
