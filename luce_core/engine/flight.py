"""Work under way: what was submitted and not yet read, and what may be queued behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import evolve, frozen

from luce_core.contracts import Scheduler, SeqId, SeqView, StepHandle, Work
from luce_core.engine.checks import check_work
from luce_core.engine.sequence import Sequence as Request
from luce_core.speculation.tree import Candidates


@frozen(eq=False)
class Flight:
    """One submission."""

    handle: StepHandle
    prefill: Sequence[tuple[Request, int]]
    """(sequence, rows)."""
    held: Sequence[Request]
    trees: Sequence[Candidates]
    """Of each held sequence."""

    @property
    def plain(self) -> bool:
        """One row of each sequence: what is known of the next step then is all but its tokens."""
        return not self.prefill and not any(len(tree) for tree in self.trees)


def next_work(
    scheduler: Scheduler,
    waiting: Sequence[SeqView],
    running: Sequence[SeqView],
    row_budget: int,
    fits: Callable[[SeqId, int], bool],
) -> list[SeqId] | None:
    """What the scheduler would do once a step of one row of every running sequence is over: their order, if
    it is the same once more. None: anything else, or a text ends with the step, or one has a constraint, of
    which the next mask depends on the token.

    running: as they are, without that step. fits: whether there is room for so many rows behind it.
    """
    after = [evolve(view, length=view.length + 1, prompt=view.prompt + 1) for view in running]
    if any(view.constrained or view.length >= view.barrier for view in after):
        return None
    work, preempted = scheduler.plan(waiting, after, row_budget, fits)
    check_work(work, {view.seq: view for view in (*waiting, *after)}, row_budget)
    order = [item.seq for item in work if _one_row(item)]
    if preempted or len(order) != len(work) or len(order) != len(running):
        return None
    return order


def _one_row(item: Work) -> bool:
    return item.phase == "held" and item.rows == 1
