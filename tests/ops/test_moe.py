"""Routing and experts against loops in float64, and against Hugging Face's own blocks."""

from __future__ import annotations

import math
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from luce_core.contracts import (
    Clamp,
    ExpertStack,
    Linear,
    LinearGroup,
    Norm,
    RouteSpec,
    SharedExpert,
)
from luce_core.errors import PluginError
from luce_core.model.batch import RowSet, make_batch
from luce_core.model.weights import ResidentExperts
from luce_core.ops import build_ops, moe

OPS = build_ops()
WIDTH, FFN, EXPERTS, TOP, VOCAB = 6, 5, 8, 3, 11


def numbers(*shape, seed=0):
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape), dtype=torch.float32)


def batch(rows, seed=0, padding=0):
    tokens = np.random.default_rng(seed).integers(0, VOCAB, rows).tolist()
    parents = [-1] * (rows - padding) + [-2] * padding
    return make_batch("held", [RowSet(0, 0, tokens, {}, parents=parents)])


def silu(x):
    return x / (1 + math.exp(-x))


# --- route


SCORES = {
    "softmax": lambda logits: [math.exp(x) / sum(map(math.exp, logits)) for x in logits],
    "sigmoid": lambda logits: [1 / (1 + math.exp(-x)) for x in logits],
    "sqrt_softplus": lambda logits: [math.sqrt(math.log1p(math.exp(x))) for x in logits],
}


def routed_by_loops(token, logits, spec, given=False):
    """{expert: weight} of one row, in plain Python. given: as an embedding."""
    if spec.softcap:
        logits = [spec.softcap * math.tanh(x / spec.softcap) for x in logits]
    scores = SCORES[spec.score](logits)
    own = given and spec.given_bias is not None
    if spec.table is not None and not own:
        ids = spec.table[token].tolist()
    else:
        bias = spec.given_bias if own else spec.bias
        choice = [s + (0.0 if bias is None else bias[e].item()) for e, s in enumerate(scores)]
        size = len(scores) // spec.groups
        groups = [choice[g * size : (g + 1) * size] for g in range(spec.groups)]
        best = sorted(range(spec.groups), key=lambda g: -sum(sorted(groups[g])[-2:]))[: spec.top_groups]
        allowed = [e for e in range(len(scores)) if spec.groups == 1 or e // size in best]
        ids = sorted(allowed, key=lambda e: -choice[e])[: spec.top_k]
    total = sum(scores[e] for e in ids) if spec.renorm else 1.0
    factor = [1.0] * len(scores) if spec.per_expert is None else spec.per_expert.tolist()
    return {e: scores[e] / total * spec.scale * factor[e] for e in ids}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    score=st.sampled_from(list(SCORES)),
    bias=st.booleans(),
    groups=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    renorm=st.booleans(),
    scale=st.sampled_from([1.0, 2.5]),
    per_expert=st.booleans(),
    table=st.booleans(),
    softcap=st.sampled_from([0.0, 1.5]),
    plain=st.booleans(),
    given_bias=st.booleans(),
    given=st.sets(st.integers(0, 4)),
)
def test_routes_are_those_of_the_loops(
    seed, score, bias, groups, renorm, scale, per_expert, table, softcap, plain, given_bias, given
):
    rng = np.random.default_rng(seed)
    tables = np.stack([rng.permutation(EXPERTS)[:TOP] for _ in range(VOCAB)])
    spec = RouteSpec(
        top_k=TOP,
        score=score,
        bias=numbers(EXPERTS, seed=seed + 1) if bias else None,
        given_bias=numbers(EXPERTS, seed=seed + 5) if given_bias else None,
        groups=groups[0],
        top_groups=groups[1],
        renorm=renorm,
        scale=scale,
        per_expert=numbers(EXPERTS, seed=seed + 2).abs() if per_expert else None,
        table=torch.tensor(tables, dtype=torch.int32) if table else None,
        softcap=softcap,
    )
    x, w = numbers(5, WIDTH, seed=seed), numbers(EXPERTS, WIDTH, seed=seed + 3)
    norm = Norm(numbers(WIDTH, seed=seed + 4), 1e-6)
    b = batch(5, seed)
    if given:
        b = attrs.evolve(b, embed_rows=torch.tensor(sorted(given)), embeds=numbers(len(given), WIDTH))
    router = w if plain else Linear("r", EXPERTS, WIDTH, "F32", w)
    ids, weight = OPS.route(b, x, norm, router, spec)
    assert ids.dtype == torch.int32
    n = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    logits = (n @ w.double().T).tolist()
    for row in range(5):
        want = routed_by_loops(b.token[row].item(), logits[row], spec, row in given)
        got = dict(zip(ids[row].tolist(), weight[row].tolist(), strict=True))
        assert got == pytest.approx(want, rel=1e-4, abs=1e-6)


