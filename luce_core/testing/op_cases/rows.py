"""Cases of ops whose rows know nothing of each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from luce_core.contracts import Clamp, ExpertStack, RopeSpec, RouteSpec, SharedExpert, StreamsSpec, Tap
from luce_core.model.weights import ResidentExperts
from luce_core.testing.op_cases.case import WIDTH, OpRun, OpWorld, case, cases, plain

# --- fine ops on numbers

plain("add", lambda ops, x, y: ops.add(x, y), (3, 5), (3, 5))
plain("mul", lambda ops, x, y: ops.mul(x, y), (3, 5), (3, 5))
plain("scale", lambda ops, x: ops.scale(x, 0.3), (3, 5))
plain("softcap", lambda ops, x: ops.softcap(x, 2.0), (3, 5))
plain("cat", lambda ops, x, y: ops.cat((x, y), -1), (3, 5), (3, 2))
plain("mean", lambda ops, x: ops.mean(x, 1), (3, 5, 2))
plain("expand", lambda ops, x: ops.expand(x, 1, 4), (3, 5))
plain("l2norm", lambda ops, x: ops.l2norm(x), (3, 2, 5))
plain("topk", lambda ops, x: ops.topk(x, 3), (4, 9))
plain("pool_softmax", lambda ops, x, gate: ops.pool_softmax(x, gate), (3, 4, 6), (3, 4, 6))
plain("sinkhorn", lambda ops, x: ops.sinkhorn(x, 5, 1e-6), (3, 4, 4))
cases(
    "act",
    lambda w, kind: OpRun((w.numbers(3, 5),), lambda ops, x: ops.act(x, kind)),
    {kind: (kind,) for kind in ("silu", "gelu", "gelu_tanh", "relu", "sigmoid", "softplus")},
)
CLAMPS: Mapping[str, tuple[Any, ...]] = {
    "free": (None,),
    "clamped before": (Clamp(0.5),),
    "clamped after": (Clamp(0.5, "after"),),
}
cases(
    "act_mul",
    lambda w, clamp: OpRun(
        (w.numbers(3, 5), w.numbers(3, 5)), lambda ops, gate, up: ops.act_mul(gate, up, "silu", clamp)
    ),
    CLAMPS,
)


@case("rms")
def _rms(w: OpWorld) -> OpRun:
    norm = w.norm()
    return OpRun((w.numbers(3, WIDTH),), lambda ops, x: ops.rms(x, norm))


@case("head_rms")
def _head_rms(w: OpWorld) -> OpRun:
    norm = w.norm(8)
    return OpRun((w.numbers(3, 2, 8),), lambda ops, x: ops.head_rms(x, norm))


@case("gather")
def _gather(w: OpWorld) -> OpRun:
    ids = w.ids(6, 4)
    return OpRun((w.numbers(6, 5),), lambda ops, x: ops.gather(x, ids))


def _rope(w: OpWorld, spec: RopeSpec, inverse: bool) -> OpRun:
    axes = len(spec.sections) or 1
    spec = evolve(spec, inv_freq=w.here(spec.inv_freq))
    position = w.ids(500, axes, 5)
    return OpRun((w.numbers(5, 2, 12),), lambda ops, x: ops.rope(x, position, spec, inverse))


FREQUENCIES = torch.logspace(0, -2, 4)
cases(
    "rope",
    _rope,
    {
        "halves": (RopeSpec(FREQUENCIES), False),
        "adjacent": (RopeSpec(FREQUENCIES, "adjacent", 1.2), False),
        "last": (RopeSpec(FREQUENCIES, "adjacent", part="last"), False),
        "inverse": (RopeSpec(FREQUENCIES, part="last"), True),
        "sections": (RopeSpec(FREQUENCIES, sections=(2, 1, 1)), False),
        "interleaved": (RopeSpec(FREQUENCIES, sections=(2, 1, 1), interleaved_sections=True), False),
    },
)


# --- matrices


@case("embed")
def _embed(w: OpWorld) -> OpRun:
    table = w.linear(16)
    return OpRun((w.batch("held"),), lambda ops, b: ops.embed(b, table, 2.0))


@case("table_rows")
def _table_rows(w: OpWorld) -> OpRun:
    table, ids = w.linear(16), w.ids(16, 5)
    return OpRun((), lambda ops: ops.table_rows(table, ids))


@case("linear")
def _linear(w: OpWorld) -> OpRun:
    matrix = w.linear(48, bias=True)
    return OpRun((w.numbers(3, WIDTH),), lambda ops, x: ops.linear(x, matrix))


@case("norm_linear")
def _norm_linear(w: OpWorld) -> OpRun:
    norm, group = w.norm(), w.group(48, 16)
    return OpRun((w.numbers(3, WIDTH),), lambda ops, x: ops.norm_linear(x, norm, group))


@case("linear_out")
def _linear_out(w: OpWorld) -> OpRun:
    matrix, post = w.linear(48), w.norm(48)
    inputs = (w.numbers(3, WIDTH), w.numbers(3, 48))
    return OpRun(inputs, lambda ops, y, x: ops.linear_out(y, matrix, x, post, 0.5))


@case("head_linear")
def _head_linear(w: OpWorld) -> OpRun:
    matrix = w.linear(2 * 16, 32)
    return OpRun((w.numbers(3, 2, 32),), lambda ops, x: ops.head_linear(x, matrix))


def _gated_mlp(w: OpWorld, clamp: Clamp | None) -> OpRun:
    norm, pair, down = w.norm(), w.group(96, 96), w.linear(WIDTH, 96)
    return OpRun(
        (w.numbers(3, WIDTH),),
        lambda ops, x: ops.gated_mlp(x, norm, pair, down, residual=x, act="gelu_tanh", clamp=clamp),
    )


cases("gated_mlp", _gated_mlp, CLAMPS)


@case("head")
def _head(w: OpWorld) -> OpRun:
    norm, matrix = w.norm(), w.linear(16)
    return OpRun((w.numbers(3, WIDTH),), lambda ops, x: ops.head(x, norm, matrix, 3.0, 0.5))


@case("tap")
def _tap(w: OpWorld) -> OpRun:
    buffer = torch.zeros(16, WIDTH, dtype=torch.bfloat16, device=w.device)
    b = evolve(w.batch("held"), taps={Tap("residual", 2): buffer})

    def call(ops: Any, b: Any, x: Any) -> Any:
        ops.tap(b, 2, x)
        return x

    return OpRun((b, w.rows(b, WIDTH)), call, (buffer,))


# --- experts

ROUTES: Mapping[str, dict[str, Any]] = {
    "softmax": {},
    "sigmoid, groups": {"score": "sigmoid", "bias": True, "groups": 4, "top_groups": 2, "scale": 2.5},
    "sqrt softplus": {"score": "sqrt_softplus", "bias": True, "softcap": 3.0, "renorm": False},
    "table": {"score": "sqrt_softplus", "table": True, "per_expert": True},
    "given rows": {"score": "sqrt_softplus", "bias": True, "given_bias": True},
    "given rows, groups, no other bias": {"given_bias": True, "groups": 4, "top_groups": 2},
    "given rows, table": {"score": "sqrt_softplus", "table": True, "given_bias": True},
}


def _route(w: OpWorld, options: dict[str, Any]) -> OpRun:
    b, norm, matrix = w.batch("held"), w.norm(), w.numbers(8, WIDTH)
    made: dict[str, Tensor] = {}
    for name in ("bias", "given_bias", "per_expert"):
        if options.get(name):
            made[name] = w.numbers(8).abs()
    if options.get("given_bias"):
        rows = torch.tensor([1, 4], dtype=torch.int32, device=w.device)
        b = evolve(b, embed_rows=rows, embeds=w.numbers(2, WIDTH))
    if options.get("table"):
        made["table"] = w.here(torch.stack([torch.arange(3) + n % 6 for n in range(16)]).to(torch.int32))
    spec = RouteSpec(**{"top_k": 3, **options, **made})
    return OpRun((b, w.rows(b, WIDTH)), lambda ops, b, x: ops.route(b, x, norm, matrix, spec))


cases("route", _route, {name: (options,) for name, options in ROUTES.items()})


def _experts(w: OpWorld, fused: bool, shared: bool, clamp: Clamp | None) -> OpRun:
    outs = (2 * 32 * 8,) if fused else (32 * 8, 32 * 8)
    stack = ExpertStack(8, tuple(w.linear(out) for out in outs), w.linear(WIDTH * 8, 32))
    bank = ResidentExperts(torch.arange(7, -1, -1, dtype=torch.int32, device=w.device), stack)
    beside = SharedExpert(w.group(48, 48), w.linear(WIDTH, 48), w.numbers(WIDTH), clamp) if shared else None
    norm = w.norm()
    ids = torch.tensor([[0, 3], [5, 1], [-1, -1], [7, 2], [3, 0]], dtype=torch.int32, device=w.device)
    inputs = (w.numbers(5, WIDTH), ids, w.numbers(5, 2).abs())
    return OpRun(
        inputs,
        lambda ops, x, ids, weight: ops.experts(
            x, norm, (ids, weight), bank, beside, residual=x, clamp=clamp
        ),
    )


cases(
    "experts",
    _experts,
    {
        "pairs": (False, False, None),
        "fused, shared": (True, True, Clamp(0.3)),
        "clamped after": (False, True, Clamp(0.3, "after")),
    },
)


@case("moe_linear")
def _moe_linear(w: OpWorld) -> OpRun:
    stack, ids = w.linear(8 * 16), w.ids(8, 5, 2)
    return OpRun((w.numbers(5, WIDTH),), lambda ops, x: ops.moe_linear(x, ids, stack, 8))


# --- streams


def _streams_in(w: OpWorld, pre_alone: bool) -> OpRun:
    rows, scales = (3, 1) if pre_alone else (3 * 5, 3)
    spec = StreamsSpec(3, w.numbers(rows, 3 * 8), w.numbers(rows), w.numbers(scales), 1e-6, iterations=4)
    return OpRun((w.numbers(5, 3, 8),), lambda ops, h: ops.streams_in(h, spec))


cases("streams_in", _streams_in, {"with mix": (False,), "pre alone": (True,)})
plain("streams_out", lambda ops, h, y, mix: ops.streams_out(h, y, mix), (5, 3, 8), (5, 8), (5, 12))
