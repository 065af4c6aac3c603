"""Op `route` beside float64 by hand: few rows and many, ties, padding, and what goes to the reference."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from luce_backend_triton import few_rows, moe, product, route

from luce_core.contracts import Norm, RouteSpec
from luce_core.ops import build_ops

OPS = build_ops({})
WIDTH, EXPERTS = 80, 20


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(2)


def by_hand(x, norm, w, spec):
    n = x.double()
    if norm is not None:
        n = n / (n.square().mean(1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    logits = n @ w.double().T
    score = logits.softmax(1) if spec.score == "softmax" else logits.sigmoid()
    by = score if spec.bias is None else score + spec.bias.double()
    ids = by.sort(dim=1, descending=True, stable=True).indices[:, : spec.top_k]
    weight = score.gather(1, ids)
    if spec.renorm:
        weight = weight / weight.sum(1, keepdim=True)
    return ids, weight * spec.scale


def batch(rows, device):
    return SimpleNamespace(parent=torch.full((rows,), -1, dtype=torch.int32, device=device), embed_rows=None)


@pytest.mark.parametrize("limit", [32, 0], ids=["few", "many"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("top", [1, 3, 8])
def test_the_best_by_score(device, rng, monkeypatch, limit, score, top):
    monkeypatch.setattr(route, "FEW_ROWS", limit)
    x, w = (torch.randn(n, WIDTH, generator=rng).to(device) for n in (5, EXPERTS))
    w /= WIDTH**0.5
    norm = Norm(1 + 0.1 * torch.randn(WIDTH, generator=rng).to(device), 1e-6) if score == "softmax" else None
    bias = torch.rand(EXPERTS, generator=rng).to(device) if score == "sigmoid" else None
    spec = RouteSpec(top, score, bias, renorm=top != 3, scale=1.5)
    ids, weight = route.route(OPS, batch(5, device), x, norm, w, spec)
    want = by_hand(x, norm, w, spec)
    assert ids.dtype is torch.int32
    assert ids.long().equal(want[0])
    assert float((weight - want[1]).abs().max()) < 1e-6


def test_equal_scores_go_to_the_lowest_id_and_padding_to_nobody(device):
    x, w = torch.ones(3, WIDTH, device=device), torch.ones(EXPERTS, WIDTH, device=device)
    b = batch(3, device)
    b.parent[1] = -2
    ids, weight = route.route(OPS, b, x, None, w, RouteSpec(3))
    assert ids.tolist() == [[0, 1, 2], [-1, -1, -1], [0, 1, 2]]
    assert weight[1].tolist() == [0, 0, 0]
    assert float((weight[0] - 1 / 3).abs().max()) < 1e-6


def test_routers_the_kernels_do_not_take_go_to_the_reference(device, rng, monkeypatch):
    monkeypatch.setattr(route.kernels, "pick", None)
    x, w = (torch.randn(n, WIDTH, generator=rng).to(device) for n in (4, EXPERTS))
    spec = RouteSpec(2, groups=4, top_groups=2)
    ids, _ = route.route(OPS, batch(4, device), x, None, w, spec)
    assert ids.shape == (4, 2)


@pytest.mark.parametrize("rows", [4, 11, 40])
def test_a_row_has_the_same_bits_among_others(device, rng, rows):
    """One program has one to eight rows, the last one fewer."""
    x, w = (torch.randn(n, WIDTH, generator=rng).to(device) for n in (rows, EXPERTS))
    norm = Norm(1 + 0.1 * torch.randn(WIDTH, generator=rng).to(device), 1e-6)
    every = route.logits(x, norm, w, overlap=False)
    assert torch.equal(every, torch.cat([route.logits(one, norm, w, overlap=False) for one in x.split(1)]))
    want = torch.nn.functional.rms_norm(x.double(), (WIDTH,), norm.weight.double(), 1e-6) @ w.double().T
    assert float((every - want).abs().max()) < 1e-4


def whole(ready):
    """x of csrc/gemv.cu as integers [.., 8, 4, 8] and their factors."""
    halves = ready[..., :512].contiguous().view(torch.int8).unflatten(-1, (8, 4, 2, 8)).int()
    return halves[..., 0, :] * 256 + halves[..., 1, :], ready[..., few_rows.X_FACTOR :][..., :4]


@pytest.mark.parametrize("rows", [1, 11])
@pytest.mark.parametrize("normed", [True, False])
def test_the_router_makes_its_input_ready_for_experts(device, rng, rows, normed):
    """Logits are those of a launch that does not; who reads something else does not take it."""
    x, w = (torch.randn(n, 352, generator=rng).to(device) for n in (rows, EXPERTS))
    norm = Norm(1 + 0.1 * torch.randn(352, generator=rng).to(device), 1e-6) if normed else None
    b = batch(rows, device)
    routed = route.route(OPS, b, x, norm, w, RouteSpec(2))
    made, want = routed.rows.made("gemv"), product.Rows(x, norm).few("gemv")
    (one, one_factor), (other, other_factor) = whole(made), whole(want)
    assert (one - other).abs().max() <= 1
    torch.testing.assert_close(*(f.contiguous().view(torch.float32) for f in (one_factor, other_factor)))
    sums = (each[..., 512:544].contiguous().view(torch.int32) for each in (made, want))
    torch.testing.assert_close(*sums, rtol=0, atol=8)
    alone = route.pick(b, route.logits(x, norm, w, overlap=False), RouteSpec(2), overlap=False)
    assert all(torch.equal(a, b) for a, b in zip(routed, alone, strict=True))
    assert moe._given(routed, x, norm) is routed.rows
    for given in ((routed, x.clone(), norm), (routed, x, Norm(x[0], 1e-6)), (tuple(routed), x, norm)):
        assert moe._given(*given).made("gemv") is None


def test_a_choice_that_experts_can_make_is_launched_when_it_is_looked_at(device, rng, monkeypatch):
    x, w = (torch.randn(n, WIDTH, generator=rng).to(device) for n in (2, EXPERTS))
    spec, b, made, pick = RouteSpec(2, scale=1.5), batch(2, device), [], route.pick
    want = tuple(route.route(OPS, b, x, None, w, spec))
    monkeypatch.setattr(route, "_lets_choose", lambda *_: True)
    monkeypatch.setattr(route, "pick", lambda *given: made.append(1) or pick(*given))
    routed = route.route(OPS, b, x, None, w, spec)
    assert isinstance(routed, tuple)
    assert len(routed) == 2
    assert (routed.asked.scale, routed.asked.top_k, made) == (1.5, 2, [])
    ids, weight = routed
    assert torch.equal(ids, want[0])
    assert torch.equal(weight, want[1])
    assert routed[0] is ids
    assert tuple(routed)[1] is weight
    assert made == [1]


@pytest.mark.parametrize(
    ("spec", "experts", "rows"),
    [
        (RouteSpec(8), 256, 1),
        (RouteSpec(8), 31, 1),
        (RouteSpec(8), 257, 1),
        (RouteSpec(8), 256, 3),
        (RouteSpec(8, renorm=False), 256, 1),
        (RouteSpec(8, "sigmoid"), 256, 1),
        (RouteSpec(8, bias=torch.zeros(256)), 256, 1),
        (RouteSpec(33), 256, 1),
    ],
)
def test_which_choices_experts_can_make(spec, experts, rows):
    """Softmax over 32 to 256 experts, of one or two rows: the first of these. CUDA C++ alone does."""
    x, w = SimpleNamespace(is_cuda=True, shape=(rows, 64)), torch.zeros(experts, 64)
    assert route._lets_choose(x, w, spec) == (spec == RouteSpec(8) and experts == 256 and rows == 1)
    x.is_cuda = False
    assert not route._lets_choose(x, w, spec)
