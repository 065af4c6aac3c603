"""Steps over static buffers are the steps of plain calls: tokens, logprobs, trees, padding, moved state."""

from __future__ import annotations

import logging
from contextlib import contextmanager, nullcontext

import pytest
import torch
from attrs import evolve
from luce_backend_triton import executor, picks
from luce_backend_triton.executor import Capture, GraphExecutor

from luce_core.contracts import SamplingParams
from luce_core.ops import build_ops, sampling
from luce_core.testing.constraints import Automaton
from luce_core.testing.dense import write_dense_model
from luce_core.testing.drafters import ScriptedDrafter
from luce_core.testing.pipeline import TOY_HOOKS, EngineRig, make_pipeline
from luce_core.testing.toy import write_toy_model

DENSE_HOOKS = "luce_core.testing.dense.hooks"
PROMPTS = ([5, 9, 2], [7], list(range(1, 30)))
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.9, top_k=20, seed=3)
LOGPROBS = SamplingParams(temperature=0.0, logprobs=3)
PENALTY = SamplingParams(temperature=0.0, repetition=1.5)
NUCLEUS = SamplingParams(temperature=0.7, top_p=0.95, seed=1)
CHOICES = SamplingParams(temperature=0.9, typical_p=0.9, xtc_probability=0.5, xtc_threshold=0.05, seed=2)


class Replay:
    """As a graph: nothing runs when it is captured, and results stay where they are."""

    def __init__(self, work):
        self._work, self.results, self.runs = work, {}, 0

    def replay(self):
        before = self.results
        self.results = self._work()
        self.runs += 1
        if before:
            for name, tensor in before.items():
                tensor.copy_(self.results[name])
            self.results = before


class Captures(list):
    def __call__(self, work):
        self.append(Replay(work))
        return self[-1]


def branches(text, capacity):
    """Two children of the anchor, one of them with a child: rarely right, never all wrong."""
    last = text[-1]
    tokens = [(last + 1) % 250, (last * 7 + 3) % 250, (last + 2) % 250]
    return tokens[:capacity], [-1, -1, 0][:capacity]


@pytest.fixture(params=["slots", "pages", "window"])
def write(request, tmp_path):
    """-> (file, hooks) of a toy model with one kind of state."""
    shape = {"slots": {}, "pages": {"slots": False}, "window": {"slots": True, "window": 24}}[request.param]
    return write_toy_model(tmp_path / "toy.gguf", salt=7, context=256, **shape), (TOY_HOOKS,)


def rig(write, runs=None, drafters=()):
    path, hooks = write
    pipeline = make_pipeline(path, *hooks, options={"ctx_size": 128}, drafters=drafters)
    return EngineRig(pipeline if runs is None else evolve(pipeline, executor=runs))


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.0), SAMPLED, PENALTY], ids=["greedy", "sampled", "penalty"]
)
@pytest.mark.parametrize("drafted", [False, True])
def test_tokens_are_those_of_plain_calls(write, params, drafted):
    captures = Captures()
    rigs = [
        rig(write, runs, [ScriptedDrafter(branches)] if drafted else ())
        for runs in (None, GraphExecutor("cpu", captures))
    ]
    wanted, got = (one.generate(*PROMPTS, max_tokens=7, params=params) for one in rigs)
    assert got == wanted
    assert sum(one.runs for one in captures) > 2


EVENS, ODDS = range(32, 200, 2), range(1, 280, 2)
TURNS = Automaton({0: dict.fromkeys(EVENS, 1), 1: dict.fromkeys(ODDS, 0)}, frozenset())


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafted", [False, True])
def test_constrained_tokens_are_those_of_plain_calls(write, params, drafted):
    """Beside a request without; masks are inputs of captured steps."""
    answers, captures = [], Captures()
    for runs in (None, GraphExecutor("cpu", captures)):
        one = rig(write, runs, [ScriptedDrafter(branches)] if drafted else ())
        these = [one.submit(prompt, 9, params, constraint=TURNS) for prompt in PROMPTS[:2]]
        these.append(one.submit(PROMPTS[2], 9, params))
        one.run()
        answers.append([answer.ids for answer in these])
    assert answers[0] == answers[1]
    assert all(token % 2 == place % 2 for place, token in enumerate(answers[0][0]))
    assert sum(one.runs for one in captures) > 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="the toy is on the CPU: Triton's interpreter")
