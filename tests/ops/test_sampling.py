"""Sampling against distributions computed by enumeration in plain Python."""

import math
from collections import Counter

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from luce_core.contracts import ForwardBatch, SamplingParams
from luce_core.model.batch import RowSet, make_batch
from luce_core.ops import sampling
from luce_core.ops.marks import EMITTED, PROMPTED
from luce_core.ops.sampling import (
    Dry,
    ParamTable,
    _candidates,
    _on_path,
    logprobs,
    process_logits,
    sample,
)


def batch(slots, indices, *, tokens=None, sees=None, sure=None, starts=None):
    """A held batch of one row per sequence unless told otherwise."""
    count = len(indices)
    starts = starts or list(range(count + 1))
    seq = [s for s in range(len(starts) - 1) for _ in range(starts[s], starts[s + 1])]

    def ints(values):
        return torch.tensor(values, dtype=torch.int32)

    return ForwardBatch(
        phase="held",
        token=ints(tokens or [0] * count),
        index=ints(indices),
        position=ints([indices]),
        seq=ints(seq),
        query_start=ints(starts),
        slot=ints(slots),
        length=ints([0] * len(slots)),
        sure=ints(sure or [1] * len(slots)),
        parent=ints([-1] * count),
        sees=torch.tensor([[value] for value in (sees or [1] * count)]),
        table={},
        wanted=ints(list(range(count))),
    )


def draw(logits, params, times, prompt=()):
    """`times` independent draws from one row of logits: as many positions of one sequence."""
    table = ParamTable(1, len(logits))
    table.take(0, params, prompt, ())
    b = batch([0] * times, list(range(len(prompt), len(prompt) + times)))
    rows = torch.tensor(logits).float().repeat(times, 1)
    step = table.step([0])
    return sample(None, process_logits(None, rows, b, step), b, step).tolist()


def softmax(values):
    top = max(values)
    weights = [math.exp(v - top) for v in values]
    return [w / sum(weights) for w in weights]


def filtered(logits, *, temperature=1.0, top_k=0, typical=1.0, top_p=1.0, min_p=0.0):
    """The law by enumeration, in the documented order."""
    p = softmax([v / temperature for v in logits])

    def keep(allowed):
        nonlocal p
        total = sum(p[i] for i in allowed)
        p = [v / total if i in allowed else 0.0 for i, v in enumerate(p)]

    ranked = sorted(range(len(p)), key=lambda i: -p[i])
    if top_k:
        keep(set(ranked[:top_k]))
    if typical < 1:
        entropy = -sum(v * math.log(v) for v in p if v > 0)
        order = sorted((i for i in range(len(p)) if p[i] > 0), key=lambda i: abs(-math.log(p[i]) - entropy))
        allowed, mass = set(), 0.0
        for i in order:
            if mass >= typical:
                break
            allowed.add(i)
            mass += p[i]
        keep(allowed)
    if top_p < 1:
        allowed, mass = set(), 0.0
        for i in sorted(range(len(p)), key=lambda i: -p[i]):
            if mass >= top_p:
                break
            allowed.add(i)
            mass += p[i]
        keep(allowed)
    if min_p:
        keep({i for i, v in enumerate(p) if v >= min_p * max(p)})
    return p


def chi_square(counts, law, total):
    return sum((counts.get(i, 0) - total * p) ** 2 / (total * p) for i, p in enumerate(law) if p > 0)


LOGITS = [2.0, 1.5, 1.0, 0.7, 0.1, -0.4, -1.0, -3.0]
CASES = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.3},
    {"typical": 0.6},
    {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 1.3, "top_k": 7, "typical": 0.8, "top_p": 0.9},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("head", [4, 256], ids=["full sort", "head"])
def test_draws_follow_the_enumerated_law(case, head, monkeypatch):
    monkeypatch.setattr(sampling, "HEAD", head)
    named = {("typical_p" if key == "typical" else key): value for key, value in case.items()}
    total = 40_000
    counts = Counter(draw(LOGITS, SamplingParams(seed=11, **named), total))
    law = filtered(LOGITS, **case)
    assert set(counts) <= {i for i, p in enumerate(law) if p > 0}
    # 7 degrees of freedom at most: 24.3 is the 0.1 % critical value.
    assert chi_square(counts, law, total) < 24.3


