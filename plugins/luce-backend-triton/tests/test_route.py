"""Op `route` beside float64 by hand: few rows and many, ties, padding, and what goes to the reference."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from luce_backend_triton import route

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
