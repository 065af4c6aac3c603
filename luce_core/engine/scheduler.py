"""The core's scheduler: continuous batching, tenants in turn, first come first served, decode first.

One step is filled in this order:
  1. one decided row for every sequence that decodes, oldest first;
  2. prompts in chunks, first those of the tenant that was served least, and of one tenant in order of
     arrival; a quarter of their rows is open to short prompts behind a long one that can finish at once;
  3. candidate nodes for the decoding sequences; while prompts wait, at most half of what decoding left.

A free place goes to the tenant of which least runs, then to the one served least. Nothing starves. Of one
tenant the order is fixed by arrival (a priority counts as an earlier arrival, so it is overtaken in the
end); a tenant with a longer queue waits longer, the others do not, and a priority puts a tenant ahead of
its share by so many rows and no more. Nobody is admitted past a sequence that found no room. When a
decoding sequence finds none, the youngest of the tenant that runs most is preempted; also when a tenant
of which nothing runs has found no place while that one was served PATIENCE_ROWS more. The policy is a
pure function; no tensor passes through here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heapreplace, nsmallest

from luce_core.contracts import SchedulerContext, SeqId, SeqView, Work

Fits = Callable[[SeqId, int], bool]

PRIORITY_S = 60.0
"""One step of priority counts as having arrived this much earlier."""
SHORT_SHARE = 4
"""One part in so many of a step's prompt rows may go to short prompts behind a long one."""
LOOKAHEAD = 32
"""Waiting sequences one step considers."""
PRIORITY_ROWS = 256
"""One step of priority puts a tenant so many rows ahead of its share."""
MOST_PRIORITY = 8
"""Between tenants a priority beyond this, up or down, counts as this: a lead has an end."""
PATIENCE_ROWS = 128
"""Rows another tenant is served more before it gives a place to one of which nothing runs."""


def rank(view: SeqView) -> tuple[float, int]:
    """Who comes first: the smaller. Fixed for the life of a request, so nobody is overtaken for ever."""
    return (view.arrived_s - PRIORITY_S * view.priority, view.seq)


def account(view: SeqView) -> int:
    """Which tenant comes first: the smaller. Rows it was served, less the lead its priority gives."""
    return view.served - PRIORITY_ROWS * max(-MOST_PRIORITY, min(MOST_PRIORITY, view.priority))


def by_tenant(views: Iterable[SeqView]) -> dict[str, list[SeqView]]:
    lines: dict[str, list[SeqView]] = {}
    for view in views:
        lines.setdefault(view.tenant, []).append(view)
    return lines


def in_turn(views: Sequence[SeqView], row_budget: int) -> list[SeqView]:
    """The tenant served least goes next, its own line by `rank`. One tenant: by `rank`."""
    lines = [sorted(line, key=rank) for line in by_tenant(views).values()]
    if len(lines) < 2:
        return lines[0] if lines else []
    heap = [(account(line[0]), rank(line[0]), 0, number, 0) for number, line in enumerate(lines)]
    heapify(heap)
    order: list[SeqView] = []
    while heap:
        _, _, given, number, place = heap[0]
        view = lines[number][place]
        order.append(view)
        given += max(1, min(row_budget, view.prompt - view.length))
        if place + 1 == len(lines[number]):
            heappop(heap)
        else:
            after = lines[number][place + 1]
            heapreplace(heap, (account(after) + given, rank(after), given, number, place + 1))
    return order


def for_places(waiting: Sequence[SeqView], running: Sequence[SeqView], free: int) -> list[SeqView]:
    """Who may take the `free` places, were there rows: whoever runs least, then whoever was served least.

    With one tenant, more than there are places: a short prompt may pass where a long one gets no rows.
    """
    lines = [nsmallest(LOOKAHEAD, line, key=rank) for line in by_tenant(waiting).values()]
    held = Counter(view.tenant for view in running)
    if len(held.keys() | {line[0].tenant for line in lines}) < 2:
        return lines[0] if lines else []
    heap = [(held[line[0].tenant], account(line[0]), rank(line[0]), n, 0) for n, line in enumerate(lines)]
    heapify(heap)
    chosen: list[SeqView] = []
    while heap and len(chosen) < min(free, LOOKAHEAD):
        runs, _, _, number, place = heap[0]
        chosen.append(lines[number][place])
        if place + 1 == len(lines[number]):
            heappop(heap)
        else:
            after = lines[number][place + 1]
            heapreplace(heap, (runs + 1, account(after), rank(after), number, place + 1))
    return chosen