@pytest.mark.parametrize(
    "params", [SAMPLED, PENALTY, NUCLEUS, CHOICES], ids=["top-k", "penalty", "top-p", "xtc"]
)
@pytest.mark.parametrize("asked", [{}, {"constraint": TURNS}], ids=["free", "constrained"])
@pytest.mark.parametrize("write", ["slots"], indirect=True)
def test_the_kernels_that_end_steps_give_the_tokens_of_the_reference(write, params, asked, monkeypatch):
    """Whole answers, several steps at once where they can be."""
    runs = GraphExecutor("cpu", Captures(), steps=3)
    handles = watched(runs, monkeypatch)
    ways = rig(write), rig(write, runs)
    ways[1].engine.programs.ops = build_ops({name: getattr(picks, name) for name in picks.__all__})
    wanted, got = (one.generate(*PROMPTS[:2], max_tokens=11, params=params, **asked) for one in ways)
    assert got == wanted
    buckets = runs._programs["verify"].buckets
    assert all(bucket[2] is not None for bucket in buckets), "picked within"
    assert bool(handles) != bool(asked)
    assert {bucket[-1] for bucket in buckets} == ({1} if asked else {1, 3})


@pytest.mark.skipif(torch.cuda.is_available(), reason="the toy is on the CPU: Triton's interpreter")
@pytest.mark.parametrize("params", [GREEDY, NUCLEUS, SAMPLED], ids=["greedy", "top-p", "top-k"])
@pytest.mark.parametrize("steps", [2, 4])
def test_several_steps_at_once_are_captured_and_replayed_however_they_are_sampled(
    write, params, steps, monkeypatch
):
    """16 tokens: the first by itself, then so many at a time; the first of a bucket are calls, all others
    replays.
    """
    captures = Captures()
    runs = GraphExecutor("cpu", captures, steps=steps)
    handles, one = watched(runs, monkeypatch), rig(write, runs)
    one.engine.programs.ops = build_ops({name: getattr(picks, name) for name in picks.__all__})
    one.generate([3, 4], max_tokens=16, params=params)
    at_once, alone = divmod(15, steps)
    assert None not in handles
    assert len(handles) == at_once + alone
    buckets = {bucket[-1]: made for bucket, made in runs._programs["verify"].buckets.items()}
    assert {steps: made.captured.runs for steps, made in buckets.items()} == {1: alone, steps: at_once - 1}


