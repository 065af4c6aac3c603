"""What `luce-core doctor --kernels` runs: all is well where it is, and a kernel that is wrong is seen."""

from __future__ import annotations

import pytest
import torch
from luce_backend_triton import attention, delta, moe, normed, ops, picks, route, selfcheck
from luce_backend_triton import selfcheck_chains as chains
from luce_backend_triton.few_rows import Divide, Shape
from luce_backend_triton.formats import FORMATS
from luce_backend_triton.invariant import attention as invariant_attention
from luce_backend_triton.invariant import delta as invariant_delta
from luce_backend_triton.invariant import ops as invariant
from luce_backend_triton.invariant import selfcheck as same

from . import simt

WHOLE = (*FORMATS, *selfcheck.FLOATS) if torch.cuda.is_available() else ("Q4_K", "BF16")
ROWS = selfcheck.ROWS if torch.cuda.is_available() else (1, 70)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The interpreter takes its time."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(selfcheck, "PROMPTS", (19, 5))
        few = {name: selfcheck.CODECS[name] for name in ("q8_0", "tq3_0")}  # test_attention_codecs has all
        monkeypatch.setattr(selfcheck, "CODECS", few)
        monkeypatch.setattr(selfcheck, "VOCAB", 3_000)
        monkeypatch.setattr(same, "COUNT", 7)


def wrong(checks):
    return [check.what for check in checks if not check.error <= check.allowed]


def test_products_are_right(device):
    checks = list(selfcheck.products(ops.CUDA, str(device), WHOLE, ROWS))
    assert len(checks) == len(WHOLE) * len(ROWS)
    assert not wrong(checks)


@pytest.mark.parametrize("modules", [(attention, delta.CUDA), (invariant_attention, invariant_delta)])
def test_sequences_are_right(device, modules):
    checks = list(selfcheck.sequences(str(device), modules[0].attention, modules[1].delta))
    assert len(checks) == 4 * (2 + len(selfcheck.CODECS))
    assert not wrong(checks)


def test_what_stands_between_products_is_right_and_a_wrong_op_is_seen(device, few, monkeypatch):
    checks = list(chains.mixers(ops.CUDA, str(device)))
    assert len(checks) == 4 * len(chains.MIXED)
    assert not wrong(checks)
    assert {check.ops for check in checks} == {("attention",), ("delta",), ("linear_out",)}
    real = attention.attention
    monkeypatch.setattr(attention, "attention", lambda *args, **more: real(*args, **more) * 1.01)
    assert [one.partition(" ")[0] for one in wrong(chains.mixers(ops.CUDA, str(device)))] == [
        "attention"
    ] * len(chains.MIXED)


