"""What ends a step and begins the next, beside the reference: picks, noise, ends of texts."""

from __future__ import annotations

import math
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from attrs import evolve
from luce_backend_triton import nucleus, picks
from luce_backend_triton.capability import Ability

from luce_core.contracts import SamplingParams
from luce_core.model.batch import RowSet, make_batch
from luce_core.ops import newest as reference
from luce_core.ops import sampling
from luce_core.ops.newest import AHEAD, MOST_ENDS, NewestTokens
from luce_core.ops.sampling import ParamTable

VOCAB = 5000
SLOTS = 6


def batch(device, slots=(3, 0, 5), rows=2):
    """Rows of each sequence; all but the first of all are wanted."""
    count = len(slots) * rows
    numbers = {
        "seq": torch.arange(count) // rows,
        "slot": torch.tensor(slots),
        "index": torch.arange(count) * 7,
        "wanted": torch.arange(1, count),
    }
    numbers = {name: each.to(device, torch.int32) for name, each in numbers.items()}
    return SimpleNamespace(**numbers, mask=None)


def table(device, *params):
    made = ParamTable(SLOTS, VOCAB, device)
    for slot, one in enumerate(params):
        made.take(slot, one, [1, 2], [])
    return made


def logits(device, rows=5, vocab=VOCAB):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)).to(device)


GREEDY = SamplingParams(temperature=0.0)
WARM = [SamplingParams(temperature=0.5 + 0.2 * n, seed=n + (n << 40)) for n in range(SLOTS)]


MIXED = [*WARM[:3], *[GREEDY] * 3]


@pytest.mark.parametrize("params", [[GREEDY] * SLOTS, WARM, MIXED], ids=["0", "all", "some"])
def test_picks_are_those_of_the_reference(device, params):
    b, of = batch(device), table(device, *params)
    step = of.step(range(SLOTS))
    want = sampling.sample(None, logits(device), b, step)
    got = picks.sample(None, logits(device), b, step)
    assert got.dtype is torch.int64
    assert got.equal(want)


def test_noise_decides_where_logits_are_alike(device):
    """Equal logits, so the largest noise is picked: five seeds, five tokens."""
    b, of = batch(device), table(device, *WARM)
    flat = torch.zeros(5, VOCAB, device=device)
    got = picks.sample(None, flat, b, of.step(range(SLOTS)))
    assert got.equal(sampling.sample(None, flat, b, of.step(range(SLOTS))))
    assert len(set(got.tolist())) == 5


def test_a_floor_under_what_can_be_picked(device):
    strict = [SamplingParams(temperature=5.0, min_p=1.0, seed=n) for n in range(SLOTS)]
    b, rows = batch(device), logits(device)
    assert picks.sample(None, rows, b, table(device, *strict).step(range(SLOTS))).equal(rows.argmax(1))
    loose = table(device, *[SamplingParams(temperature=1.0, min_p=0.2, seed=n) for n in range(SLOTS)])
    step = loose.step(range(SLOTS))
    assert picks.sample(None, rows, b, step).equal(sampling.sample(None, rows, b, step))


def test_the_lowest_of_equals_also_across_parts_and_where_nothing_is_possible(device):
    """Whatever is in the rows, what is picked is a token."""
    rows = torch.full((5, VOCAB), -1.0, device=device)
    rows[0, [4999, 1700, 40]] = 2.0
    rows[1, [4999, 4998]] = 2.0
    rows[2] = -torch.inf
    rows[3, 1:], rows[3, 0], rows[4] = torch.nan, -torch.inf, torch.nan
    step = table(device, GREEDY).step([0])
    assert picks.sample(None, rows, batch(device), step).tolist() == [40, 4998, 0, 0, 0]


@pytest.mark.parametrize("vocab", [1, 1023, 1025])
def test_any_vocabulary(device, vocab):
    rows = logits(device, 5, vocab)
    assert picks.sample(None, rows, batch(device), table(device, GREEDY).step([0])).equal(rows.argmax(1))


PARTS = (0.5, 0.9, 0.99, 1, 1e-6, 0.3)
NUCLEUS = [SamplingParams(temperature=1.0, top_p=p, seed=n) for n, p in enumerate(PARTS)]


