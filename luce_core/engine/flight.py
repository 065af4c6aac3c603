"""Work under way: what was submitted and not yet read, and what may be queued behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from luce_core.contracts import Scheduler, SeqId, SeqView, StepHandle, Work
from luce_core.engine.checks import check_work
from luce_core.engine.rows import RowMaker, handle_of
from luce_core.engine.sequence import Sequence as Request
from luce_core.speculation.tree import Candidates

if TYPE_CHECKING:
    from luce_core.pipeline import Pipeline

Fits = Callable[[SeqId, int], bool]


@frozen(eq=False)
class Flight:
    """One submission."""

    handle: StepHandle
    prefill: Sequence[tuple[Request, int]]
    """(sequence, rows)."""
    held: Sequence[Request]
    trees: Sequence[Candidates]
    """Of each held sequence."""
    steps: int = 1
    """Of one row each, one behind another; their verdicts too."""

    @property
    def plain(self) -> bool:
        """One row of each sequence: what is known of the next step then is all but its tokens."""
        return not self.prefill and not any(len(tree) for tree in self.trees)

    @property
    def verdicts_of(self) -> list[tuple[Request, Candidates]]:
        """Whose each verdict is."""
        return [*zip(self.held, self.trees, strict=True)] * self.steps


class Follower:
    """Queues steps behind one that has not been read. Engine thread only."""

    def __init__(
        self,
        pipeline: Pipeline,
        rows: RowMaker,
        row_budget: int,
        fail: Callable[[list[Request], Exception], None],
    ) -> None:
        """fail: called with the sequences of a step that could not be queued, and why."""
        self.executor = pipeline.executor
        self.scheduler = pipeline.scheduler
        self.blocks = pipeline.blocks
        self.rows = rows
        self.row_budget = row_budget
        self.fail = fail

    def __call__(
        self, flight: Flight, waiting: Sequence[SeqView], running: Sequence[SeqView]
    ) -> Flight | None:
        """As many as the executor takes at once where nobody waits, or one. None: neither can be.

        flight: one row of every running sequence. running: as they are, without it.
        """
        by_id = {seq.id: seq for seq in flight.held}
        fits = partial(self._fits, by_id)
        most = 1 if waiting else self.executor.steps_ahead
        for steps in sorted({most, 1}, reverse=True):
            places = range(flight.steps, flight.steps + steps)
            order = next_work(self.scheduler, waiting, running, self.row_budget, fits, places)
            if order is None:
                continue
            held = [by_id[seq] for seq in order]
            trees = [Candidates()] * len(held)
            try:
                handle = self.executor.follow(self.rows.verify(held, trees, ahead=flight.steps, steps=steps))
            except Exception as error:  # noqa: BLE001 - the request boundary of the engine
                self.fail(held, error)
                return None
            if handle is not None:
                return Flight(handle, (), held, trees, steps)
        return None

    def _fits(self, held: dict[SeqId, Request], seq: SeqId, rows: int) -> bool:
        """Whether there is room for so many rows behind what is committed. Opens nothing."""
        return seq in held and self.blocks.reserve(handle_of(held[seq]), rows)


def next_work(
    scheduler: Scheduler,
    waiting: Sequence[SeqView],
    running: Sequence[SeqView],
    row_budget: int,
    fits: Fits,
    places: range,
) -> list[SeqId] | None:
    """What the scheduler would do after each of so many steps of one row of every running sequence: their
    order, if it is the same once more each time. None: anything else, or a text ends before, or one has a
    constraint, of which the next mask depends on the token.

    running: as they are, without those steps. fits: whether there is room for so many rows behind that.
    """
    orders = []
    for ahead in places:
        after = [evolve(view, length=view.length + ahead, prompt=view.prompt + ahead) for view in running]
        if any(view.constrained or view.length >= view.barrier for view in after):
            return None
        work, preempted = scheduler.plan(waiting, after, row_budget, partial(_behind, fits, ahead))
        check_work(work, {view.seq: view for view in (*waiting, *after)}, row_budget)
        orders.append([item.seq for item in work if _one_row(item)])
        if preempted or len(orders[-1]) != len(work) or len(work) != len(running) or orders[-1] != orders[0]:
            return None
    return orders[0]


def _behind(fits: Fits, ahead: int, seq: SeqId, rows: int) -> bool:
    return fits(seq, ahead + rows)


def _one_row(item: Work) -> bool:
    return item.phase == "held" and item.rows == 1