@pytest.fixture
def few(monkeypatch):
    """Rows that take a machine without a card no minutes."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(chains, "MIXED", (3, 16))


@pytest.mark.parametrize("layer", [ops.CUDA, ops.PORTABLE])
def test_gated_mlps_in_a_row_are_right_and_a_wrong_norm_is_seen(device, few, monkeypatch, layer):
    checks = list(chains.mlps(layer, str(device)))
    assert [check.ops for check in checks] == [("gated_mlp",)] * len(chains.MIXED)
    assert not wrong(checks)
    real = layer.norm_linear
    monkeypatch.setattr(layer, "norm_linear", lambda o, x, norm, w: real(o, x * (x > 0), norm, w), False)
    assert len(wrong(chains.mlps(layer, str(device)))) == len(chains.MIXED)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="rows are left ready on a card alone")
def test_rows_that_are_not_left_ready_are_seen(device, monkeypatch):
    monkeypatch.setattr(chains.bounds, "ready_for", lambda y, packed: None)
    assert len(wrong(chains.mixers(ops.CUDA, str(device)))) == 4 * len(chains.MIXED)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="norms are left ready on a card alone")
def test_norms_that_are_not_left_ready_are_seen(device, monkeypatch):
    monkeypatch.setattr(normed, "made", lambda *_: None)
    assert len(wrong(chains.chains(ops.CUDA, str(device)))) == 3 * len(chains.MIXED)


@pytest.mark.skipif(simt.GXX is None, reason="no g++ here to compile CUDA C++ for the CPU with")
def test_norms_of_gated_mlps_are_left_ready_and_what_is_wrong_is_seen(tmp_path, device, monkeypatch):
    """As on a card: its kernels run on the CPU."""
    if str(device) != "cpu":
        pytest.skip("the kernels run on the CPU here")
    launched, shape = [], Shape("mma", 16, 2, 4, 2)
    simt.emulated(monkeypatch, tmp_path, shape, launched)
    monkeypatch.setattr(chains.product, "few_of", lambda one, m, cuda: (shape, 3))
    monkeypatch.setattr(chains, "MIXED", (11,))
    monkeypatch.setattr(chains, "HIDDEN", 256)
    monkeypatch.setattr(chains, "INNER", 256)

    def errors():
        launched.clear()
        return [check.error for check in chains.mlps(ops.CUDA, "cpu")]

    assert errors() <= [chains.ROUNDED]
    assert launched == ["ready norm", *["Q4_K silu", "Q4_K then"] * 2, "Q6_K", "Q4_K"]
    real = normed.made
    for which in (1, 2):  # the norm between the two, the one behind both
        asked = []

        def made(*given, which=which, asked=asked):
            asked.append(given)
            return None if len(asked) == which else real(*given)

        monkeypatch.setattr(normed, "made", made)
        assert errors() == [float("inf")]
    monkeypatch.setattr(normed, "made", real)
    with monkeypatch.context() as halved:
        halved.setattr(normed, "Divide", lambda squares, k, eps: Divide(squares, 2 * k, eps))
        assert [chains.ROUNDED] < errors() < [float("inf")]
    monkeypatch.setattr(normed, "MADE", False)
    assert errors() <= [chains.ROUNDED], "where it is not asked for, nobody misses it"


def test_a_wrong_product_is_seen(device):
    class Off(ops.Layer):
        def linear_out(self, *args, **kwargs):
            return super().linear_out(*args, **kwargs) * 1.01

    assert len(wrong(selfcheck.products(Off(cuda=False), str(device), ("Q8_0",), (2,)))) == 1


def test_a_wrong_op_is_seen(device):
    def off(*args, **kwargs):
        return attention.attention(*args, **kwargs) + 0.1

    checks = selfcheck.sequences(str(device), off, delta.CUDA.delta)
    found = wrong(checks)
    assert found[:3] == ["attention, prefill", "attention, one row", "attention, held"]
    assert len(found) == 3 * (1 + len(selfcheck.CODECS))


def test_invariant_layers_keep_bits_and_others_are_seen(device, monkeypatch):
    length, rows = (same.LENGTH, same.ROWS) if torch.cuda.is_available() else (40, 70)
    assert not wrong(same.same_products(invariant.CUDA, str(device), WHOLE[:1], rows))
    assert not wrong(same.same_sequences(str(device), length))
    assert wrong(same.same_products(ops.CUDA, str(device), WHOLE[:1], rows))
    monkeypatch.setattr(same.delta, "delta", delta.CUDA.delta)
    assert wrong(same.same_sequences(str(device), length)) == [
        f"Gated DeltaNet, {what}: the same bits"
        for what in ("a prompt in chunks, beside another", "a tree, its path, one row")
    ]


def test_routes_and_experts_are_right(device):
    assert not wrong(selfcheck.routes(str(device), route.route))
    op = moe.CUDA.experts
    rows = selfcheck.EXPERT_ROWS if torch.cuda.is_available() else (3,)
    checks = list(selfcheck.experts(ops.CUDA, str(device), WHOLE[:1], rows, op))
    checks += selfcheck.experts(ops.CUDA, str(device), WHOLE[:1], rows[:1], op, route.route)
    assert len(checks) == len(rows) + 1
    assert not wrong(checks)


def test_picks_are_right_and_wrong_ones_are_seen(device, monkeypatch):
    checks = list(selfcheck.picking(str(device)))
    assert len(checks) == 7
    assert not wrong(checks)
    monkeypatch.setattr(picks, "sample", lambda ops, logits, b, params: logits.argmin(1))
    monkeypatch.setattr(picks, "process_logits", lambda ops, logits, b, params: logits)
    monkeypatch.setattr(picks, "note_picks", lambda ops, picked, *_: picked)
    assert len(wrong(selfcheck.picking(str(device)))) == 7


def test_wrong_experts_are_seen(device, monkeypatch):
    real = moe._combine
    monkeypatch.setattr(moe, "_combine", lambda *args: real(*args) * 1.01)
    given = ops.CUDA, str(device), ("Q8_0",), (3,), moe.CUDA.experts
    assert len(wrong(selfcheck.experts(*given))) == 1
    monkeypatch.setattr(moe, "_combine", real)
    choice = route.pick

    def others(*given):
        ids, weight = choice(*given)
        return (ids + 1) % 32, weight

    monkeypatch.setattr(route, "pick", others)
    assert len(wrong(selfcheck.experts(*given, route.route))) == 1
