"""The documented order of transforms, all of them at once, against plain Python that applies one by one."""

import itertools
import math
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from luce_core.contracts import ForwardBatch, SamplingParams
from luce_core.ops.sampling import ParamTable, logprobs, process_logits, sample

VOCAB, END, DRAWS = 14, 0, 60_000
PROMPT, ANSWER = [3, 5, 8, 5], [7, 3, 5]
PARAMS = SamplingParams(
    temperature=1.4,
    top_k=7,
    top_p=0.85,
    min_p=0.25,
    typical_p=0.9,
    repetition=1.5,
    frequency=0.4,
    presence=0.3,
    top_n_sigma=1.6,
    xtc_probability=1.0,
    xtc_threshold=0.12,
    dry_multiplier=0.7,
    dry_allowed_length=1,
    logit_bias={4: 1.5, 5: 2.0},
    min_tokens=10**6,
    seed=3,
)


def probabilities(logits):
    top = max(logits)
    weights = [math.exp(value - top) for value in logits]
    return [weight / sum(weights) for weight in weights]


def kept(logits, alive):
    return [value if token in alive else -math.inf for token, value in enumerate(logits)]


def living(logits):
    return [token for token, value in enumerate(logits) if value > -math.inf]


def bias(logits):
    return [value + PARAMS.logit_bias.get(token, 0.0) for token, value in enumerate(logits)]


def repetition(logits):
    def one(token, value):
        if token not in (*PROMPT, *ANSWER):
            return value
        return value / PARAMS.repetition if value > 0 else value * PARAMS.repetition

    return [one(token, value) for token, value in enumerate(logits)]


def frequency_and_presence(logits):
    counts = Counter(ANSWER)
    return [
        value - PARAMS.frequency * counts[token] - PARAMS.presence * (counts[token] > 0)
        for token, value in enumerate(logits)
    ]


def dry(logits):
    """The text 3 5 8 5 7 3 5 ends with "3 5" as its beginning does: 8 is penalized for 2, 7 for 1."""
    penalties = {8: PARAMS.dry_multiplier * PARAMS.dry_base, 7: PARAMS.dry_multiplier}
    return [value - penalties.get(token, 0.0) for token, value in enumerate(logits)]


def minimum_length(logits):
    return kept(logits, set(range(VOCAB)) - {END})


def top_n_sigma(logits):
    finite = [logits[token] for token in living(logits)]
    mean = sum(finite) / len(finite)
    sigma = math.sqrt(sum((value - mean) ** 2 for value in finite) / len(finite))
    return kept(logits, {t for t in living(logits) if logits[t] >= max(finite) - PARAMS.top_n_sigma * sigma})


def temperature(logits):
    return [value / PARAMS.temperature for value in logits]


def top_k(logits):
    return kept(logits, set(sorted(living(logits), key=lambda token: -logits[token])[: PARAMS.top_k]))


def up_to(order, p, mass):
    alive, total = set(), 0.0
    for token in order:
        if total >= mass:
            break
        alive.add(token)
        total += p[token]
    return alive


def typical_p(logits):
    p = probabilities(logits)
    entropy = -sum(p[token] * math.log(p[token]) for token in living(logits))
    order = sorted(living(logits), key=lambda token: abs(-math.log(p[token]) - entropy))
    return kept(logits, up_to(order, p, PARAMS.typical_p))


def top_p(logits):
    p = probabilities(logits)
    return kept(logits, up_to(sorted(living(logits), key=lambda token: -p[token]), p, PARAMS.top_p))


def min_p(logits):
    p = probabilities(logits)
    return kept(logits, {token for token in living(logits) if p[token] >= PARAMS.min_p * max(p)})


def xtc(logits):
    p = probabilities(logits)
    top = sorted((t for t in living(logits) if p[t] >= PARAMS.xtc_threshold), key=lambda token: -p[token])
    return kept(logits, set(living(logits)) - set(top[:-1]))


