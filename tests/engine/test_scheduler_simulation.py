"""The core's scheduler in a simulated engine: thousands of steps of random load, short of everything."""

from __future__ import annotations

from math import ceil
from random import Random
from typing import Any

import pytest

from luce_core.contracts import SeqId, SeqView, Work
from luce_core.engine.scheduler import FairScheduler, rank

FAR = 1 << 40


class Job:
    def __init__(self, number: int, dice: Random, *, spans: bool, barriers: bool, widest: int) -> None:
        self.seq = SeqId(number)
        self.arrival = 0
        self.prompt = dice.choice([0, dice.randint(1, 12), dice.randint(1, 150)])
        self.total = self.prompt + dice.randint(1, 40)
        self.priority = dice.choice([0, 0, 0, 1, 2])
        self.nodes = dice.choice([0, 0, 3, 12])
        self.every = dice.randint(3, 30) if barriers else FAR
        self.barrier = self.every
        self.spans: list[tuple[int, int]] = []
        start = dice.randint(0, 20)
        while spans and start < self.prompt:
            stop = min(start + dice.randint(1, widest), self.prompt)
            self.spans.append((start, stop))
            self.barrier = self.every = FAR  # a barrier inside a span would be the engine's bug
            start = stop + dice.randint(0, 30)
        self.length = 0
        self.reserved = 0
        self.replay = self.prompt
        """Tokens to prefill: more than the prompt after a preemption."""
        self.prefilled_at: int | None = None
        self.gaps = 0

    def view(self) -> SeqView:
        return SeqView(
            seq=self.seq,
            length=self.length,
            prompt=self.replay,
            arrived_s=float(self.arrival),
            constrained=False,
            barrier=self.barrier,
            nodes=self.nodes,
            spans=tuple(self.spans),
            priority=self.priority,
        )


class Simulation:
    """fits reserves, as the core's engine does, or only looks, so that later work may be refused."""

    def __init__(self, seed: Any, *, memory: int | None, reserving: bool = True, **kinds: bool) -> None:
        self.dice = dice = Random(str(seed))
        self.budget = dice.randint(12, 64)
        self.most = dice.randint(1, 8)
        widest = self.budget if kinds.pop("wide", False) else self.budget - self.most
        self.jobs = [Job(n, dice, widest=widest, **kinds) for n in range(dice.randint(1, 14))]  # type: ignore[arg-type]
        for job in self.jobs:
            job.arrival = dice.randint(0, 60)
        need = max(job.total for job in self.jobs) + 16
        self.memory = FAR if memory is None else need + memory
        self.reserving = reserving
        self.scheduler = FairScheduler(self.most)
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.now = self.preemptions = self.rows = 0

    def fits(self, seq: SeqId, rows: int) -> bool:
        job = self.jobs[seq]
        need = max(job.reserved, job.length + rows)
        if sum(other.reserved for other in self.jobs) - job.reserved + need > self.memory:
            return False
        if self.reserving:
            job.reserved = need
        return True

    def step(self) -> None:
        self.waiting += [job for job in self.jobs if job.arrival == self.now]
        waiting = [job.view() for job in self.waiting]
        running = [job.view() for job in self.running]
        self.dice.shuffle(waiting)
        work, preempted = self.scheduler.plan(waiting, running, self.budget, self.fits)
        self.check(work, preempted)
        for seq in preempted:
            job = self.jobs[seq]
            self.running.remove(job)
            self.waiting.append(job)
            job.replay = max(job.replay, job.length)
            job.length = job.reserved = 0
            self.preemptions += 1
        for item in work:
            self.run(item)
        for job in self.waiting:
            job.reserved = 0
        for job in self.running:
            if job.length == job.barrier:
                job.barrier += job.every  # the host acted
        self.now += 1

    def check(self, work: Any, preempted: Any) -> None:
        assert sum(item.rows for item in work) <= self.budget
        assert len({item.seq for item in work}) == len(work)
        worked = {item.seq: item for item in work}
        known = {job.seq for job in (*self.waiting, *self.running)}
        assert worked.keys() <= known
        admitted = [job for job in self.waiting if job.seq in worked]
        assert len(self.running) + len(admitted) <= self.most or not admitted
        assert len(preempted) <= 1
        if preempted:
            youngest = max(self.running, key=lambda job: rank(job.view()))
            assert preempted == [youngest.seq]
            assert youngest.seq not in worked
            assert not admitted
        for job in self.running:
            if job.length >= job.replay and job.length < job.barrier and job.seq not in worked:
                job.gaps += 1

    def run(self, item: Work) -> None:
        job = self.jobs[item.seq]
        assert item.rows >= 1
        assert job.length + item.rows <= job.barrier
        assert (item.phase == "held") == (job.length >= job.replay)
        if not self.fits(job.seq, item.rows):
            assert not self.reserving
            return
        job.reserved = max(job.reserved, job.length + item.rows)
        if job in self.waiting:
            self.waiting.remove(job)
            self.running.append(job)
        self.rows += item.rows
        if item.phase == "prefill":
            job.length += item.rows
            assert job.length <= job.replay
            assert not any(start < job.length < stop for start, stop in job.spans)
        else:
            assert item.rows <= 1 + job.nodes
            job.length = min(job.total, job.length + self.dice.randint(1, item.rows))
        if job.length >= job.prompt and job.prefilled_at is None:
            job.prefilled_at = self.now
        if job.length >= job.total:
            self.running.remove(job)
            job.reserved = 0

    def play(self) -> None:
        tokens = sum(job.total for job in self.jobs)
        while any(job.length < job.total for job in self.jobs):
            self.step()
            assert self.now < 80 + 10 * tokens, "somebody starves"