def test_a_head_that_does_not_cover_top_p_falls_back_to_the_whole_vocabulary(monkeypatch):
    monkeypatch.setattr(sampling, "HEAD", 4)
    logits = [0.0] * 64  # flat: the best four hold a sixteenth of the mass
    seen = set(draw(logits, SamplingParams(seed=3, top_p=0.99), 4000))
    assert len(seen) >= 60


def test_temperature_zero_is_argmax_with_the_lowest_id_on_ties():
    assert draw([1.0, 3.0, 3.0, 2.0], SamplingParams(temperature=0.0), 3) == [1, 1, 1]


@pytest.mark.parametrize(
    "asked",
    [
        {"top_p": 0.9},
        {"typical_p": 0.2},
        {"top_k": 2, "min_p": 0.9},
        {"xtc_probability": 1.0, "xtc_threshold": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("too", [False, True], ids=["", "asked of the greedy one too"])
def test_greedy_and_sampled_rows_share_a_batch_without_disturbing_each_other(asked, too):
    table = ParamTable(2, len(LOGITS))
    table.take(0, SamplingParams(temperature=0.0, **(asked if too else {})), [], ())
    table.take(1, SamplingParams(temperature=1.0, seed=5, **asked), [], ())
    rows = torch.tensor([LOGITS, LOGITS])
    both = batch([0, 1], [4, 9])
    step = table.step([0, 1])
    picked = sample(None, process_logits(None, rows, both, step), both, step).tolist()
    alone = batch([1], [9])
    step = table.step([1])
    assert picked == [0, int(sample(None, process_logits(None, rows[1:], alone, step), alone, step))]


def test_a_row_does_not_depend_on_its_neighbours():
    table = ParamTable(3, 300)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 300, generator=generator)
    params = [
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_k=5),
        SamplingParams(seed=3, min_p=0.2, top_p=0.8),
    ]
    for slot, item in enumerate(params):
        table.take(slot, item, [], ())
    together = batch([0, 1, 2], [5, 6, 7])
    step = table.step([0, 1, 2])
    picked = sample(None, process_logits(None, rows, together, step), together, step).tolist()
    for slot in range(3):
        b, step = batch([slot], [5 + slot]), table.step([slot])
        alone = sample(None, process_logits(None, rows[slot : slot + 1], b, step), b, step)
        assert int(alone) == picked[slot]


def test_a_mask_forbids_before_anything_else():
    """Bits of words, the highest too; a bias brings back nothing, and filters see what is left."""
    vocab = 40
    table = ParamTable(2, vocab)
    table.take(0, SamplingParams(temperature=0.0, logit_bias={3: 50.0}), [], ())
    table.take(1, SamplingParams(temperature=1.0, top_k=2, seed=1), [], ())
    words = torch.tensor([[1 << 5 | 1 << 30, 1 << 7], [-(1 << 31), 1]], dtype=torch.int32)
    b, rows = evolve(batch([0, 1], [1, 1]), mask=words), torch.arange(2.0 * vocab).view(2, vocab)
    out = process_logits(None, rows, b, table.step([0, 1]))
    allowed = [(out[row] > -torch.inf).nonzero().flatten().tolist() for row in range(2)]
    assert allowed == [[5, 30, 39], [31, 32]]
    assert out[0, 39] == rows[0, 39]
    picked = [
        sample(None, process_logits(None, rows, evolve(b, index=b.index + n), step), b, step).tolist()
        for n, step in enumerate([table.step([0, 1])] * 20)
    ]
    assert {one for one, _ in picked} == {39}
    assert {other for _, other in picked} <= {31, 32}


def test_a_mask_alone_is_reason_enough():
    table = ParamTable(1, 3)
    table.take(0, SamplingParams(temperature=0.0), [], ())
    b = evolve(batch([0], [1]), mask=torch.tensor([[0b101]], dtype=torch.int32))
    out = process_logits(None, torch.tensor([[1.0, 9.0, 2.0]]), b, table.step([0]))
    assert out.tolist() == [[1.0, -math.inf, 2.0]]


def test_the_input_of_process_logits_is_left_alone():
    table = ParamTable(1, 4)
    table.take(0, SamplingParams(temperature=0.5, logit_bias={1: 5.0}, presence=1.0), [2], ())
    rows = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    before = rows.clone()
    process_logits(None, rows, batch([0], [1]), table.step([0]))
    assert torch.equal(rows, before)


def test_logit_bias_is_added_before_everything():
    assert draw([0.0, 0.0, 1.0], SamplingParams(temperature=0.0, logit_bias={0: 2.0}), 1) == [0]
    assert set(draw([0.0, 0.0, 9.0], SamplingParams(seed=1, logit_bias={2: -100.0}), 500)) == {0, 1}


def test_penalties_by_hand():
    table = ParamTable(1, 5)
    params = SamplingParams(temperature=0.0, repetition=2.0, frequency=0.5, presence=0.25)
    table.take(0, params, [0, 1], ())
    table.count(0, [1, 3, 3])
    rows = torch.tensor([[4.0, -4.0, 1.0, 2.0, 0.0]])
    out = process_logits(None, rows, batch([0], [4]), table.step([0]))
    # repetition over prompt {0, 1} and answer {1, 3}; the others over the answer: 1 once, 3 twice.
    assert out[0].tolist() == [2.0, -8.0 - 0.5 - 0.25, 1.0, 1.0 - 1.0 - 0.25, 0.0]


def test_penalties_count_the_candidates_on_the_path_and_no_others():
    table = ParamTable(1, 4)
    table.take(0, SamplingParams(temperature=0.0, frequency=1.0), [0], ())
    table.count(0, [1])
    # rows: anchor 1, candidates 2 and 3 behind it (siblings), then 2 behind the first
    b = batch([0], [1, 2, 2, 3], tokens=[1, 2, 3, 2], sees=[0b1, 0b11, 0b101, 0b1011], starts=[0, 4])
    out = process_logits(None, torch.zeros(4, 4), b, table.step([0]))
    assert out.tolist() == [
        [0.0, -1.0, 0.0, 0.0],
        [0.0, -1.0, -1.0, 0.0],
        [0.0, -1.0, 0.0, -1.0],
        [0.0, -1.0, -2.0, 0.0],
    ]


def test_a_slot_taken_again_starts_without_the_counts_of_the_last_sequence():
    table = ParamTable(1, 3)
    table.take(0, SamplingParams(temperature=0.0, frequency=1.0), [0], ())
    table.count(0, [2, 2])
    table.take(0, SamplingParams(temperature=0.0, frequency=1.0), [1], ())
    out = process_logits(None, torch.zeros(1, 3), batch([0], [1]), table.step([0]))
    assert out.tolist() == [[0.0, 0.0, 0.0]]


def test_a_bias_is_that_of_its_own_slot_and_text():
    table = ParamTable(2, 3)
    table.take(0, SamplingParams(temperature=0.0, logit_bias={0: 2.0, 1: 1.0}), [], ())
    table.take(1, SamplingParams(temperature=0.0), [], ())
    both = table.step([0, 1])
    assert process_logits(None, torch.zeros(2, 3), batch([0, 1], [1, 1]), both).tolist() == [
        [2.0, 1.0, 0.0],
        [0.0, 0.0, 0.0],
    ]
    table.take(0, SamplingParams(temperature=0.0, presence=1.0), [], ())
    table.take(1, SamplingParams(temperature=0.0, logit_bias={2: 5.0}), [], ())
    out = process_logits(None, torch.zeros(2, 3), batch([0, 1], [1, 1]), table.step([0, 1]))
    assert out.tolist() == [[0.0, 0.0, 0.0], [0.0, 0.0, 5.0]]


def test_a_slot_that_asked_for_less_is_left_alone_beside_one_that_asked_for_more():
    table = ParamTable(2, 4)
    table.take(0, SamplingParams(temperature=0.0, repetition=2.0, min_tokens=5), [0], [3])
    table.take(1, SamplingParams(temperature=0.0, frequency=1.0), [0], [3])
    table.count(1, [2])
    rows = torch.tensor([[4.0, 4.0, 4.0, 4.0]]).repeat(2, 1)
    out = process_logits(None, rows, batch([0, 1], [1, 1]), table.step([0, 1]))
    assert out.tolist() == [[2.0, 4.0, 4.0, -math.inf], [4.0, 4.0, 3.0, 4.0]]


def test_tokens_that_a_step_has_counted_are_not_counted_again():
    table = ParamTable(1, 3)
    table.take(0, SamplingParams(temperature=0.0, frequency=1.0, dry_multiplier=1.0), [0], ())
    table.count(0, [1])
    table.count(0, [1, 2], noted=True)
    assert table.dry[0].text == [0, 1, 1, 2]
    assert table.step([0]).counted.tolist() == [[PROMPTED, EMITTED, 0]]


def test_no_marks_are_kept_for_who_does_not_ask():
    table = ParamTable(1, 3)
    table.take(0, SamplingParams(temperature=0.7, top_p=0.9), [0], [2])
    table.count(0, [1])
    assert table.marks.table is None
    assert table.bias is None
    assert table.step([0]).counted is None


@given(st.data())
def test_candidates_on_a_path_are_those_a_row_sees(data):
    """Any trees, also wider than one word of `sees`."""
    trees = []
    for slot in range(data.draw(st.integers(1, 3))):
        count = data.draw(st.integers(1, 70))
        parents = [-1, *(data.draw(st.integers(0, n)) for n in range(count - 1))]
        tokens = data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
        trees.append(RowSet(slot, 9, tokens, {}, parents=parents, sure=1))
    b = make_batch("held", trees)
    counts = torch.zeros(len(b.wanted), 6, dtype=torch.int32).scatter_add_(1, *_on_path(b))
    assert counts.tolist() == [[path.count(token) for token in range(6)] for path in _candidates(b)]


def test_an_end_beyond_the_vocabulary_is_no_matter():
    table = ParamTable(1, 3)
    table.take(0, SamplingParams(temperature=0.0, min_tokens=2), [0], ending=[1, 3, 900])
    out = process_logits(None, torch.zeros(1, 3), batch([0], [0]), table.step([0]))
    assert out.tolist() == [[0.0, -math.inf, 0.0]]


def test_min_tokens_forbids_the_ending_ids_until_then():
    table = ParamTable(1, 3)
    table.take(0, SamplingParams(temperature=0.0, min_tokens=2), [0, 0], ending=[2])
    rows = torch.tensor([[0.0, 1.0, 9.0]]).repeat(3, 1)
    b = batch([0, 0, 0], [1, 2, 3])  # rows that emit tokens 2, 3 and 4: the answer's first, second and third
    step = table.step([0])
    assert sample(None, process_logits(None, rows, b, step), b, step).tolist() == [1, 1, 2]


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_every_unsigned_64_bit_seed_is_taken(seed):
    assert draw(LOGITS, SamplingParams(seed=seed), 50) == draw(LOGITS, SamplingParams(seed=seed), 50)


def test_logprobs_are_the_models_own():
    rows = torch.tensor([LOGITS])
    own, values, ids = logprobs(None, rows, torch.tensor([3]), 2)
    law = softmax(LOGITS)
    assert own[0] == pytest.approx(math.log(law[3]), abs=1e-5)
    assert ids[0].tolist() == [0, 1]
    assert values[0].tolist() == pytest.approx([math.log(law[0]), math.log(law[1])], abs=1e-5)


# --- top-n-sigma, XTC, DRY

TOTAL = 40_000


def law_of(kept):
    whole = softmax(LOGITS)
    mass = sum(whole[i] for i in kept)
    return [p / mass if i in kept else 0.0 for i, p in enumerate(whole)]


@pytest.mark.parametrize("n", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_top_n_sigma_keeps_what_is_near_the_best_whatever_the_temperature(n, temperature):
    mean = sum(LOGITS) / len(LOGITS)
    sigma = math.sqrt(sum((v - mean) ** 2 for v in LOGITS) / len(LOGITS))
    kept = {i for i, v in enumerate(LOGITS) if v >= max(LOGITS) - n * sigma}
    drawn = set(draw(LOGITS, SamplingParams(seed=1, top_n_sigma=n, temperature=temperature), 5000))
    assert drawn == kept


def test_top_n_sigma_counts_forbidden_tokens_in_nothing():
    logits = [*LOGITS, -math.inf, -math.inf]
    params = SamplingParams(seed=1, top_n_sigma=1.0)
    assert set(draw(logits, params, 3000)) == set(draw(LOGITS, params, 3000))


@pytest.mark.parametrize("head", [4, 256])
def test_xtc_removes_all_top_choices_but_the_last_as_often_as_it_should(head, monkeypatch):
    monkeypatch.setattr(sampling, "HEAD", head)
    threshold, probability = 0.15, 0.4
    whole = softmax(LOGITS)
    top = [i for i, p in enumerate(whole) if p >= threshold]
    assert len(top) >= 2
    cut = law_of(set(range(len(LOGITS))) - set(top[:-1]))
    law = [probability * c + (1 - probability) * w for c, w in zip(cut, whole, strict=True)]
    params = SamplingParams(seed=9, xtc_probability=probability, xtc_threshold=threshold)
    assert chi_square(Counter(draw(LOGITS, params, TOTAL)), law, TOTAL) < 24.3


def test_xtc_leaves_a_single_top_choice_alone():
    params = SamplingParams(seed=9, xtc_probability=1.0, xtc_threshold=0.35)
    assert chi_square(Counter(draw(LOGITS, params, TOTAL)), softmax(LOGITS), TOTAL) < 24.3


def test_xtc_works_on_what_the_filters_left():
    params = SamplingParams(seed=9, xtc_probability=1.0, xtc_threshold=0.3, top_k=2)
    assert set(draw(LOGITS, params, 2000)) == {1}


def test_xtc_removes_of_what_typical_p_left_though_likelier_ones_are_gone():
    """Of 0.3, 0.2, 0.15, 0.12, .. the second to the fourth are typical: 0.43, 0.32, 0.26 of what is left."""
    logits = [math.log(p) for p in (0.3, 0.2, 0.15, 0.12, 0.1, 0.08, 0.05)]
    assert set(draw(logits, SamplingParams(seed=9, typical_p=0.4), 500)) == {1, 2, 3}
    params = SamplingParams(seed=9, typical_p=0.4, xtc_probability=1.0, xtc_threshold=0.3)
    assert set(draw(logits, params, 500)) == {2, 3}


def dry_by_definition(text, multiplier, base, allowed, breakers):
    """For every token: the longest newest sequence that it would continue as some earlier place did."""
    found = {}
    for token in set(text) - breakers:
        best = 0
        for n in range(1, len(text)):
            suffix = text[-n:]
            if set(suffix) & breakers:
                break
            if any(text[i : i + n] == suffix and text[i + n] == token for i in range(len(text) - n)):
                best = n
        if best >= allowed and best > 0:
            found[token] = multiplier * base ** (best - allowed)
    return found


@given(
    st.lists(st.integers(0, 3), max_size=24),
    st.lists(st.integers(0, 3), max_size=4),
    st.integers(1, 4),
    st.frozensets(st.integers(0, 3), max_size=1),
)
def test_dry_penalizes_by_its_definition(prompt, path, allowed, breakers):
    params = SamplingParams(
        dry_multiplier=0.5, dry_base=1.5, dry_allowed_length=allowed, dry_breakers=breakers
    )
    expected = dry_by_definition([*prompt, *path], 0.5, 1.5, allowed, set(breakers))
    assert Dry(params, prompt).penalties(path) == pytest.approx(expected)


def test_dry_looks_at_its_range_only():
    text = [1, 2, 3, 9, 9, 1, 2]
    params = SamplingParams(dry_multiplier=1.0, dry_allowed_length=2)
    assert Dry(params, text).penalties([]) == {3: 1.0}
    near = SamplingParams(dry_multiplier=1.0, dry_allowed_length=2, dry_range=4)
    assert Dry(near, text).penalties([]) == {}


def test_a_long_loop_costs_linear_time_and_stays_finite():
    params = SamplingParams(dry_multiplier=1.0)
    (penalty,) = Dry(params, [7] * 50_000).penalties([]).values()
    assert math.isfinite(penalty)


def test_dry_follows_the_text_and_the_candidates_of_a_row():
    table = ParamTable(1, 6)
    table.take(0, SamplingParams(temperature=0.0, dry_multiplier=100.0, dry_allowed_length=1), [1, 2, 3], ())
    table.count(0, [1])
    # anchor 1 would go on with 2; behind candidate 2 it would go on with 3
    b = batch([0], [3, 4], tokens=[1, 2], sees=[0b1, 0b11], starts=[0, 2])
    step = table.step([0])
    logits = torch.tensor([[0.0, 0.0, 9.0, 8.0, 7.0, 0.0]]).repeat(2, 1)
    assert sample(None, process_logits(None, logits, b, step), b, step).tolist() == [3, 2]


def test_a_slot_without_dry_forgets_the_one_before():
    table = ParamTable(1, 4)
    table.take(0, SamplingParams(temperature=0.0, dry_multiplier=9.0), [1, 2, 1], ())
    table.take(0, SamplingParams(temperature=0.0), [1, 2, 1], ())
    assert table.dry == [None]
