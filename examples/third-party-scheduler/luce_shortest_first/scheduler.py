"""Short prompts first. Arrival counts too, so that a long one waits only so long for shorter ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from luce_core.contracts import SchedulerContext, SeqId, SeqView, Work


def chunk(view: SeqView, most: int) -> int:
    """Prompt rows within `most`, prompt and barrier, with no span cut."""
    end = min(view.length + most, view.prompt, view.barrier)
    for start, stop in reversed(view.spans):
        if start < end < stop:
            end = start
    return max(0, end - view.length)


class ShortestFirst:
    def __init__(self, context: SchedulerContext) -> None:
        self.max_sequences = context.max_sequences
        self.patience: float = context.options.patience

    def rank(self, view: SeqView) -> tuple[float, int]:
        return (view.arrived_s + self.patience * view.prompt - view.priority, view.seq)

    def plan(
        self,
        waiting: Sequence[SeqView],
        running: Sequence[SeqView],
        row_budget: int,
        fits: Callable[[SeqId, int], bool],
    ) -> tuple[Sequence[Work], Sequence[SeqId]]:
        work: list[Work] = []
        left, room, short = row_budget, self.max_sequences - len(running), False
        decoding = {view.seq for view in running if view.length >= view.prompt}
        known = {view.seq for view in running}
        order = sorted([*running, *waiting], key=self.rank)
        for view in sorted(order, key=lambda view: view.seq not in decoding):
            fresh = view.seq not in known
            held = view.length >= view.prompt
            rows = min(1, left, view.barrier - view.length) if held else chunk(view, left)
            if rows < 1 or (fresh and (short or not room)):
                continue
            if not fits(view.seq, rows):  # one row is better than none, for those that run
                rows = 0 if held or fresh else chunk(view, 1)
                if not rows or not fits(view.seq, rows):
                    short = True
                    continue
            work.append(Work(view.seq, "held" if held else "prefill", rows))
            left, room = left - rows, room - fresh
        if work or not short or len(running) < 2:
            return work, []
        return [], [max(running, key=self.rank).seq]