def test_ties_go_to_the_lowest_expert_and_padding_rows_go_nowhere():
    b = batch(3, padding=1)
    ids, weight = OPS.route(b, torch.zeros(3, WIDTH), None, numbers(EXPERTS, WIDTH), RouteSpec(TOP))
    assert ids.tolist() == [[0, 1, 2], [0, 1, 2], [-1, -1, -1]]
    assert weight[2].tolist() == [0, 0, 0]


def test_a_plain_router_is_not_the_layers_business():
    rounded = build_ops({"linear": lambda ops, x, w: 0 * x})
    w, x, b = numbers(EXPERTS, WIDTH), numbers(2, WIDTH), batch(2)
    assert rounded.route(b, x, None, w, RouteSpec(TOP))[0].equal(OPS.route(b, x, None, w, RouteSpec(TOP))[0])


def test_group_limited_routing_equals_bailings_own():
    from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridTopkRouter

    config = SimpleNamespace(
        num_experts_per_tok=4,
        num_local_experts=16,
        hidden_size=WIDTH,
        routed_scaling_factor=2.5,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
    )
    router = BailingHybridTopkRouter(config)
    router.weight.data = numbers(16, WIDTH)
    router.e_score_correction_bias.data = numbers(16, seed=1)
    x = numbers(20, WIDTH, seed=2)
    with torch.no_grad():
        _, want_weight, want_ids = router(x)
    spec = RouteSpec(4, "sigmoid", router.e_score_correction_bias, groups=4, top_groups=2, scale=2.5)
    ids, weight = OPS.route(batch(20), x, None, router.weight.detach(), spec)
    for row in range(20):
        got = dict(zip(ids[row].tolist(), weight[row].tolist(), strict=True))
        assert got == pytest.approx(
            dict(zip(want_ids[row].tolist(), want_weight[row].tolist(), strict=True)), rel=1e-5
        )


# --- experts


def stack_of(weights, name, bias=None, scale=None):
    """[X, out, in] as the handle of a stack."""
    count, out, width = weights.shape
    return Linear(name, count * out, width, "F32", weights.reshape(-1, width).contiguous(), bias, scale)


def make_bank(seed=0, fused=False, bias=False, scale=None, lut=None, experts=EXPERTS):
    gate, up = (numbers(experts, FFN, WIDTH, seed=seed + n) for n in (1, 2))
    down = numbers(experts, WIDTH, FFN, seed=seed + 3)
    biases = [numbers(experts, n, seed=seed + 4) if bias else None for n in (FFN, FFN, WIDTH)]
    flat = [None if one is None else one.reshape(-1) for one in biases]
    pair = (stack_of(gate, "gate", flat[0]), stack_of(up, "up", flat[1]))
    if fused:
        both = None if not bias else torch.cat(biases[:2], 1).reshape(-1)
        pair = (stack_of(torch.cat([gate, up], 1), "both", both),)
    stack = ExpertStack(experts, pair, stack_of(down, "down", flat[2], scale))
    places = torch.arange(experts, dtype=torch.int32) if lut is None else lut
    return ResidentExperts(places, stack), (gate, up, down, biases)


