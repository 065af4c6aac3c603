"""The core's scheduler in a simulated engine: thousands of steps of random load, short of everything."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import pytest

from luce_core.contracts import SeqId, SeqView, Work
from luce_core.engine.scheduler import FairScheduler, rank
from luce_core.testing.schedulers import NO_BARRIER, SchedulerContract, SimulatedEngine

SEEDS = range(80)


class TestContract(SchedulerContract):
    hooks = "luce_core.builtin"
    scheduler = "fair"


class FairEngine(SimulatedEngine):
    """What "fair" promises beyond the contract."""

    def __init__(self, seed: Any, **kinds: Any) -> None:
        super().__init__(lambda most, _budget: FairScheduler(most), seed, **kinds)
        self.gaps = dict.fromkeys((job.seq for job in self.jobs), 0)
        """Steps a sequence could have decoded and was not let."""

    def observe(self, work: Sequence[Work], preempted: Sequence[SeqId]) -> None:
        worked = {item.seq for item in work}
        if preempted:
            youngest = max(self.running, key=lambda job: rank(job.view()))
            assert list(preempted) == [youngest.seq]
            assert worked <= {job.seq for job in self.running}, "admitted while somebody is preempted"
        for job in self.running:
            if job.length >= job.replay and job.length < job.barrier and job.seq not in worked:
                self.gaps[job.seq] += 1


@pytest.mark.parametrize("memory", [None, 0, 60])
def test_only_the_youngest_is_preempted_and_only_for_lack_of_memory(memory: int | None) -> None:
    preemptions = 0
    for seed in SEEDS:
        for reserving in (True, False):
            kinds = {"spans": seed % 3 == 0, "barriers": seed % 2 == 0}
            engine = FairEngine((seed, memory), memory=memory, reserving=reserving, **kinds)
            engine.play()
            preemptions += engine.preemptions
    assert bool(preemptions) == (memory is not None)


def test_a_decoding_sequence_gets_a_row_in_every_step() -> None:
    for seed in SEEDS:
        engine = FairEngine((seed, "gaps"), spans=seed % 2 == 0, barriers=seed % 3 == 0)
        engine.play()
        assert set(engine.gaps.values()) == {0}


def test_a_span_as_wide_as_a_step_delays_decoding_by_one_step_each() -> None:
    delays = 0
    for seed in SEEDS:
        engine = FairEngine((seed, "wide"), wide=True, spans=True)
        engine.play()
        assert max(engine.gaps.values()) <= sum(len(job.spans) for job in engine.jobs)
        delays += sum(engine.gaps.values())
    assert delays


def test_a_prompt_waits_no_longer_than_those_before_it_take() -> None:
    """Rows of the first prompt: at least 3/4 of at least 1/2 of what decoding leaves of a step."""
    for seed in SEEDS:
        engine = FairEngine((seed, "wait"))
        engine.most = engine.scheduler.max_sequences = len(engine.jobs)  # type: ignore[attr-defined]
        engine.budget += len(engine.jobs)
        for job in engine.jobs:
            job.priority = 0
        engine.play()
        least = (engine.budget - len(engine.jobs)) * 3 // 8
        for job in engine.jobs:
            before = [j for j in engine.jobs if (j.arrival, j.seq) <= (job.arrival, job.seq)]
            bound = sum(ceil((j.prompt + 1) / least) for j in before)
            assert job.prefilled_at is not None
            assert job.prefilled_at - job.arrival <= bound


def test_the_next_in_line_is_not_starved_by_an_endless_stream_of_short_prompts() -> None:
    scheduler = FairScheduler(4)
    length, steps = 0, 0
    while length < 5000:
        stream = [
            SeqView(SeqId(10 + steps * 4 + n), 0, 4, 1.0 + steps, False, NO_BARRIER, 0) for n in range(4)
        ]
        long = SeqView(SeqId(0), length, 5000, 0.0, False, NO_BARRIER, 0)
        waiting, running = (stream, [long]) if length else ([*stream, long], [])
        work, _ = scheduler.plan(waiting, running, 32, lambda _seq, _rows: True)
        rows = {item.seq: item.rows for item in work}
        assert rows[SeqId(0)] >= min(24, 5000 - length)
        length += rows[SeqId(0)]
        steps += 1
    assert steps <= ceil(5000 / 24)
