"""Hyper-connections against loops in float64 and Hugging Face's DeepSeek-V4 modules."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from luce_core.contracts import StreamsSpec
from luce_core.ops import build_ops

OPS = build_ops()
N, WIDTH, ROWS = 4, 6, 5
EPS = 1e-6


def numbers(*shape, seed=0):
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape), dtype=torch.float32)


def spec_of(pre_alone=False, iterations=20):
    rows = N if pre_alone else N * (2 + N)
    scale = numbers(1 if pre_alone else 3, seed=3).abs()
    return StreamsSpec(
        N, numbers(rows, N * WIDTH, seed=1), numbers(rows, seed=2), scale, 1e-5, EPS, iterations
    )


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def parts_by_loops(h, w):
    """pre, post, mix of one row [N, WIDTH]."""
    flat = h.double().reshape(-1)
    u = flat / (flat.square().mean() + w.norm_eps).sqrt()
    m = (w.fn.double() @ u).tolist()
    base, scale = w.base.double().tolist(), w.scale.double().tolist()
    pre = [sigmoid(m[i] * scale[0] + base[i]) + EPS for i in range(N)]
    if len(m) == N:
        return pre, None, None
    post = [2 * sigmoid(m[N + i] * scale[1] + base[N + i]) for i in range(N)]
    logits = [[m[2 * N + i * N + k] * scale[2] + base[2 * N + i * N + k] for k in range(N)] for i in range(N)]
    mix = [[math.exp(x) / sum(map(math.exp, row)) + EPS for x in row] for row in logits]
    columns = lambda: [sum(row[k] for row in mix) + EPS for k in range(N)]  # noqa: E731
    mix = [[x / c for x, c in zip(row, columns(), strict=True)] for row in mix]
    for _ in range(w.iterations - 1):
        mix = [[x / (sum(row) + EPS) for x in row] for row in mix]
        mix = [[x / c for x, c in zip(row, columns(), strict=True)] for row in mix]
    return pre, post, mix


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_streams_are_read_and_written_as_the_loops_say(iterations):
    w, h, y = spec_of(iterations=iterations), numbers(ROWS, N, WIDTH, seed=5), numbers(ROWS, WIDTH, seed=6)
    x, mix = OPS.streams_in(h, w)
    out = OPS.streams_out(h, y, mix)
    assert mix.shape == (ROWS, N + N * N)
    for row in range(ROWS):
        pre, post, between = parts_by_loops(h[row], w)
        streams = h[row].double()
        want = sum(pre[i] * streams[i] for i in range(N))
        torch.testing.assert_close(x[row].double(), want, rtol=1e-5, atol=1e-5)
        for k in range(N):
            want = post[k] * y[row].double() + sum(between[i][k] * streams[i] for i in range(N))
            torch.testing.assert_close(out[row, k].double(), want, rtol=1e-5, atol=1e-5)


def test_pre_alone_collapses_the_streams():
    w, h = spec_of(pre_alone=True), numbers(ROWS, N, WIDTH, seed=5)
    x, mix = OPS.streams_in(h, w)
    assert mix.shape == (ROWS, 0)
    for row in range(ROWS):
        pre, _, _ = parts_by_loops(h[row], w)
        want = sum(pre[i] * h[row, i].double() for i in range(N))
        torch.testing.assert_close(x[row].double(), want, rtol=1e-5, atol=1e-5)


def test_gates_and_collapse_are_what_streams_in_does_at_once():
    w, h = spec_of(), numbers(ROWS, N, WIDTH, seed=5)
    x, mix = OPS.streams_in(h, w)
    pre, same = OPS.streams_gates(h, w)
    assert torch.equal(mix, same)
    assert torch.equal(OPS.streams_collapse(h, pre), x)
    for row in range(ROWS):
        want = parts_by_loops(h[row], w)[0]
        torch.testing.assert_close(pre[row].double(), torch.tensor(want).double(), rtol=1e-5, atol=1e-5)


def test_streams_may_be_collapsed_by_the_gates_of_others():
    h, pre = numbers(ROWS, N, WIDTH, seed=5), numbers(ROWS, N, seed=9)
    want = [[float(pre[t].double() @ h[t, :, e].double()) for e in range(WIDTH)] for t in range(ROWS)]
    torch.testing.assert_close(OPS.streams_collapse(h, pre), torch.tensor(want), rtol=1e-5, atol=1e-5)


def test_sinkhorn_ends_doubly_stochastic():
    m = OPS.sinkhorn(numbers(7, N, N), 20, EPS)
    torch.testing.assert_close(m.sum(1), torch.ones(7, N), atol=1e-5, rtol=0)
    torch.testing.assert_close(m.sum(2), torch.ones(7, N), atol=1e-5, rtol=0)


def randomized(module):
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module, {name: parameter.detach() for name, parameter in module.named_parameters()}


CONFIG = SimpleNamespace(hc_mult=N, hidden_size=WIDTH, rms_norm_eps=1e-5, hc_eps=EPS, hc_sinkhorn_iters=20)


def test_streams_equal_hugging_faces_hyper_connection():
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

    layer, mine = randomized(DeepseekV4HyperConnection(CONFIG))
    h = numbers(ROWS, N, WIDTH, seed=7)
    with torch.no_grad():
        post, mix, x = layer(h[None])
    spec = StreamsSpec(N, mine["fn"], mine["base"], mine["scale"], 1e-5, EPS, 20)
    got_x, got = OPS.streams_in(h, spec)
    torch.testing.assert_close(got_x, x[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[:, :N], post[0].view(ROWS, N), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[:, N:], mix[0].reshape(ROWS, N * N), rtol=1e-5, atol=1e-5)


def test_pre_alone_equals_hugging_faces_head():
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperHead

    layer, mine = randomized(DeepseekV4HyperHead(CONFIG))
    h = numbers(ROWS, N, WIDTH, seed=7)
    with torch.no_grad():
        want = layer(h[None])[0]
    spec = StreamsSpec(N, mine["hc_fn"], mine["hc_base"], mine["hc_scale"], 1e-5, EPS)
    torch.testing.assert_close(OPS.streams_in(h, spec)[0], want, rtol=1e-5, atol=1e-5)
