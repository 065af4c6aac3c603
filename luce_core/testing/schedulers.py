"""The contract of every scheduler, proven in a simulated engine under random load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from luce_core.contracts import Scheduler, SchedulerContext, SeqId, SeqView, Work
from luce_core.engine.tenants import TenantLedger
from luce_core.registry import resolve
from luce_core.testing.contract import Contract
from luce_core.testing.plugin import registry_of

NO_BARRIER = 1 << 40


class Job:
    """One request: how long it is, and how far."""

    def __init__(self, number: int, dice: Random, *, spans: bool, barriers: bool, widest: int) -> None:
        self.seq = SeqId(number)
        self.arrival = dice.randint(0, 60)
        self.prompt = dice.choice([0, dice.randint(1, 12), dice.randint(1, 150)])
        self.total = self.prompt + dice.randint(1, 40)
        self.priority = dice.choice([0, 0, 0, 1, 2])
        self.nodes = dice.choice([0, 0, 3, 12])
        self.spans = self._spans(dice, widest) if spans else ()
        self.every = dice.randint(3, 30) if barriers and not self.spans else NO_BARRIER
        """Tokens between two barriers; none may lie within a span."""
        self.barrier = self.every
        self.length = 0
        self.replay = self.prompt
        """Tokens to prefill: more than the prompt after a preemption."""
        self.reserved = 0
        self.prefilled_at: int | None = None
        self.tenant = ""
        self.leaves_at = NO_BARRIER
        """The step before which it is cancelled, or its deadline passes."""
        self.gone = False

    @property
    def over(self) -> bool:
        """Nothing more is to be done for it."""
        return self.gone or self.length >= self.total

    def _spans(self, dice: Random, widest: int) -> tuple[tuple[int, int], ...]:
        spans = []
        start = dice.randint(0, 20)
        while start < self.prompt:
            stop = min(start + dice.randint(1, widest), self.prompt)
            spans.append((start, stop))
            start = stop + dice.randint(0, 30)
        return tuple(spans)

    def view(self, served: int = 0) -> SeqView:
        """The job as a scheduler sees it; seconds are steps. served: rows of its tenant."""
        return SeqView(
            seq=self.seq,
            length=self.length,
            prompt=self.replay,
            arrived_s=float(self.arrival),
            constrained=False,
            barrier=self.barrier,
            nodes=self.nodes,
            spans=self.spans,
            priority=self.priority,
            tenant=self.tenant,
            served=served,
        )


class SimulatedEngine:
    """Runs a scheduler's plans and refuses what an engine refuses.

    memory: tokens of state beyond what the longest job needs; None = plenty. reserving: `fits` keeps the
    room it promises, as the core's engine does; otherwise it only looks, and work may turn out not to
    fit. wide: spans may fill a whole step. tenants: how many the jobs are from. leaving: some jobs end
    early, in any phase.
    """

    def __init__(
        self,
        make: Callable[[int, int], Scheduler],
        seed: Any,
        *,
        memory: int | None = None,
        reserving: bool = True,
        spans: bool = False,
        barriers: bool = False,
        wide: bool = False,
        tenants: int = 1,
        leaving: bool = False,
    ) -> None:
        self.dice = dice = Random(str(seed))
        self.budget = dice.randint(12, 64)
        self.most = dice.randint(1, 8)
        self.scheduler = make(self.most, self.budget)
        widest = self.budget if wide else self.budget - self.most
        self.jobs = [
            Job(number, dice, spans=spans, barriers=barriers, widest=widest)
            for number in range(dice.randint(1, 14))
        ]
        self.ledger = TenantLedger()
        for job in self.jobs:
            job.tenant = str(dice.randrange(tenants)) if tenants > 1 else ""
            if leaving and dice.random() < 0.3:
                job.leaves_at = job.arrival + dice.randint(0, 40)
        self.memory = NO_BARRIER
        if memory is not None:
            self.memory = max(job.total for job in self.jobs) + 16 + memory
        self.reserving = reserving
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.now = 0
        self.preemptions = 0

    def fits(self, seq: SeqId, rows: int) -> bool:
        """Whether the state of `seq` has room for `rows` more."""
        job = self.jobs[seq]
        need = max(job.reserved, job.length + rows)
        if sum(other.reserved for other in self.jobs) - job.reserved + need > self.memory:
            return False
        if self.reserving:
            job.reserved = need
        return True

    def play(self) -> None:
        """Until every job is done; AssertionError for a law broken or a job that never ends."""
        most_steps = 80 + 10 * sum(job.total for job in self.jobs)
        while not all(job.over for job in self.jobs):
            self.step()
            left = [job.seq for job in self.jobs if not job.over]
            assert self.now < most_steps, f"sequences {left} are not done after {self.now} steps"

    def step(self) -> tuple[Sequence[Work], Sequence[SeqId]]:
        """One step; returns what the scheduler said."""
        for job in self.jobs:
            if job.arrival == self.now and not job.gone:
                self.waiting.append(job)
                self.ledger.join(job.tenant)
            if job.leaves_at == self.now and not job.over:
                self._leave(job)
        waiting = [job.view(self.ledger.served(job.tenant)) for job in self.waiting]
        self.dice.shuffle(waiting)
        running = [job.view(self.ledger.served(job.tenant)) for job in self.running]
        work, preempted = self.scheduler.plan(waiting, running, self.budget, self.fits)
        self._check(work, preempted)
        self.observe(work, preempted)
        for seq in preempted:
            self._preempt(self.jobs[seq])
        self.ledger.charge((self.jobs[item.seq].tenant, item.rows) for item in work)
        for item in work:
            self._run(item)
        for job in self.waiting:
            job.reserved = 0
        for job in self.running:
            if job.length == job.barrier:
                job.barrier += job.every  # the host acted
        self.now += 1
        return work, preempted

    def observe(self, work: Sequence[Work], preempted: Sequence[SeqId]) -> None:
        """What a test wants to see of a step before it happens."""

    def _check(self, work: Sequence[Work], preempted: Sequence[SeqId]) -> None:
        rows = sum(item.rows for item in work)
        assert rows <= self.budget, f"{rows} rows planned, budget {self.budget}"
        worked = [item.seq for item in work]
        assert len(set(worked)) == len(worked), f"work twice for one sequence: {worked}"
        running = {job.seq for job in self.running}
        known = running | {job.seq for job in self.waiting}
        assert set(worked) <= known, f"work for sequences {set(worked) - known} nobody knows"
        assert set(preempted) <= running, f"{preempted} preempted, running are {running}"
        assert not set(preempted) & set(worked), f"{preempted} preempted and given work at once"
        after = (running | set(worked)) - set(preempted)
        assert len(after) <= self.most or after <= running, f"{len(after)} run, at most {self.most} may"

    def _run(self, item: Work) -> None:
        job = self.jobs[item.seq]
        phase = "held" if job.length >= job.replay else "prefill"
        assert item.phase == phase, f"{item}, but the sequence is at {job.length} of {job.replay}"
        assert item.rows >= 1, f"{item} has no rows"
        assert job.length + item.rows <= job.barrier, f"{item} at {job.length} reaches barrier {job.barrier}"
        if not self.fits(job.seq, item.rows):
            assert not self.reserving, f"{item} does not fit"
            return
        job.reserved = max(job.reserved, job.length + item.rows)
        if job in self.waiting:
            self.waiting.remove(job)
            self.running.append(job)
        if phase == "prefill":
            job.length += item.rows
            assert job.length <= job.replay, f"{item} prefills beyond the prompt of {job.replay}"
            cut = [span for span in job.spans if span[0] < job.length < span[1]]
            assert not cut, f"{item} ends at {job.length} and cuts {cut}"
        else:
            assert item.rows <= 1 + job.nodes, f"{item}: at most {job.nodes} nodes were asked for"
            job.length = min(job.total, job.length + self.dice.randint(1, item.rows))
        if job.length >= job.prompt and job.prefilled_at is None:
            job.prefilled_at = self.now
        if job.length >= job.total:
            self.running.remove(job)
            self.ledger.leave(job.tenant)
            job.reserved = 0

    def _leave(self, job: Job) -> None:
        job.gone = True
        job.reserved = 0
        (self.running if job in self.running else self.waiting).remove(job)
        self.ledger.leave(job.tenant)

    def _preempt(self, job: Job) -> None:
        self.running.remove(job)
        self.waiting.append(job)
        job.replay = max(job.replay, job.length)
        job.length = job.reserved = 0
        self.preemptions += 1


class SchedulerContract(Contract):
    """A scheduler that keeps every limit, finishes every job of a finite load, and is pure."""

    hooks: str
    """Dotted name of the plugin's module of hooks."""
    scheduler: str
    """The part's name."""
    options: Any = None
    """The plugin's options; None = their defaults."""

    def make(self, max_sequences: int, row_budget: int) -> Scheduler:
        """The scheduler as compose makes it."""
        found = registry_of(self.hooks).part("scheduler", self.scheduler)
        info = registry_of(self.hooks).record(found.plugin).info
        options = self.options
        if options is None and info is not None and info.options is not None:
            options = info.options()
        factory = resolve(found.value.factory, f"scheduler {self.scheduler!r}")
        made: Scheduler = factory(SchedulerContext(options, max_sequences, row_budget))
        return made

    def test_limits_hold_and_everybody_finishes(self) -> None:
        for seed in range(60):
            SimulatedEngine(self.make, seed).play()

    def test_no_step_reaches_a_barrier(self) -> None:
        for seed in range(40):
            SimulatedEngine(self.make, seed, barriers=True).play()

    def test_no_chunk_cuts_a_span(self) -> None:
        for seed in range(40):
            SimulatedEngine(self.make, seed, spans=True).play()

    def test_everybody_finishes_when_memory_is_short(self) -> None:
        for seed in range(0, 60, 2):
            barriers = seed % 4 == 0
            for reserving in (True, False):
                SimulatedEngine(self.make, seed, memory=seed, reserving=reserving, barriers=barriers).play()

    def test_everybody_finishes_beside_other_tenants(self) -> None:
        for seed in range(60):
            memory = seed if seed % 2 else None
            SimulatedEngine(self.make, (seed, "tenants"), memory=memory, tenants=2 + seed % 3).play()

    def test_whoever_leaves_early_leaves_the_others_alone(self) -> None:
        for seed in range(60):
            memory = seed if seed % 2 else None
            tenants = 1 + seed % 3
            SimulatedEngine(self.make, (seed, "leaving"), memory=memory, tenants=tenants, leaving=True).play()

    def test_plan_is_a_pure_function(self) -> None:
        scheduler = self.make(4, 32)
        for seed in range(20):
            dice = Random(seed)
            views = [Job(n, dice, spans=True, barriers=False, widest=16).view() for n in range(8)]
            arguments = (views[4:], views[:4], 32, lambda _seq, rows: rows < 20)
            first, again = scheduler.plan(*arguments), scheduler.plan(*arguments)
            assert _plain(first) == _plain(again) == _plain(self.make(4, 32).plan(*arguments))


def _plain(plan: tuple[Sequence[Work], Sequence[SeqId]]) -> tuple[list[Work], list[SeqId]]:
    return list(plan[0]), list(plan[1])
