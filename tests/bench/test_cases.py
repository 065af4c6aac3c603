import pytest

from luce_core.bench.cases import Case, Prompts, bound_of, check_cases, make_cases
from luce_core.errors import UsageError
from luce_core.testing.pipeline import make_pipeline
from luce_core.testing.toy import write_toy_model


@pytest.fixture
def plan(tmp_path):
    """plan(context=..., **options) of a toy model."""

    def make(*, context=512, slots=True, **options):
        path = write_toy_model(tmp_path / "toy.gguf", context=context, slots=slots)
        return make_pipeline(path, options=options).plan

    return make


def test_every_combination_once_in_order():
    made = make_cases([512, 64], [128], [0, 1024], [1, 2])
    assert [case.label for case in made] == [
        "pp512",
        "pp64",
        "tg128",
        "pp512 @ d1024",
        "pp64 @ d1024",
        "tg128 @ d1024",
        "pp512 × 2",
        "pp64 × 2",
        "tg128 × 2",
        "pp512 @ d1024 × 2",
        "pp64 @ d1024 × 2",
        "tg128 @ d1024 × 2",
    ]
    assert make_cases([4, 4], [0], [0], [1]) == [Case("pp", 4, 0, 1)]


def test_no_tokens_no_test():
    assert make_cases([0], [16], [0], [1]) == [Case("tg", 16, 0, 1)]
    with pytest.raises(UsageError, match="-p and -n are both 0"):
        make_cases([0], [0], [0], [1])


@pytest.mark.parametrize(
    ("case", "context"),
    [
        (Case("pp", 512, 0, 1), 513),
        (Case("pp", 512, 100, 1), 613),
        (Case("tg", 128, 0, 1), 130),
        (Case("tg", 128, 100, 1), 229),
    ],
)
def test_a_test_fits_its_context_exactly_or_not(plan, case, context):
    assert case.context == context
    check_cases([case], plan(context=context))
    with pytest.raises(UsageError) as wrong:
        check_cases([case], plan(context=context - 1))
    said = str(wrong.value)
    assert case.label in said
    assert f"{context} tokens" in said
    assert f"the context is {context - 1}" in said


def test_more_sequences_than_may_run(plan):
    with pytest.raises(UsageError, match="runs 5 sequences; --max-sequences is 4"):
        check_cases([Case("pp", 4, 0, 5)], plan())


def test_more_blocks_than_there_are(plan):
    one = plan(cache_bytes=str(20 * 32 * 16))
    check_cases([Case("tg", 128, 0, 1)], one)
    with pytest.raises(UsageError, match=r"needs \d+ cache blocks; the plan has \d+"):
        check_cases([Case("tg", 400, 0, 4)], one)


def test_the_bound_is_bandwidth_over_what_a_step_reads(plan):
    made = plan(slots=False)  # a token of a toy's pages: two f32
    weights = 64 * 4  # 8 × 8 weights; the toy's layer packs none, so they are f32
    one = bound_of(made, Case("tg", 100, 200, 1))
    assert one == pytest.approx(1e9 / (weights + 250 * 8))
    two = bound_of(made, Case("tg", 100, 200, 2))
    assert two == pytest.approx(2 * 1e9 / (weights + 2 * 250 * 8))
    assert bound_of(made, Case("pp", 100, 200, 1)) is None, "the device's arithmetic is not known"


# --- prompts


def test_equal_seeds_give_equal_prompts_and_others_do_not():
    case = Case("pp", 20, 30, 2)
    first, again, other = (Prompts(1000, seed).of(case) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert first[0] != first[1]


def test_contexts_stay_and_what_is_measured_is_new():
    prompts = Prompts(1000, 0)
    case = Case("pp", 20, 30, 1)
    [one], [two] = prompts.of(case), prompts.of(case)
    assert one.context == two.context
    assert (len(one.context), len(one.rest)) == (30, 20)
    assert one.rest != two.rest
    [longer] = prompts.of(Case("tg", 5, 30, 1))
    assert longer.context == one.context  # so that it is computed once


def test_token_ids_are_in_the_vocabulary_and_decoding_needs_one():
    [prompt] = Prompts(7, 0).of(Case("pp", 500, 0, 1))
    assert set(prompt.rest) == set(range(7))
    assert prompt.context == ()
    [prompt] = Prompts(7, 0).of(Case("tg", 500, 0, 1))
    assert len(prompt.context) == 1