ORDER = {
    "logit bias": bias,
    "repetition penalty": repetition,
    "frequency and presence penalties": frequency_and_presence,
    "DRY": dry,
    "minimum length": minimum_length,
    "top-n-sigma": top_n_sigma,
    "temperature": temperature,
    "top-k": top_k,
    "typical-p": typical_p,
    "top-p": top_p,
    "min-p": min_p,
    "XTC": xtc,
}
COMMUTE = [
    ("frequency and presence penalties", "DRY"),  # both subtract
    ("DRY", "minimum length"),
    ("top-n-sigma", "temperature"),  # sigma grows with what it is compared to
    ("temperature", "top-k"),
]


def law(logits, order):
    for name in order:
        logits = ORDER[name](logits)
    return probabilities(logits)


def some_logits(seed):
    rng = random.Random(seed)
    return [rng.gauss(0.5, 1.3) for _ in range(VOCAB)]


def drawn(logits, times):
    """Draws at as many places of one text, by the ops."""
    table = ParamTable(1, VOCAB)
    table.take(0, PARAMS, PROMPT, [END])
    table.count(0, ANSWER)

    def ints(values):
        return torch.tensor(values, dtype=torch.int32)

    batch = ForwardBatch(
        phase="held",
        token=ints([0] * times),
        index=ints(range(times)),
        position=ints([[0] * times]),
        seq=ints(range(times)),
        query_start=ints(range(times + 1)),
        slot=ints([0] * times),
        length=ints([0] * times),
        sure=ints([1] * times),
        parent=ints([-1] * times),
        sees=torch.ones(times, 1, dtype=torch.int64),
        table={},
        wanted=ints(range(times)),
    )
    rows = torch.tensor(logits).repeat(times, 1)
    step = table.step([0])
    return Counter(sample(None, process_logits(None, rows, batch, step), batch, step).tolist())


def swapped():
    names = list(ORDER)
    for place, pair in enumerate(itertools.pairwise(names)):
        if pair not in COMMUTE:
            yield pair, [*names[:place], pair[1], pair[0], *names[place + 2 :]]


SEEDS = (14, 77, 17)  # rows of logits in which every two neighbours matter


@pytest.mark.parametrize("seed", SEEDS)
def test_all_transforms_together_give_the_law_of_the_documented_order(seed):
    logits = some_logits(seed)
    expected = law(logits, ORDER)
    counts = drawn(logits, DRAWS // len(SEEDS))
    assert set(counts) <= {token for token, p in enumerate(expected) if p > 0}
    total = sum(counts.values())
    square = sum((counts[t] - total * p) ** 2 / (total * p) for t, p in enumerate(expected) if p > 0)
    assert square < 32.9  # 12 degrees of freedom at most: the 0.1 % critical value


@pytest.mark.parametrize("order", [pytest.param(order, id=" / ".join(pair)) for pair, order in swapped()])
def test_the_test_above_would_notice_two_neighbours_changing_places(order):
    def distance(seed):
        logits = some_logits(seed)
        return sum(abs(a - b) for a, b in zip(law(logits, ORDER), law(logits, order), strict=True))

    assert max(distance(seed) for seed in SEEDS) > 0.1


@pytest.mark.parametrize("page", ["docs/request.md", "docs/architecture.md", "luce_core/ops/sampling.py"])
def test_every_page_that_names_the_order_names_this_one(page):
    text = " ".join((Path(__file__).parents[2] / page).read_text().split())
    found = re.search(r"(?i)order of transforms.*?: (mask of a constraint.*?argmax)", text)
    assert found, page
    named = [re.sub(r" \(.*?\)", "", part).strip() for part in re.split(r", (?![^(]*\))", found[1])]
    assert named == ["mask of a constraint", *ORDER, "noise", "argmax"]


def test_reported_log_probabilities_are_those_before_all_of_it():
    logits = some_logits(1)
    own, values, _ = logprobs(None, torch.tensor([logits]), torch.tensor([5]), 3)
    p = probabilities(logits)
    assert float(own) == pytest.approx(math.log(p[5]), abs=1e-5)
    assert values[0].tolist() == pytest.approx(sorted(map(math.log, p), reverse=True)[:3], abs=1e-5)