@pytest.mark.parametrize(
    ("spread", "more"), [(1.0, {}), (6.0, {"min_p": 0.02}), (3.0, {"temperature": 0.0})], ids=repr
)
def test_the_nucleus_is_that_of_the_reference(device, spread, more):
    """Whatever the noise; `more`: of every other row."""
    params = [evolve(one, **more) if n % 2 else one for n, one in enumerate(NUCLEUS)]
    of, rows = table(device, *params), logits(device, 6, 3000) * spread
    b = batch(device, tuple(range(6)), 1)
    b.wanted = torch.arange(6, dtype=torch.int32, device=device)
    for index in range(2):
        b.index.fill_(index)
        step = of.step(range(6))
        assert picks.sample(None, rows, b, step).equal(sampling.sample(None, rows, b, step))


def test_a_row_alone_is_picked_for_as_beside_others(device):
    of, rows = table(device, *NUCLEUS), logits(device, 6, 2500)
    b = batch(device, tuple(range(6)), 1)
    b.wanted = torch.arange(6, dtype=torch.int32, device=device)
    together = picks.sample(None, rows, b, of.step(range(6)))
    b.wanted = b.wanted[3:4]
    assert picks.sample(None, rows[3:4], b, of.step(range(6))).equal(together[3:4])


def test_of_equal_logits_at_the_cut_the_lowest_ids_are_kept(device):
    """Of 2,000 alike half are: any of them is picked, none behind; nobody reaches what lies below."""
    rows = torch.zeros(6, 2400, device=device)
    rows[:, 2000:] = -50.0
    step = table(device, *[SamplingParams(temperature=1.0, top_p=0.5, seed=n) for n in range(6)]).step([0])
    b = batch(device, tuple(range(6)), 1)
    b.wanted = torch.arange(6, dtype=torch.int32, device=device)
    got = picks.sample(None, rows, b, step)
    assert got.equal(sampling.sample(None, rows, b, step))
    assert int(got.max()) < 1000
    assert len(set(got.tolist())) == 6


def test_the_nucleus_of_rows_in_which_hardly_anything_is_possible(device):
    rows = torch.full((2, 3000), -torch.inf, device=device)
    rows[0, 1234] = -7.0
    rows[1, [5, 2999]] = torch.tensor([1e30, -1e30], device=device)
    b = batch(device, (0, 1), 1)
    b.wanted = torch.arange(2, dtype=torch.int32, device=device)
    assert picks.sample(None, rows, b, table(device, *NUCLEUS[:2]).step([0, 1])).tolist() == [1234, 5]


COMPARED = pytest.mark.parametrize(("listed", "counted"), [(256, 0), (256, 4096), (1024, 4096)])
"""Columns in one go, and how many are compared with each other: else one program searches them. Passes go on
until no more than half as many are in the range.
"""


