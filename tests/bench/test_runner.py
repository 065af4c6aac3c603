import pytest

from luce_core.bench.cases import Case, Prompts
from luce_core.bench.energy import Energy
from luce_core.bench.measure import Sample
from luce_core.bench.runner import Runner

CASE = Case("pp", 4, 0, 1)


class Side:
    """Notes who ran on what, and answers with rates of the test's choice."""

    def __init__(self, name, log, seconds, **more):
        self.name, self.log, self.seconds, self.more = name, log, list(seconds), more

    def sample(self, case, given):
        prompt = given[0] if isinstance(given, list) else given
        self.log.append((self.name, prompt.rest))
        return Sample(case.tokens, self.seconds.pop(0), **self.more)

    def memory(self):
        return 123


def runner(repetitions=3, **more):
    log = []
    ours = Side("ours", log, [9, 1, 2, 4], drafted=10, accepted=4, energy=Energy(6.0, 2.0, 1.0))
    theirs = Side("theirs", log, [9, 4, 8, 16])
    ticks = []
    made = Runner(
        measure=ours,
        prompts=Prompts(1000, 0),
        repetitions=repetitions,
        device="cpu",
        bound=lambda case: 8.0,
        peer=theirs,
        tick=ticks.append,
        **more,
    )
    return made, log, ticks


def test_repetitions_run_in_turn_and_whoever_was_second_is_first():
    made, log, ticks = runner()
    made.run(CASE)
    assert [name for name, _ in log] == [
        "ours",
        "theirs",
        "ours",
        "theirs",
        "theirs",
        "ours",
        "ours",
        "theirs",
    ]
    assert ticks == ["pp4: warm-up", "pp4: 1 of 3", "pp4: 2 of 3", "pp4: 3 of 3"]


def test_both_get_the_same_tokens_and_each_repetition_others():
    made, log, _ = runner()
    made.run(CASE)
    pairs = [log[place : place + 2] for place in range(0, 8, 2)]
    assert all(first[1] == second[1] for first, second in pairs)
    assert len({first[1] for first, _ in pairs}) == 4


def test_the_warm_up_does_not_count():
    made, _, _ = runner()
    result = made.run(CASE)
    assert result.tokens_s.samples == (4.0, 2.0, 1.0)
    assert result.peer_tokens_s.samples == (1.0, 0.5, 0.25)
    assert result.tokens == 12
    assert (result.drafted, result.accepted) == (30, 12)
    assert result.energy == Energy(18.0, 6.0, 1.0)
    assert result.energy.per_token(result.tokens) == pytest.approx(1.0)
    assert result.bound_share == 0.25
    assert result.peer_rss_bytes == 123
    assert result.peak_rss_bytes > 1 << 20
    assert result.peak_device_bytes is None


def test_alone():
    log = []
    alone = Runner(Side("ours", log, [1, 1]), Prompts(10, 0), 1, "cpu", lambda case: None)
    result = alone.run(CASE)
    assert len(log) == 2
    assert (result.peer_tokens_s, result.peer_rss_bytes, result.energy, result.bound_share) == (None,) * 4
