"""Warming up: ordinary steps before the first request, of which nothing stays but what was compiled."""

from __future__ import annotations

import pytest
from attrs import evolve

from luce_core.engine.executor import EagerExecutor
from luce_core.engine.staged import LEAST_BLOCKS
from luce_core.engine.warming import KINDS, warm
from luce_core.errors import EngineError
from luce_core.testing.drafters import ScriptedDrafter
from luce_core.testing.pipeline import EngineRig
from luce_core.testing.staging import AheadExecutor


class Watching(EagerExecutor):
    """Notes the shapes of steps: (program, rows of each sequence)."""

    compiles = True

    def __init__(self):
        super().__init__("cpu")
        self.seen = []

    def submit(self, steps):
        for step in steps:
            self.seen.append((step.program, tuple(len(row.tokens) for row in step.inputs["rows"])))
        return super().submit(steps)


class Sizes(AheadExecutor):
    """Notes how large the tables of steps are: (program, rows of the first sequence, columns)."""

    compiles = True

    def __init__(self):
        super().__init__(1)
        self.seen = []

    def submit(self, steps):
        for step in steps:
            rows, bucket = step.inputs["rows"], self.staged[step.program].bucket(step.inputs)
            if bucket is None:  # a plain call
                programs = self._programs[step.program].__self__
                tables = programs._batch("prefill", rows).table
                columns = max(table.block.shape[1] for table in tables.values())
            else:
                columns = max(columns for _, columns in bucket[3])
            self.seen.append((step.program, len(rows[0].tokens), columns))
        return super().submit(steps)


class Ahead(AheadExecutor):
    """Notes what follows: (sequences, steps)."""

    compiles = True

    def __init__(self, steps):
        super().__init__(steps)
        self.asked = []

    def follow(self, step):
        self.asked.append((len(step.inputs["rows"]), step.inputs["steps"]))
        return super().follow(step)


class Broken(Watching):
    def submit(self, steps):
        raise RuntimeError("no such kernel")


@pytest.fixture
def rig(toy):
    """rig(executor, ...) -> (EngineRig over it, ToyLaw)."""

    def make(executor, **more):
        plain, law = toy("slots", **more)
        return EngineRig(evolve(plain.pipeline, executor=executor)), law

    return make


def test_steps_of_every_number_of_sequences_and_a_whole_chunk_were_run(rig):
    executor = Watching()
    made, _ = rig(executor, chunk=128, context=256, max_sequences=3)
    done = []
    warm(made.engine, lambda *at: done.append(at))
    held = [counts for program, counts in executor.seen if program == "verify"]
    assert {len(counts) for counts in held} == {1, 2, 3}
    assert all(held.count((1,) * count) >= 4 for count in (1, 2, 3)), "captured in the second, of each kind"
    prompts = [counts for program, counts in executor.seen if program == "prefill"]
    assert {(128,), (63, 63)} <= set(prompts)
    assert {(4, 4), (8, 8), (12, 12)} <= set(prompts), "few rows of several"
    assert all(prompts.count((rows,)) == 2 for rows in (16, 32, 64)), "sizes of chunks, the second captured"
    assert (96,) not in prompts, "sizes between the powers of two"
    assert {len(counts) for counts in prompts} == {1, 2, 3}
    assert done == [(place, 12) for place in range(12)]


def test_a_few_rows_and_the_first_of_an_answer_are_run_as_behind_every_long_text(rig):
    """Each of a chunk once, of an answer twice, first of all; then tables are as small as texts are."""
    executor = Sizes()
    made, _ = rig(executor, chunk=256, context=4000)
    assert 32 * 64 < made.engine.context < 32 * 128
    warm(made.engine)
    wanted = []
    for columns in (16, 32, 64, 128):
        for rows in (16, 128):
            wanted += [("prefill", rows, columns), ("verify", 1, columns)]
    assert executor.seen[: len(wanted)] == wanted
    assert max(columns for *_, columns in executor.seen[len(wanted) :]) == 16, "of a whole chunk"
    executor.seen.clear()
    made.generate([5, 9, 2], max_tokens=2)
    assert executor.seen[0] == ("prefill", 2, 1)
    assert executor.seen[1] == ("verify", 1, LEAST_BLOCKS)