def expert_by_loops(n, gate, up, down, biases, clamp):
    """One expert on one row, float64."""
    g, u = gate.double() @ n, up.double() @ n
    if biases[0] is not None:
        g, u = g + biases[0].double(), u + biases[1].double()
    hidden = []
    most = {} if clamp is None else {clamp.at: clamp.limit}
    for a, c in zip(g.tolist(), u.tolist(), strict=True):
        active = min(silu(min(a, most.get("before", a))), most.get("after", math.inf))
        hidden.append(active * (c if clamp is None else max(-clamp.limit, min(clamp.limit, c))))
    y = down.double() @ torch.tensor(hidden, dtype=torch.float64)
    return y if biases[2] is None else y + biases[2].double()


CLAMPS = [None, Clamp(0.4), Clamp(0.4, "after")]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 99),
    fused=st.booleans(),
    bias=st.booleans(),
    clamp=st.sampled_from(CLAMPS),
    shared=st.sampled_from(["", "plain", "gated", "clamped"]),
    scaled=st.booleans(),
    post=st.booleans(),
    block=st.sampled_from([1 << 25, 20]),
)
def test_experts_are_the_weighted_sum_of_the_loops(seed, fused, bias, clamp, shared, scaled, post, block):
    scale = numbers(EXPERTS, seed=seed + 9).abs() if scaled else None
    bank, (gate, up, down, biases) = make_bank(seed, fused, bias, scale)
    x, residual = numbers(7, WIDTH, seed=seed), numbers(7, WIDTH, seed=seed + 5)
    norm, after = Norm(numbers(WIDTH, seed=seed + 6), 1e-6), Norm(numbers(WIDTH, seed=seed + 7), 1e-6)
    rng = np.random.default_rng(seed)
    ids = torch.tensor(np.stack([rng.permutation(EXPERTS)[:TOP] for _ in range(7)]), dtype=torch.int32)
    weight = numbers(7, TOP, seed=seed + 8)
    one = [numbers(4, WIDTH, seed=20), numbers(4, WIDTH, seed=21), numbers(WIDTH, 4, seed=22)]
    shared_clamp = Clamp(0.2) if shared == "clamped" else None
    handle = None
    if shared:
        parts = [Linear(str(n), *part.shape, "F32", part) for n, part in enumerate(one)]
        gate_of = numbers(WIDTH, seed=23) if shared == "gated" else None
        handle = SharedExpert(LinearGroup(tuple(parts[:2])), parts[2], gate_of, shared_clamp)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "HIDDEN_ELEMENTS", block)
        got = OPS.experts(
            x, norm, (ids, weight), bank, handle, residual=residual, post=after if post else None, clamp=clamp
        )

    def normed(v, w):
        return v / (v.square().mean() + 1e-6).sqrt() * w.weight.double()

    for row in range(7):
        n = normed(x[row].double(), norm)
        y = torch.zeros(WIDTH, dtype=torch.float64)
        for e, w in zip(ids[row].tolist(), weight[row].double().tolist(), strict=True):
            mine = [None if part is None else part[e] for part in biases]
            plain = expert_by_loops(n, gate[e], up[e], down[e], [*mine[:2], None], clamp)
            if scale is not None:
                plain = plain * scale[e].double()
            y += w * (plain if mine[2] is None else plain + mine[2].double())
        if shared:
            more = expert_by_loops(n, *one, [None] * 3, shared_clamp)
            y += more / (1 + math.exp(-float(n @ gate_of.double()))) if shared == "gated" else more
        want = residual[row].double() + (normed(y, after) if post else y)
        torch.testing.assert_close(got[row].double(), want, rtol=1e-4, atol=1e-4)


