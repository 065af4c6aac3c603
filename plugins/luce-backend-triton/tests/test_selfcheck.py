"""What `luce-core doctor --kernels` runs: all is well where it is, and a kernel that is wrong is seen."""

from __future__ import annotations

import torch
from luce_backend_triton import attention, moe, ops, picks, selfcheck
from luce_backend_triton.formats import FORMATS

WHOLE = (*FORMATS, *selfcheck.FLOATS) if torch.cuda.is_available() else ("Q4_K", "BF16")
ROWS = selfcheck.ROWS if torch.cuda.is_available() else (1, 70)


def wrong(checks):
    return [check.what for check in checks if not check.error <= check.allowed]


def test_products_are_right(device):
    checks = list(selfcheck.products(ops.CUDA, str(device), WHOLE, ROWS))
    assert len(checks) == len(WHOLE) * len(ROWS)
    assert not wrong(checks)


def test_sequences_are_right(device):
    checks = list(selfcheck.sequences(str(device)))
    assert len(checks) == 6
    assert not wrong(checks)


def test_a_wrong_product_is_seen(device):
    class Off(ops.Layer):
        def linear_out(self, *args, **kwargs):
            return super().linear_out(*args, **kwargs) * 1.01

    assert len(wrong(selfcheck.products(Off(cuda=False), str(device), ("Q8_0",), (2,)))) == 1


def test_a_wrong_op_is_seen(device, monkeypatch):
    real = attention.attention
    monkeypatch.setattr(attention, "attention", lambda *args, **kwargs: real(*args, **kwargs) + 0.1)
    assert wrong(selfcheck.sequences(str(device))) == ["attention, prefill", "attention, held"]


def test_routes_and_experts_are_right(device):
    assert not wrong(selfcheck.routes(str(device)))
    rows = selfcheck.EXPERT_ROWS if torch.cuda.is_available() else (3,)
    checks = list(selfcheck.experts(ops.CUDA, str(device), WHOLE[:1], rows))
    assert len(checks) == len(rows)
    assert not wrong(checks)


def test_picks_are_right_and_wrong_ones_are_seen(device, monkeypatch):
    checks = list(selfcheck.picking(str(device)))
    assert len(checks) == 3
    assert not wrong(checks)
    monkeypatch.setattr(picks, "sample", lambda ops, logits, b, params: logits.argmin(1))
    monkeypatch.setattr(picks, "note_picks", lambda ops, picked, *_: picked)
    assert len(wrong(selfcheck.picking(str(device)))) == 3


def test_wrong_experts_are_seen(device, monkeypatch):
    real = moe._combine
    monkeypatch.setattr(moe, "_combine", lambda *args: real(*args) * 1.01)
    assert len(wrong(selfcheck.experts(ops.CUDA, str(device), ("Q8_0",), (3,)))) == 1