def spread(views: Sequence[SeqView]) -> list[SeqView]:
    """The oldest of every tenant, then the second of every tenant: who runs most has the last place."""
    if len(views) < 2:
        return list(views)
    lines = [sorted(line, key=rank) for line in by_tenant(views).values()]
    if len(lines) == 1:
        return lines[0]
    placed = [(place, rank(view), view) for line in lines for place, view in enumerate(line)]
    return [view for _, _, view in sorted(placed, key=lambda item: item[:2])]


def chunk_rows(view: SeqView, most: int) -> int:
    """Prompt rows one chunk may take: up to `most`, no further than prompt and barrier, no span cut."""
    end = min(view.length + most, view.prompt, view.barrier)
    for start, stop in sorted(view.spans, reverse=True):
        if start < end < min(stop, view.prompt):
            end = max(start, view.length)
    return max(0, end - view.length)


def least_rows(view: SeqView) -> int:
    """The smallest chunk that gets on: 1, or the span that begins right here."""
    here = (min(stop, view.prompt) for start, stop in view.spans if start <= view.length < stop)
    return max([1, *(stop - view.length for stop in here)])


def decoding(view: SeqView) -> bool:
    return view.length >= view.prompt


class FairScheduler:
    """See the module. Every `fits` that answered yes is for work that is given, or was asked for less."""

    def __init__(self, max_sequences: int) -> None:
        self.max_sequences = max_sequences

    def plan(
        self, waiting: Sequence[SeqView], running: Sequence[SeqView], row_budget: int, fits: Fits
    ) -> tuple[Sequence[Work], Sequence[SeqId]]:
        """One step. With nobody else to preempt, a sequence without room gets nothing: room may still be on
        its way (fences), and if it is not, only the engine can say so to the user.
        """
        step = _Step(spread(running), row_budget, fits)
        step.decode()
        candidates: list[SeqView] = []
        if waiting and not step.preempted and len(running) < self.max_sequences:
            able = [view for view in waiting if view.length < view.barrier]
            candidates = for_places(able, running, self.max_sequences - len(running))
        step.prompts(candidates, self.max_sequences)
        step.spread_nodes()
        if not step.rows and step.refused:
            step.preempt_youngest()
        if waiting and not step.preempted:
            step.make_place(waiting, self.max_sequences)
        work = [
            Work(seq, "held" if decoding(step.views[seq]) else "prefill", rows)
            for seq, rows in step.rows.items()
        ]
        return work, step.preempted