def test_experts_are_found_by_their_place_in_the_stack():
    bank, _ = make_bank()
    order = [5, 2, 7, 0, 1, 6, 3, 4]
    moved = attrs.evolve(
        bank.stack,
        gate_up=tuple(reordered(w, order) for w in bank.stack.gate_up),
        down=reordered(bank.stack.down, order),
    )
    lut = torch.tensor([order.index(e) for e in range(EXPERTS)], dtype=torch.int32)
    x = numbers(4, WIDTH)
    routed = (torch.tensor([[0, 3], [7, 1], [2, 2], [5, 4]], dtype=torch.int32), numbers(4, 2, seed=1))
    want = OPS.experts(x, None, routed, bank)
    torch.testing.assert_close(OPS.experts(x, None, routed, ResidentExperts(lut, moved)), want)


def reordered(w, order):
    rows = w.packed.view(EXPERTS, -1, w.in_features)[order].reshape(-1, w.in_features)
    return attrs.evolve(w, packed=rows)


def test_padding_rows_and_missing_experts_give_zeros():
    bank, _ = make_bank(bias=True)
    ids = torch.tensor([[0, -1], [-1, -1]], dtype=torch.int32)
    y = OPS.moe_linear(numbers(2, WIDTH), ids, bank.stack.gate_up[0], EXPERTS)
    assert y[0, 0].any()
    assert not y[0, 1].any()
    assert not y[1].any()
    empty = OPS.experts(numbers(0, WIDTH), None, (ids[:0], torch.zeros(0, 2)), bank)
    assert empty.shape == (0, WIDTH)


def test_experts_that_are_elsewhere_are_refused():
    bank, _ = make_bank()
    ids = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(PluginError, match="resident experts only"):
        OPS.experts(numbers(1, WIDTH), None, (ids, torch.ones(1, 1)), attrs.evolve(bank, mailbox=object()))


def test_experts_read_whatever_their_layer_packed():
    """A layer that keeps rows in its own form overrides `table_rows`; `experts` need know nothing else."""
    halved = build_ops({"table_rows": lambda ops, w, ids: 0.5 * w.packed[ids.long()]})
    bank, _ = make_bank()
    ids = torch.tensor([[1, 4]], dtype=torch.int32)
    got = halved.moe_linear(numbers(1, WIDTH), ids, bank.stack.gate_up[0], EXPERTS)
    want = 0.5 * OPS.moe_linear(numbers(1, WIDTH), ids, bank.stack.gate_up[0], EXPERTS)
    torch.testing.assert_close(got, want)


class Largest(TorchDispatchMode):
    """The largest tensor any call made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_nothing_has_the_size_rows_times_experts_times_width():
    rows, experts = 300, 512
    bank, _ = make_bank(experts=experts)
    x, w = numbers(rows, WIDTH), numbers(experts, WIDTH)
    with Largest() as seen:
        routed = OPS.route(batch(rows), x, None, w, RouteSpec(TOP))
        assert seen.numel <= 2 * rows * experts
        seen.numel = 0
        OPS.experts(x, None, routed, bank)
    assert seen.numel <= rows * TOP * max(WIDTH, FFN) * 2


def test_a_qwen3_moe_block_equals_hugging_faces():
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=WIDTH, moe_intermediate_size=FFN, num_experts=EXPERTS, num_experts_per_tok=TOP,
        norm_topk_prob=True,
    )  # fmt: skip
    config._experts_implementation = "eager"
    block = Qwen3MoeSparseMoeBlock(config)
    torch.manual_seed(1)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    x = numbers(9, WIDTH)
    with torch.no_grad():
        want = block(x[None])
    want = want[0] if isinstance(want, tuple) else want
    both, down = block.experts.gate_up_proj.detach(), block.experts.down_proj.detach()
    stack = ExpertStack(EXPERTS, (stack_of(both, "both"),), stack_of(down, "down"))
    bank = ResidentExperts(torch.arange(EXPERTS, dtype=torch.int32), stack)
    routed = OPS.route(batch(9), x, None, block.gate.weight.detach(), RouteSpec(TOP))
    torch.testing.assert_close(OPS.experts(x, None, routed, bank), want.view(9, WIDTH), rtol=1e-4, atol=1e-4)