SEEDS = range(120)


@pytest.mark.parametrize("memory", [None, 0, 60])
def test_everything_finishes_within_all_limits(memory: int | None) -> None:
    preemptions = 0
    for seed in SEEDS:
        for reserving in (True, False):
            kinds = {"spans": seed % 3 == 0, "barriers": seed % 2 == 0}
            simulation = Simulation((seed, memory), memory=memory, reserving=reserving, **kinds)
            simulation.play()
            preemptions += simulation.preemptions
    assert bool(preemptions) == (memory is not None)


def test_a_decoding_sequence_gets_a_row_in_every_step() -> None:
    for seed in SEEDS:
        simulation = Simulation((seed, "gaps"), memory=None, spans=seed % 2 == 0, barriers=seed % 3 == 0)
        simulation.play()
        assert [job.gaps for job in simulation.jobs] == [0] * len(simulation.jobs)


def test_a_span_as_wide_as_a_step_delays_decoding_by_one_step_each() -> None:
    delays = 0
    for seed in SEEDS:
        simulation = Simulation((seed, "wide"), memory=None, wide=True, spans=True, barriers=False)
        simulation.play()
        wide = sum(len(job.spans) for job in simulation.jobs)
        assert max(job.gaps for job in simulation.jobs) <= wide
        delays += sum(job.gaps for job in simulation.jobs)
    assert delays


def test_a_prompt_waits_no_longer_than_those_before_it_take() -> None:
    """Rows of the first prompt: at least 3/4 of at least 1/2 of what decoding leaves of a step."""
    for seed in SEEDS:
        simulation = Simulation((seed, "wait"), memory=None, spans=False, barriers=False)
        simulation.most = simulation.scheduler.max_sequences = len(simulation.jobs)
        simulation.budget += len(simulation.jobs)
        for job in simulation.jobs:
            job.priority = 0
        simulation.play()
        least = (simulation.budget - len(simulation.jobs)) * 3 // 8
        for job in simulation.jobs:
            before = [j for j in simulation.jobs if (j.arrival, j.seq) <= (job.arrival, job.seq)]
            bound = sum(ceil((j.prompt + 1) / least) for j in before)
            assert job.prefilled_at is not None
            assert job.prefilled_at - job.arrival <= bound


def test_the_next_in_line_is_not_starved_by_an_endless_stream_of_short_prompts() -> None:
    scheduler, fits = FairScheduler(4), lambda _seq, _rows: True
    long = SeqView(SeqId(0), 0, 5000, 0.0, False, FAR, 0)
    length, steps = 0, 0
    while length < 5000:
        stream = [SeqView(SeqId(10 + steps * 4 + n), 0, 4, 1.0 + steps, False, FAR, 0) for n in range(4)]
        running = [SeqView(SeqId(0), length, 5000, 0.0, False, FAR, 0)] if length else []
        work, _ = scheduler.plan(stream + ([] if length else [long]), running, 32, fits)
        rows = {item.seq: item.rows for item in work}
        assert rows[SeqId(0)] >= min(24, 5000 - length)
        length += rows[SeqId(0)]
        steps += 1
    assert steps <= ceil(5000 / 24)
