import itertools

import pytest

from luce_core.bench.cases import Case, Prompt, Prompts
from luce_core.bench.energy import open_meter
from luce_core.bench.measure import Measure
from luce_core.engine.engine import LuceEngine
from luce_core.errors import CapacityError, EngineError
from luce_core.testing.pipeline import make_pipeline
from luce_core.testing.toy import ToyLaw, write_toy_model

from .test_energy import FakeNvml


@pytest.fixture
def engine(tmp_path):
    """engine(slots=..., **options) of a toy model."""

    def make(*, slots=True, drafters=(), **options):
        path = write_toy_model(tmp_path / "toy.gguf", salt=7, slots=slots)
        return LuceEngine(make_pipeline(path, options=options, drafters=drafters))

    return make


class Steps:
    """An engine's steps counted, and a clock that shows their number: what is timed becomes exact."""

    def __init__(self, engine):
        self.engine, self.count = engine, 0
        self._step = engine.step
        engine.step = self.step

    def step(self):
        busy = self._step()
        self.count += busy
        return busy

    def clock(self):
        return float(self.count)


def run(engine, case, *, seed=0):
    prompts = Prompts(engine.spec.vocab, seed)
    steps = Steps(engine)
    return Measure(engine, steps.clock).sample(case, prompts.of(case))


@pytest.mark.parametrize("slots", [True, False])
@pytest.mark.parametrize("depth", [0, 1, 31, 32, 100])
def test_a_prompt_is_timed_from_request_to_first_token(engine, slots, depth):
    """100 tokens in chunks of 40: 99 rows in 3 steps, and the step of the last row."""
    sample = run(engine(slots=slots, chunk="40"), Case("pp", 100, depth, 1))
    assert sample.seconds == 4
    assert 100 - 2 <= sample.tokens <= 100  # a random token may be cached by chance, and then is not counted
    assert sample.tokens_s == sample.tokens / 4


@pytest.mark.parametrize("slots", [True, False])
@pytest.mark.parametrize("depth", [0, 1, 32, 100])
def test_an_answer_is_one_step_a_token(engine, slots, depth):
    sample = run(engine(slots=slots), Case("tg", 50, depth, 1))
    assert (sample.tokens, sample.seconds) == (50, 50)


@pytest.mark.parametrize("batch", [2, 4])
def test_sequences_decode_together(engine, batch):
    sample = run(engine(), Case("tg", 20, 64, batch))
    assert (sample.tokens, sample.seconds) == (20 * batch, 20)


def test_prompts_of_several_sequences_are_timed_to_the_last(engine):
    sample = run(engine(chunk="512"), Case("pp", 60, 0, 3))
    assert sample.tokens >= 3 * 58
    assert sample.seconds == 2


def test_no_token_ends_an_answer(engine):
    """A toy whose law says its ending token within the answer: it goes on."""
    made = engine()
    vocabulary = made.target.tokenizer
    law = ToyLaw(vocabulary.vocab_size, 7)
    prompt = next(
        prompt
        for prompt in itertools.product(range(20, 60), repeat=2)
        if set(law.greedy(prompt, 60, frozenset())[1:-1]) & vocabulary.eog
    )
    sample = Measure(made).sample(Case("tg", 60, 2, 1), [Prompt(prompt)])
    assert sample.tokens == 60


def test_nothing_is_left_behind(engine):
    made = engine()
    for case in (Case("tg", 10, 40, 3), Case("pp", 10, 40, 2)):
        run(made, case)
        made.blocks.check_integrity()
        assert not made.running
        assert not made.waiting
        assert made.blocks.stats().sequences == 0


def test_a_request_that_fails_is_an_error_with_its_reason(engine):
    with pytest.raises(EngineError, match=r"failed. .*outside the vocabulary"):
        Measure(engine()).sample(Case("pp", 2, 0, 1), [Prompt((), (10**9, 1))])


def test_a_cache_that_does_not_hold_the_context_is_said(engine):
    """Four contexts of 200 tokens in blocks for little more than one of 512."""
    with pytest.raises(CapacityError, match="does not fit the cache"):
        run(engine(cache_bytes=str(20 * 32 * 16)), Case("tg", 40, 400, 3))


def test_energy_is_that_of_what_is_timed(engine):
    nvml = FakeNvml(watts=(10.0,))
    made = engine()
    step = made.step

    def costly():
        nvml.pass_time(1.0)
        return step()

    made.step = costly
    meter = open_meter(lambda: nvml, clock=lambda: nvml.now)
    sample = Measure(made, lambda: nvml.now, meter).sample(
        Case("tg", 30, 0, 1), Prompts(made.spec.vocab, 0).of(Case("tg", 30, 0, 1))
    )
    assert sample.seconds == 30
    assert sample.energy.gross_j == pytest.approx(300.0)
    assert sample.energy.seconds == 30
