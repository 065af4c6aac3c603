"""In order of arrival, decoding before prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from luce_core.contracts import SchedulerContext, SeqId, SeqView, Work


class @CLASS@:
    """A pure policy: no tensors, no clock, nothing remembered between calls."""

    def __init__(self, max_sequences: int) -> None:
        self.max_sequences = max_sequences

    def plan(
        self,
        waiting: Sequence[SeqView],
        running: Sequence[SeqView],
        row_budget: int,
        fits: Callable[[SeqId, int], bool],
    ) -> tuple[Sequence[Work], Sequence[SeqId]]:
        """The work of one step, and sequences to preempt when nothing else can go on."""
        work: list[Work] = []
        short_of_memory = False
        places = self.max_sequences - len(running)
        ordered = [*sorted(running, key=_decoding_first), *sorted(waiting, key=_arrival)]
        for number, view in enumerate(ordered):
            new = number >= len(running)
            if new and (not places or short_of_memory):
                break  # nobody is admitted past one that found no room
            rows = _rows(view, row_budget)
            if rows and not fits(view.seq, rows):
                short_of_memory = True
                rows = min(1, 0 if new else _rows(view, 1))  # one row may still fit
                rows = rows if rows and fits(view.seq, rows) else 0
            if rows:
                work.append(Work(view.seq, "held" if view.length >= view.prompt else "prefill", rows))
                row_budget -= rows
                places -= new
        if work or not short_of_memory or len(running) < 2:
            return work, []
        return [], [max(running, key=_arrival).seq]


def _arrival(view: SeqView) -> tuple[int, float, int]:
    return (-view.priority, view.arrived_s, view.seq)


def _decoding_first(view: SeqView) -> tuple[bool, tuple[int, float, int]]:
    return (view.length < view.prompt, _arrival(view))


def _rows(view: SeqView, budget: int) -> int:
    """Rows the sequence can use now: one to decode, or a chunk of prompt that cuts no span."""
    if view.length >= view.prompt:
        return max(0, min(1, budget, view.barrier - view.length))
    end = min(view.length + budget, view.prompt, view.barrier)
    for start, stop in reversed(view.spans):
        if start < end < stop:
            end = start
    return max(0, end - view.length)


def make(context: SchedulerContext) -> @CLASS@:
    """The factory of the part."""
    return @CLASS@(context.max_sequences)