@COMPARED
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_a_range_of_any_number_of_candidates_is_searched(device, monkeypatch, listed, counted, scale):
    """Also more than one go holds; values lie close together, far apart, and in ties."""
    monkeypatch.setattr(nucleus, "LISTED", listed)
    monkeypatch.setattr(nucleus, "COUNTED", counted)
    monkeypatch.setattr(nucleus, "ENOUGH", counted // 2)
    rows = (logits(device, 6, 2000) * scale).mul(64).round().div(64)
    rows[0, 17], rows[1, 5:900], rows[2, 700] = torch.inf, -torch.inf, torch.nan
    of = table(device, *NUCLEUS)
    b = batch(device, tuple(range(6)), 1)
    b.wanted = torch.arange(6, dtype=torch.int32, device=device)
    got = picks.sample(None, rows, b, of.step(range(6)))
    rows[2, 700] = -torch.inf
    rows[0] = torch.where(rows[0] == torch.inf, 0.0, -torch.inf)
    assert got.equal(sampling.sample(None, rows, b, of.step(range(6))))


@pytest.mark.parametrize(("scale", "shift"), [(0.001, 3.0), (0.3, 0.0), (1.0, 0.0), (1.0, -7.0), (4.0, 2.0)])
def test_a_cut_leaves_the_mass_that_was_asked_for(device, scale, shift):
    """Not one less and not one more, in float64, up to what sums in f32 tell. Cuts lie anywhere: also
    among values about zero.
    """
    shares, vocab = torch.tensor([0.01, 0.3, 0.6, 0.8, 0.9, 0.99, 0.9999, 0.5], device=device), 3000
    rows = logits(device, 8, vocab) * scale + shift
    kept = kept_of(rows, search_of(shares))
    order = rows.double().sort(descending=True, stable=True)
    masses = order.values.softmax(-1)
    for row, (share, count) in enumerate(zip(shares.tolist(), kept.sum(-1).tolist(), strict=True)):
        assert kept[row, order.indices[row, :count]].all()
        mass = float(masses[row, :count].sum())
        assert mass >= share - 1e-6
        assert mass - float(masses[row, count - 1]) < share + 1e-6


def test_a_long_row_of_masses_that_f32_cannot_add_up(device):
    rows = torch.linspace(0.0, -9.0, 1 << 17, device=device)[None].contiguous()
    share = torch.tensor([0.999], device=device)
    count = int(kept_of(rows, search_of(share)).sum())
    masses = rows.double().softmax(-1)
    assert abs(count - int((masses.cumsum(1) - masses < share).sum())) <= 2


@pytest.mark.parametrize("spread", [0.5, 1.0, 1.4])
def test_few_lie_in_the_range_that_is_searched_wherever_the_cut_is(device, spread):
    """Also about zero: rows a little apart, so that ranges end at any place there."""
    shifts = torch.linspace(-1.2, 0.3, 16, device=device)[:, None]
    rows = logits(device, 1, 3000) * spread
    rows = (rows - rows.double().softmax(-1).mul(rows).sum().float() + shifts).contiguous()
    search = search_of(torch.full((16,), 0.8, device=device))
    kept = kept_of(rows, search)
    assert (kept.sum(-1) == kept[0].sum()).all()
    assert int(search.found.min()) > 0
    assert int(search.found.max()) < 60, "half a nat holds 500, of which the second pass leaves a part"


def search_of(shares):
    """Of rows with top-p."""
    made = nucleus.Search.of(len(shares), 1, shares.device)
    for numbers in (made.above, made.found, made.sums, made.limits):
        numbers.zero_()
    made.cuts.fill_(-(1 << 63))
    made.cuts[2] = (1 << 63) - 1
    return evolve(made, shares=shares[None])


def kept_of(rows, search, filters=frozenset({"top_p"})):
    """What the cut of top-p leaves of each row, as bool: all without."""
    tops, told = rows.amax(1, keepdim=True), picks._told(rows)
    nucleus.find_cuts(rows, tops, search, filters, told)
    return kept_at(rows, search.cuts[2])


def kept_at(rows, cuts):
    cut, last = cuts >> 32, 0x7FFFFFFF - (cuts & 0xFFFFFFFF)
    bits = (rows + 0.0).view(torch.int32)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    places = torch.arange(rows.shape[1], device=rows.device)[None]
    return (key > cut[:, None]) | ((key == cut[:, None]) & (places <= last[:, None]))


SPREADS = (1e-3, 1e-2, 0.3, 1.0, 4.0, 30.0, 60.0, 1000.0)
"""From 30 on the 20th lies more than 31 nats below the best, in the last range of the first pass."""


@pytest.mark.parametrize("wanted", [{"top_k": 20}, {"top_p": 0.95}, {"top_k": 20, "top_p": 0.95}], ids=repr)
def test_few_are_listed_however_alike_or_far_apart_logits_are(device, wanted):
    """Also of those far below a forced token. Where two passes are enough others add nothing."""
    rows = logits(device, 9, 8_000) * torch.tensor([*SPREADS, 0.3], device=device)[:, None]
    rows[8, 777] = 100.0
    search = search_of(torch.full((9,), wanted.get("top_p", 1.0), device=device))
    if "top_k" in wanted:
        search.limits.fill_(wanted["top_k"])
        search.cuts[0] = (1 << 63) - 1
    kept = kept_of(rows, search, frozenset(wanted))
    assert int(search.found.max()) <= nucleus.ENOUGH + wanted.get("top_k", 0)
    assert "top_p" not in wanted or int(kept.sum(-1).min()) > 0
    assert not search.above[0, 2:, 4].any()
    if "top_k" in wanted:
        best = torch.zeros_like(kept).scatter_(1, rows.topk(20).indices, value=True)
        assert kept_at(rows, search.cuts[0]).equal(best)


def test_of_more_equal_logits_than_are_compared_the_lowest_ids_are_kept(device):
    """Two better ones and 6,000 alike. Top-k takes ten of those, top-p four: of 2.57 + 10 half is 6.28."""
    rows = torch.full((3, 9000), -1.0, device=device)
    rows[:, 3000:] = torch.tensor([[0.0], [7.25], [-0.5]], device=device)
    rows[:, [3500, 8000]] += 0.25
    search = search_of(torch.full((3,), 0.5, device=device))
    search.limits.fill_(12)
    search.cuts[0] = (1 << 63) - 1
    likely = kept_of(rows, search, frozenset({"top_k", "top_p"}))
    assert int(search.found.min()) > nucleus.COUNTED
    for best, nucleus_of in zip(kept_at(rows, search.cuts[0]), likely, strict=True):
        assert best.nonzero()[:, 0].tolist() == [*range(3000, 3010), 3500, 8000]
        assert nucleus_of.nonzero()[:, 0].tolist() == [*range(3000, 3004), 3500, 8000]


# --- before the filters


TEXT = [7, 9, 9, 4999, 31]
ASKED = {
    "bias": {"logit_bias": {0: 1.5, 4999: -3.0, 1500: 100.0}},
    "repetition": {"repetition": 1.3},
    "counts": {"frequency": 0.37, "presence": -0.61},
    "min_tokens": {"min_tokens": 40},
    "temperature": {"temperature": 0.7},
}
ASKED["all"] = {key: value for one in ASKED.values() for key, value in one.items()}


def asked_of(device, **asked):
    """Every other slot asks for it."""
    made = ParamTable(SLOTS, VOCAB, device)
    for slot in range(SLOTS):
        more = {"temperature": 0.0, **(asked if slot % 2 else {})}
        made.take(slot, SamplingParams(**more), [1, 2, 4998], [5, 2, 4096])
        made.count(slot, TEXT)
    return made


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_what_comes_before_the_filters_has_the_bits_of_the_reference(device, asked):
    of, rows = asked_of(device, **asked), logits(device, 4)
    trees = [RowSet(3, 20, [31, 9, 8, 9], {}, parents=[-1, 0, 0, 1]), RowSet(0, 60, [31], {})]
    trees = [*trees, RowSet(5, 50, [31, 9], {}, parents=[-1, 0])]
    for b in (make_batch("held", trees, device=device), make_batch("held", trees[1:2], device=device)):
        rows = logits(device, len(b.wanted))
        rows[0, 77] = -torch.inf
        before, step = rows.clone(), of.step(range(SLOTS))
        got = picks.process_logits(None, rows, b, step)
        assert rows.equal(before)
        assert got.equal(sampling.process_logits(None, rows, b, step))
        assert len(b.wanted) == 1 or not got.equal(rows)


@pytest.mark.parametrize("asked", [{}, *ASKED.values()], ids=["nothing", *ASKED])
def test_masks_have_the_bits_of_the_reference(device, asked):
    of, rows = asked_of(device, **asked), logits(device, 5)
    words = np.random.default_rng(3).integers(0, 1 << 32, (4, -(-VOCAB // 32)), np.uint32)
    trees = [RowSet(3, 20, [31, 9, 8, 9], {}, parents=[-1, 0, 0, 1], mask=words), RowSet(0, 60, [31], {})]
    b, before, step = make_batch("held", trees, device=device), rows.clone(), of.step(range(SLOTS))
    got, wanted = (way.process_logits(None, rows, b, step) for way in (picks, sampling))
    assert got.equal(wanted)
    assert rows.equal(before)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB]
    forbidden = got[:4].cpu().numpy() == -np.inf
    assert (forbidden | bits.astype(bool)).all()
    assert bool(picks.sample(None, got, b, step).equal(sampling.sample(None, wanted, b, step)))


@pytest.mark.parametrize("asked", [{"top_n_sigma": 1.0, "temperature": 1.0}, {"dry_multiplier": 0.5}])
def test_all_of_it_is_the_references_where_some_is(device, monkeypatch, asked):
    called = []
    monkeypatch.setattr(sampling, "process_logits", lambda *args: called.append(args))
    of = table(device, SamplingParams(repetition=1.2, **asked))
    picks.process_logits(None, logits(device), batch(device), of.step([0]))
    assert called


def test_what_nobody_asked_for_costs_nothing(device):
    rows = logits(device)
    step = table(device, GREEDY).step([0])
    assert picks.process_logits(None, rows, batch(device), step) is rows


@COMPARED
@pytest.mark.parametrize("more", [{}, {"top_p": 0.8}, {"top_p": 0.5, "min_p": 0.1}, {"top_p": 0.99999994}])
def test_the_best_few_are_those_of_the_reference(device, monkeypatch, listed, counted, more):
    """Few, many, all but one, as many as there are; beside a row without a limit."""
    monkeypatch.setattr(nucleus, "LISTED", listed)
    monkeypatch.setattr(nucleus, "COUNTED", counted)
    monkeypatch.setattr(nucleus, "ENOUGH", counted // 2)
    numbers = (1, 20, 300, 1499, 1500, 0)
    of = table(device, *[SamplingParams(seed=n, top_k=k, **more) for n, k in enumerate(numbers)])
    b, rows = batch(device, tuple(range(6)), 1), logits(device, 6, 1500)
    b.wanted = torch.arange(6, dtype=torch.int32, device=device)
    for index in range(2):
        b.index.fill_(index)
        step = of.step(range(6))
        assert picks.sample(None, rows, b, step).equal(sampling.sample(None, rows, b, step))


def test_of_equal_logits_at_the_limit_the_lowest_ids_are_kept(device):
    """Of two better ones and 1,500 alike ten: of e + e + 8 = 13.4 half takes the two and two more of them."""
    rows = torch.zeros(6, 1502, device=device)
    rows[:, [700, 1400]] = 1.0
    search = search_of(torch.full((1,), 0.5, device=device))
    search.limits.fill_(10)
    search.cuts[0] = (1 << 63) - 1
    (likely,) = kept_of(rows[:1], search, frozenset({"top_k", "top_p"}))
    (best,) = kept_at(rows[:1], search.cuts[0])
    assert best.nonzero()[:, 0].tolist() == [*range(8), 700, 1400]
    assert likely.nonzero()[:, 0].tolist() == [0, 1, 700, 1400]
    step = table(device, *[SamplingParams(seed=n, top_k=10) for n in range(6)]).step(range(6))
    b = batch(device, tuple(range(6)), 1)
    b.wanted = torch.arange(6, dtype=torch.int32, device=device)
    assert set(picks.sample(None, rows, b, step).tolist()) <= {*range(8), 700, 1400}


FILTERED = {
    "typical-p": {"typical_p": 0.5},
    "little of it": {"typical_p": 0.05},
    "nearly all": {"typical_p": 0.999},
    "top-k, typical-p": {"top_k": 40, "typical_p": 0.7},
    "typical-p, top-p": {"typical_p": 0.8, "top_p": 0.6},
    "xtc": {"xtc_probability": 0.7, "xtc_threshold": 0.002},
    "all xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.03},
    "top-k, xtc": {"top_k": 9, "xtc_probability": 1.0, "xtc_threshold": 0.05},
    "top-p, min-p, xtc": {"top_p": 0.7, "min_p": 0.05, "xtc_probability": 0.5, "xtc_threshold": 0.004},
    "all": {"top_k": 900, "typical_p": 0.9, "top_p": 0.8, "min_p": 0.01, "xtc_probability": 0.9,
            "xtc_threshold": 0.003},
}  # fmt: skip


@pytest.mark.parametrize("asked", FILTERED.values(), ids=FILTERED)
@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_filters_leave_what_those_of_the_reference_leave(device, monkeypatch, asked, spread):
    """Beside rows without, and greedy ones that ask for the same. Nothing is put in order."""
    more = [asked, {}, asked, asked, {"top_p": 0.9}, asked]
    params = [SamplingParams(temperature=1.0, seed=31 * n, **one) for n, one in enumerate(more)]
    params[3] = evolve(params[3], temperature=0.0)
    b, rows = batch(device, tuple(range(6)), 1), logits(device, 6, 1500) * spread
    b.wanted = torch.arange(6, dtype=torch.int32, device=device)
    step, got, want = table(device, *params).step(range(6)), [], []
    for index in range(2):
        b.index.fill_(index)
        want.append(sampling.sample(None, rows, b, step))
    monkeypatch.setattr(sampling, "sample", None)
    for index in range(2):
        b.index.fill_(index)
        got.append(picks.sample(None, rows, b, step))
    assert torch.stack(got).equal(torch.stack(want))
    assert {int(one[3]) for one in got} == {int(rows[3].argmax())}
    assert picks.sample.stays_on_device(step)


def picked_of(device, row, times=1, **asked):
    """All that is picked of a row, with noise that is for each of its tokens in turn, so many times."""
    seeds = [seed for token in range(len(row)) for seed in favouring(len(row))[token][:times]]
    made = ParamTable(len(seeds), len(row), device)
    for slot, seed in enumerate(seeds):
        made.take(slot, SamplingParams(temperature=1.0, seed=seed, **asked), [1], [])
    b = batch(device, tuple(range(len(seeds))), 1)
    b.wanted = torch.arange(len(seeds), dtype=torch.int32, device=device)
    b.index.fill_(7)
    rows = torch.tensor([row], device=device).expand(len(seeds), -1).contiguous()
    return set(picks.sample(None, rows, b, made.step(range(len(seeds)))).tolist())


@cache
def favouring(vocab, much=2.0):
    """token -> seeds that the reference picks it with, though its logit is so much lower than all others:
    further than any two of CHANCES are apart.
    """
    count = 600
    made = ParamTable(count, vocab, "cpu")
    for slot in range(count):
        made.take(slot, SamplingParams(temperature=1.0, seed=slot), [1], [])
    b = batch("cpu", tuple(range(count)), 1)
    b.wanted = torch.arange(count, dtype=torch.int32)
    b.index.fill_(7)
    found = []
    for token in range(vocab):
        rows = torch.zeros(count, vocab)
        rows[:, token] = -much
        picked = sampling.sample(None, rows, b, made.step(range(count)))
        found.append((picked == token).nonzero()[:, 0].tolist())
    return found


CHANCES = (0.3, 0.2, 0.15, 0.12, 0.1, 0.08, 0.05)
"""Of tokens 0, 1, .. The entropy is 1.80 nats: a surprise of 1.90 is nearest, then 1.61, 2.12, 2.30, 2.53."""


def test_typical_tokens_and_top_choices_by_hand(device):
    row = [math.log(one) for one in CHANCES]
    assert picked_of(device, row, typical_p=0.1) == {2}
    assert picked_of(device, row, typical_p=0.4) == {2, 1, 3}
    assert picked_of(device, row, typical_p=0.5, top_p=0.6) == {1, 2}
    assert picked_of(device, row, typical_p=0.4, xtc_probability=1.0, xtc_threshold=0.3) == {2, 3}
    assert picked_of(device, row, xtc_probability=1.0, xtc_threshold=0.11) == {3, 4, 5, 6}
    assert {0, 3} <= picked_of(device, row, 4, xtc_probability=0.5, xtc_threshold=0.11)
    assert picked_of(device, row, top_k=3, xtc_probability=1.0, xtc_threshold=0.25) == {1, 2}


def test_equal_ones_are_typical_by_value_then_by_id(device):
    """Five alike, as surprising as all: the lowest ids come first. Of XTC's equals the last one stays."""
    assert picked_of(device, [0.0] * 5, typical_p=0.5) == {0, 1, 2}
    assert picked_of(device, [0.0] * 5, xtc_probability=1.0, xtc_threshold=0.1) == {4}


@pytest.mark.parametrize("counted", [0, 4096])
def test_typical_ones_of_any_number_are_found(device, monkeypatch, counted):
    """Ties, long lists, values that are not possible."""
    monkeypatch.setattr(nucleus, "LISTED", 256)
    monkeypatch.setattr(nucleus, "COUNTED", counted)
    monkeypatch.setattr(nucleus, "ENOUGH", counted // 2)
    rows = logits(device, 6, 1500).mul(8).round().div(8)
    rows[1, 5:900], rows[2, 3:] = -torch.inf, -torch.inf
    params = [SamplingParams(temperature=1.0, typical_p=p, seed=n) for n, p in enumerate(PARTS)]
    b = batch(device, tuple(range(6)), 1)
    b.wanted = torch.arange(6, dtype=torch.int32, device=device)
    step = table(device, *params).step(range(6))
    same = []
    for index in range(3):
        b.index.fill_(index)
        same.append(picks.sample(None, rows, b, step) == sampling.sample(None, rows, b, step))
    assert torch.stack(same).all()


def test_what_needs_the_host_is_not_captured(device):
    def stays(**params):
        return picks.sample.stays_on_device(table(device, SamplingParams(**params)).step([0]))

    assert stays(temperature=0.0)
    assert stays(temperature=0.7, top_p=0.9, min_p=0.1, top_n_sigma=1.0)
    assert stays(temperature=0.7, top_k=20, top_p=0.8, min_p=0.1, xtc_probability=0.1)
    assert stays(temperature=0.7, top_k=20, typical_p=0.8)
    assert stays(temperature=0.7, top_k=5000, top_p=0.8)
    assert stays(temperature=0.7, top_k=5000, xtc_probability=0.1)
    assert stays(temperature=0.7, repetition=1.1, frequency=0.1, presence=0.2)
    assert stays(temperature=0.0, min_tokens=2)
    assert stays(temperature=0.0, logit_bias={3: 1.0})
    assert not stays(temperature=0.0, dry_multiplier=0.5)


@pytest.mark.parametrize("slots", [(2,), (5, 0, 3), tuple(range(20))])
def test_texts_end_on_the_device_as_in_the_reference(device, slots):
    tables = [NewestTokens(20, device) for _ in range(2)]
    marks = [torch.arange(20 * 100, dtype=torch.int32, device=device).view(20, 100) for _ in range(2)]
    for each in tables:
        each.take(slots[0], range(70, 70 + MOST_ENDS))
    slot = torch.tensor(slots, dtype=torch.int32, device=device)
    token = torch.full_like(slot, 9)
    for picked in (71, 8, 9):
        states = []
        for ops, each, counted in zip((reference, picks), tables, marks, strict=True):
            filled, count = ops.newest_tokens(None, token, slot, each)
            made = torch.arange(len(slots), device=device) + picked
            noted = ops.note_picks(None, made, count, slot, each, counted if picked != 9 else None)
            states.append((filled.tolist(), count.tolist(), noted.tolist(), each.token.tolist()))
            states[-1] += (counted.tolist(),)
        assert states[0] == states[1]
        token = torch.full_like(slot, AHEAD)
    assert states[0][2][0] == AHEAD


def test_a_card_without_atomic_additions_puts_candidates_in_order(device, monkeypatch):
    """So such a step leaves the graph, and takes the reference's way; one without a cut does not."""
    params = [SamplingParams(temperature=0.9, top_p=0.8, top_k=0, seed=n) for n in range(SLOTS)]
    b, step = batch(device), table(device, *params).step(range(SLOTS))
    warm = table(device, *WARM).step(range(SLOTS))
    assert picks._takes(step)
    monkeypatch.setattr(picks.capability, "on", lambda device: Ability((6, 1)))
    monkeypatch.setattr(picks, "find_cuts", None)
    assert not picks._takes(step)
    assert picks._takes(warm)
    want = sampling.sample(None, logits(device), b, step)
    assert picks.sample(None, logits(device), b, step).equal(want)