def watched(runs, monkeypatch):
    """Handles of the steps that followed, None for those that did not."""
    follow, handles = runs.follow, []
    monkeypatch.setattr(runs, "follow", lambda step: handles.append(follow(step)) or handles[-1])
    return handles


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALTY], ids=["greedy", "sampled", "penalty"])
@pytest.mark.parametrize("steps", [1, 4])
def test_steps_follow_one_another(write, params, steps, monkeypatch):
    monkeypatch.setattr(sampling.sample, "stays_on_device", lambda params: not params.waits, raising=False)
    captures = Captures()
    runs = GraphExecutor("cpu", captures, steps=steps)
    handles = watched(runs, monkeypatch)
    ways = rig(write), rig(write, runs)
    wanted, got = (one.generate([3, 4], [8], max_tokens=20, params=params) for one in ways)
    assert got == wanted
    fences = [handle.fence for handle in handles]  # each of them
    assert len(fences) >= 18 // steps
    assert fences == sorted(fences)
    wanted, got = (one.generate([9, 4], [6], max_tokens=20, params=params) for one in ways)
    assert got == wanted
    buckets = {bucket[-1]: one for bucket, one in runs._programs["verify"].buckets.items() if bucket[0] == 2}
    assert buckets.keys() == {1, steps}
    assert buckets[steps].captured.runs >= 2 * (18 // steps) - 2


def test_a_text_that_ends_within_a_graph_of_steps_leaves_its_state(write):
    runs = GraphExecutor("cpu", Captures(), steps=4)
    ways = rig(write), rig(write, runs)
    (whole,) = ways[0].generate([3, 4], max_tokens=30)
    for end in range(9, 14):
        answers = []
        for one in ways:
            (text,) = one.generate([3, 4], max_tokens=30, eog=frozenset({whole[end]}))
            answers.append((text, one.generate([3, 4, *text, 7], max_tokens=9)))
        assert answers[0] == answers[1]


def test_a_graph_of_several_steps_counts_as_so_many(write, monkeypatch):
    monkeypatch.setattr(executor, "MOST_BUCKETS", 6)
    runs = GraphExecutor("cpu", Captures(), steps=4)
    one = rig(write, runs)
    for count in (1, 2, 3):
        one.generate(*[[3, 4 + n] for n in range(count)], max_tokens=20)
        assert runs._programs["verify"].steps <= 6
    assert {bucket[-1] for bucket in runs._programs["verify"].buckets} >= {4}


def test_nothing_follows_what_cannot_be_captured(write, monkeypatch):
    def refuse(work):
        raise RuntimeError("operation not permitted when stream is capturing")

    runs = GraphExecutor("cpu", refuse)
    handles = watched(runs, monkeypatch)
    wanted, got = (one.generate([3, 4], max_tokens=9) for one in (rig(write), rig(write, runs)))
    assert got == wanted
    assert handles
    assert set(handles) == {None}


def test_a_network_of_ops_answers_the_same(tmp_path):
    write = write_dense_model(tmp_path / "dense.gguf", layers=1), (TOY_HOOKS, DENSE_HOOKS)
    rigs = [
        rig(write, runs, [ScriptedDrafter(branches)]) for runs in (None, GraphExecutor("cpu", Captures()))
    ]
    wanted, got = (one.generate(*PROMPTS[:2], max_tokens=5) for one in rigs)
    assert got == wanted


def test_logprobs_are_those_of_plain_calls(write):
    answers = []
    for runs in (None, GraphExecutor("cpu", Captures())):
        one = rig(write, runs)
        answer = one.submit(PROMPTS[0], 8, LOGPROBS)
        one.run()
        answers.append(answer.logprobs)
    assert answers[0] == answers[1]


def test_a_drafter_observes_what_was_committed(write):
    """The scripted drafter checks it."""
    drafter = ScriptedDrafter(branches)
    rig(write, GraphExecutor("cpu", Captures()), [drafter]).generate(*PROMPTS, max_tokens=10)
    assert drafter.rounds > 3


def test_a_bucket_is_captured_once_when_it_comes_again(write):
    captures = Captures()
    one = rig(write, GraphExecutor("cpu", captures))
    one.generate([3, 4], max_tokens=1)
    assert not captures
    one.generate([3, 4], max_tokens=9)
    one.generate([6, 4], max_tokens=9)
    assert len(captures) == 1
    assert captures[0].runs >= 16


def test_the_bucket_that_was_used_longest_ago_goes(write, monkeypatch):
    monkeypatch.setattr(executor, "MOST_BUCKETS", 2)
    captures = Captures()
    one = rig(write, GraphExecutor("cpu", captures))
    buckets = one.pipeline.executor._programs["verify"].buckets
    for count in (1, 2, 1, 3):
        one.generate(*[[3, 4 + n] for n in range(count)], max_tokens=4)
        assert next(reversed(buckets))[0] == count
    assert [bucket[0] for bucket in buckets] == [1, 3]


def test_moved_tensors_are_captured_anew(write):
    captures = Captures()
    one = rig(write, GraphExecutor("cpu", captures))
    before = one.generate([3, 4], max_tokens=6)
    target = one.pipeline.target
    target.park()
    target.unpark()
    assert one.generate([3, 4], max_tokens=6) == before
    assert len(captures) == 2


def test_what_cannot_be_captured_runs_as_calls_and_the_log_says_so(write, caplog):
    def refuse(work):
        raise RuntimeError("operation not permitted when stream is capturing")

    wanted = rig(write).generate(*PROMPTS, max_tokens=8)
    with caplog.at_level(logging.WARNING):
        got = rig(write, GraphExecutor("cpu", refuse)).generate(*PROMPTS, max_tokens=8)
    assert got == wanted
    assert [record for record in caplog.records if "not permitted" in record.getMessage()]


def words_of(caplog):
    return [record.getMessage() for record in caplog.records if "not permitted" in record.getMessage()]


def test_one_kind_that_cannot_be_captured_leaves_the_others_alone(write, caplog):
    """Here steps that are sampled by calls: greedy ones were captured before, and go on being so."""
    captures, kinds = Captures(), []

    def some(work):
        bucket = work.args[0].bucket
        kinds.append(bucket[2])
        if bucket[2] is None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return captures(work)

    ways = rig(write), rig(write, GraphExecutor("cpu", some))
    with caplog.at_level(logging.WARNING):
        for params in (GREEDY, SAMPLED, GREEDY, SAMPLED):
            wanted, got = (one.generate(*PROMPTS[:2], max_tokens=6, params=params) for one in ways)
            assert got == wanted
    assert kinds.count(None) == len(words_of(caplog))
    assert kinds.count(frozenset()) == len(captures) > 0
    assert all(one.startswith("Some steps of 'verify'") for one in words_of(caplog))
    assert not ways[1].pipeline.executor._programs["verify"].refused


def test_a_capture_that_failed_does_not_keep_others_from_their_pool(monkeypatch):
    """torch goes on recording to the pool of a capture that could not be ended."""
    recording = set()

    @contextmanager
    def graph(captured, pool, capture_error_mode):
        if pool in recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        recording.add(pool)
        yield
        recording.remove(pool)

    handles = iter(range(9))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    capture = Capture(torch.device("cuda"))

    def waits():
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        capture(waits)
    assert capture(dict).results == {}
    assert capture(dict).results == {}
    assert not recording - {0}
    assert next(handles) == 2, "graphs that were captured share a pool"