def test_drafters_propose_as_much_as_ever_they_will(rig):
    """Whole trees of every number of sequences and behind long texts; at an answer's end smaller ones."""
    executor = Watching()
    made, _ = rig(
        executor, drafters=[ScriptedDrafter(chain)], chunk=256, context=1000, max_sequences=2, draft_nodes=7
    )
    widths = noted_widths(made.engine)
    warm(made.engine)
    held = [counts for program, counts in executor.seen if program == "verify"]
    for count in (1, 2):
        assert held.count((8,) * count) >= 4
    assert {(rows,) for rows in range(1, 9)} <= set(held)
    for columns in (16, 32):
        assert (1, columns) in widths
        assert (8, columns) in widths
    assert {(rows, 32) for rows in range(1, 9)} <= set(widths)
    assert not made.engine.running
    made.engine.blocks.check_integrity()


@pytest.mark.parametrize("context", [30, 300])
def test_trees_as_large_as_the_context_leave_nothing_that_fails(rig, context):
    made, _ = rig(Watching(), drafters=[ScriptedDrafter(chain)], chunk=512, context=context, draft_nodes=290)
    warm(made.engine)
    assert not made.engine.counters["requests"]


def chain(text, capacity):
    return [(text[-1] + 1) % 250] * capacity, range(-1, capacity - 1)


def noted_widths(engine):
    """-> (rows, columns) of every held step of one sequence, as they come."""
    batch, seen = engine.programs._batch, []

    def noting(phase, rows):
        made = batch(phase, rows)
        if phase == "held" and len(rows) == 1:
            seen.append((len(rows[0].tokens), max(table.block.shape[1] for table in made.table.values())))
        return made

    engine.programs._batch = noting
    return seen


def test_a_round_that_fails_leaves_tables_as_they_were(rig):
    made, _ = rig(Broken(), context=4000)
    with pytest.raises(EngineError, match="no such kernel"):
        warm(made.engine)
    assert made.engine.programs.least_blocks == 1


def noted_checkpoints(engine, trials):
    """-> trials done when each checkpoint was made; `trials`: what `warm` says of its progress."""
    made, checkpoint = [], engine.blocks.checkpoint

    def noting(seq):
        made.append(trials[-1] if trials else None)
        return checkpoint(seq)

    engine.blocks.checkpoint = noting
    return made


@pytest.mark.parametrize("drafted", [False, True])
def test_checkpoints_are_left_by_the_last_trial_alone(rig, drafted):
    """Once, so that what a copy takes is there; then by whoever is served."""
    more = {"drafters": [ScriptedDrafter(chain)], "draft_nodes": 7} if drafted else {}
    made, law = rig(Watching(), chunk=128, context=1000, max_sequences=2, **more)
    done = []
    kept = noted_checkpoints(made.engine, done)
    warm(made.engine, lambda *at: done.append(at))
    assert len(done) > 2
    assert kept
    assert set(kept) == {(len(done) - 1, len(done))}
    assert made.engine.keeps_checkpoints
    kept.clear()
    assert made.generate([5, 9, 2], max_tokens=8) == [law.greedy([5, 9, 2], 8)]
    assert kept, "served as ever"


def test_checkpoints_are_kept_again_when_a_trial_fails(rig):
    made, _ = rig(Broken())
    with pytest.raises(EngineError, match="no such kernel"):
        warm(made.engine)
    assert made.engine.keeps_checkpoints


@pytest.mark.parametrize("steps", [1, 3])
def test_steps_that_follow_at_once_were_run_twice(rig, steps):
    executor = Ahead(steps)
    warm(rig(executor, chunk=64, max_sequences=2)[0].engine)
    for count in (1, 2):
        assert executor.asked.count((count, steps)) >= 2 * len(KINDS)


def test_nothing_of_it_stays(rig):
    made, law = rig(Watching())
    before = made.engine.blocks.stats()
    warm(made.engine)
    assert made.engine.blocks.stats() == before
    made.engine.blocks.check_integrity()
    assert set(made.engine.counters.values()) == {0}
    assert not made.engine.running
    assert not made.engine.waiting
    assert made.generate([5, 9, 2], max_tokens=8) == [law.greedy([5, 9, 2], 8)]


@pytest.mark.parametrize("context", [8, 40])
def test_a_short_context_is_kept(rig, context):
    made, _ = rig(Watching(), context=context)
    warm(made.engine)
    assert made.engine.counters["requests"] == 0


def test_an_executor_that_compiles_nothing_is_left_alone(rig):
    executor = Watching()
    executor.compiles = False
    made, _ = rig(executor)
    warm(made.engine)
    assert executor.seen == []


def test_what_fails_says_what_a_user_would_be_told(rig):
    made, _ = rig(Broken())
    with pytest.raises(EngineError, match=r"no such kernel.*--no-warmup"):
        warm(made.engine)