class _Step:
    """One step being filled."""

    def __init__(self, running: list[SeqView], row_budget: int, fits: Fits) -> None:
        self.running = running
        self.fits = fits
        self.left = self.row_budget = row_budget
        self.rows: dict[SeqId, int] = {}
        self.views: dict[SeqId, SeqView] = {view.seq: view for view in running}
        self.preempted: list[SeqId] = []
        self.refused = False
        """Somebody running found no room."""
        self.turned_away: SeqId | None = None
        """Somebody waiting who found no room."""

    def give(self, view: SeqView, rows: int) -> None:
        self.views[view.seq] = view
        self.left -= rows - self.rows.get(view.seq, 0)
        self.rows[view.seq] = rows

    def preempt_youngest(self) -> None:
        if len(self.running) > 1 and not self.preempted:
            self.preempted.append(self.running[-1].seq)

    # --- 1. decided rows

    def decode(self) -> None:
        for view in self.running:
            ready = decoding(view) and view.length < view.barrier
            if not ready or not self.left or view.seq in self.preempted:
                continue
            if self.fits(view.seq, 1):
                self.give(view, 1)
            else:
                self.refused = True
                self.preempt_youngest()

    # --- 2. prompts

    def prompts(self, waiting: Sequence[SeqView], max_sequences: int) -> None:
        """Chunks, tenants in turn. Once a sequence finds no room, nobody behind it is admitted."""
        unfinished = [v for v in self.running if not decoding(v) and v.seq not in self.preempted]
        queue = [view for view in (*unfinished, *waiting) if view.length < view.barrier]
        if not queue:
            return
        queue = in_turn(queue, self.row_budget)
        fresh = {view.seq for view in waiting}
        kept_for_nodes = min(self.left // 2, self._node_wishes())
        short = self._short(queue, (self.left - kept_for_nodes) // SHORT_SHARE)
        reserved = sum(short.values())
        room = max_sequences - len(self.running)
        open_door = True
        for view in queue:
            reserved -= short.get(view.seq, 0)
            if view.seq in fresh and not (open_door and room):
                continue
            rows = self._prompt_rows(view, self.left - kept_for_nodes - reserved)
            if not rows and view is queue[0] and self.rows:
                rows = self._make_way(view)
            if not rows:
                continue
            rows = self._fitting(view, rows, shrink=view.seq not in fresh or not self.views)
            if rows:
                self.give(view, rows)
                room -= view.seq in fresh
            else:
                self.refused = self.refused or view.seq not in fresh
                if open_door and view.seq in fresh:
                    self.turned_away = view.seq
                open_door = False
        self._top_up(queue, self.left - kept_for_nodes)

    def _prompt_rows(self, view: SeqView, most: int) -> int:
        if decoding(view):  # a waiting sequence whose prompt is one token: it decodes at once
            return int(most > 0)
        return chunk_rows(view, most)

    def _short(self, queue: list[SeqView], share: int) -> dict[SeqId, int]:
        """Prompts behind the first that can finish within `share` rows, and what they need.

        Not of tenants that are ahead by a step: many short prompts are a long one too.
        """
        short: dict[SeqId, int] = {}
        for view in queue[1:]:
            if view.served - queue[0].served > self.row_budget:
                continue
            rest = max(1, view.prompt - view.length)
            if rest <= share and chunk_rows(view, rest) in (rest, 0):
                short[view.seq] = rest
                share -= rest
        return short

    def _make_way(self, view: SeqView) -> int:
        """A first prompt stuck before a span wider than decoding left: the youngest decode rows wait."""
        need = chunk_rows(view, least_rows(view))
        if not 1 < need <= self.row_budget or decoding(view) or not self.fits(view.seq, need):
            return 0
        for seq in reversed(list(self.rows)):
            if self.left >= need:
                break
            self.left += self.rows.pop(seq)
        return need

    def _fitting(self, view: SeqView, rows: int, *, shrink: bool) -> int:
        """`rows`, or where the sequence has nothing better to hope for, as many as there is room for."""
        while rows and not self.fits(view.seq, rows):
            rows = self._prompt_rows(view, rows // 2) if shrink else 0
        return rows

    def _top_up(self, queue: list[SeqView], spare: int) -> None:
        """Rows kept for short prompts that did not come go to the prompts that did, in order."""
        for view in queue:
            had = self.rows.get(view.seq, 0)
            if had and spare > 0 and not decoding(view):
                rows = chunk_rows(view, had + spare)
                if rows > had and self.fits(view.seq, rows):
                    self.give(view, rows)
                    spare -= rows - had

    # --- places

    def make_place(self, waiting: Sequence[SeqView], max_sequences: int) -> None:
        """For a tenant of which nothing runs, the one that runs most, and was served more, gives a place."""
        running = Counter(view.tenant for view in self.running)
        others = [view for view in waiting if view.tenant not in running]
        without = [view for view in others if view.seq not in self.rows and view.length < view.barrier]
        if not without:
            return
        first = min(without, key=lambda view: (account(view), rank(view)))
        known = {view.seq for view in self.running}
        full = len(known | self.rows.keys()) >= max_sequences
        last = self.running[-1] if self.running else first
        patient = account(last) - account(first) < PATIENCE_ROWS
        if running[last.tenant] > 1 and not patient and (full or first.seq == self.turned_away):
            self.preempted.append(last.seq)
            self.rows.pop(last.seq, None)

    # --- 3. candidate nodes

    def _wish(self, view: SeqView) -> int:
        return max(0, min(view.nodes, view.barrier - view.length - 1))

    def _node_wishes(self) -> int:
        return sum(self._wish(self.views[seq]) for seq in self.rows)

    def spread_nodes(self) -> None:
        """What is left, evenly over the decoding sequences, up to what each wishes; small wishes first."""
        decoders = [self.views[seq] for seq in self.rows if decoding(self.views[seq])]
        decoders.sort(key=self._wish)
        for number, view in enumerate(decoders):
            nodes = min(self._wish(view), self.left // (len(decoders) - number))
            if nodes and self.fits(view.seq, 1 + nodes):
                self.give(view, 1 + nodes)


def make_scheduler(context: SchedulerContext) -> FairScheduler:
    """The factory of part "fair"."""
    return FairScheduler(context.max_sequences)
