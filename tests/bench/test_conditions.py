import math

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from luce_core.bench.cases import Case
from luce_core.bench.conditions import NAMES, Conditions, Pair, differences, gain, gains, read_conditions

SAME = Conditions("m.gguf (1 bytes, changed 2)", "f16", "f16", True, 2, 4096)
OTHER = {
    "file": "n.gguf (1 bytes, changed 2)",
    "k_type": "f32",
    "v_type": "bf16",
    "flash_attention": False,
    "threads": 4,
    "context": 512,
}
RATIO = st.floats(0.01, 100)


def test_same_conditions_have_no_difference():
    assert differences(SAME, evolve(SAME)) == []


@pytest.mark.parametrize("name", list(NAMES))
def test_every_condition_counts_and_is_named_with_both_values(name):
    [said] = differences(SAME, evolve(SAME, **{name: OTHER[name]}))
    assert said.startswith(f"{NAMES[name]}: ")
    if name == "flash_attention":
        assert said == "flash attention: on and off"
    else:
        assert f"{getattr(SAME, name)} and {OTHER[name]}" in said


def test_all_differences_are_said_together():
    assert len(differences(SAME, Conditions(**OTHER))) == len(NAMES)


def test_flash_attention_must_be_on_not_just_the_same():
    off = evolve(SAME, flash_attention=False)
    assert differences(off, off) == ["flash attention: off on both sides, wanted on"]


def test_a_worker_that_does_not_say_a_condition_is_not_believed():
    about = {name: getattr(SAME, name) for name in NAMES} | {"engine": "x"}
    assert read_conditions(about) == SAME
    del about["threads"]
    with pytest.raises(KeyError, match="threads"):
        read_conditions(about)


def test_the_gain_is_the_geometric_mean():
    assert gain(4.0, 9.0) == 6.0
    assert gain(7.6, 2.6) == pytest.approx(4.4452, abs=1e-4)


@given(RATIO, RATIO)
def test_the_gain_lies_between_its_ratios_and_turns_around(prefill, decode):
    found = gain(prefill, decode)
    assert min(prefill, decode) * 0.999 <= found <= max(prefill, decode) * 1.001
    assert gain(1 / prefill, 1 / decode) == pytest.approx(1 / found)
    assert math.isclose(found * found, prefill * decode)


@pytest.mark.parametrize("ratios", [(0.0, 1.0), (1.0, -1.0)])
def test_no_gain_of_nothing(ratios):
    with pytest.raises(ValueError, match="positive"):
        gain(*ratios)


def test_gains_pair_tests_of_the_same_depth_only():
    pairs = [
        Pair(Case("pp", 512, 0, 1), 400.0, 100.0),
        Pair(Case("tg", 128, 0, 1), 90.0, 10.0),
        Pair(Case("pp", 512, 1024, 1), 30.0, 10.0),
        Pair(Case("tg", 64, 2048, 1), 30.0, 10.0),
    ]
    [found] = gains(pairs)
    assert (found.prompt, found.answer) == (pairs[0].case, pairs[1].case)
    assert (found.prefill, found.decode, found.gain) == (4.0, 9.0, 6.0)
