"""Cases of ops that read or write what a sequence remembers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from luce_core.contracts import (
    AttentionSpec,
    Commit,
    CompressSpec,
    DeltaSpec,
    LinearAttentionSpec,
    RopeSpec,
    SlotState,
)
from luce_core.testing.op_cases.case import PHASES, OpRun, OpWorld, case, cases

# --- attention

HEADS, KV_HEADS, DIM = 4, 2, 16
TURN = RopeSpec(torch.logspace(0, -2, 4))


FIELDS: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "k v": {"k": (KV_HEADS, DIM), "v": (KV_HEADS, DIM)},
    "v": {"v": (KV_HEADS, DIM)},
    "k": {"k": (1, DIM)},
    "latent rope": {"latent": (DIM - 8,), "rope": (8,)},
}


def _attention(w: OpWorld, phase: str, kind: str, options: dict[str, Any], extra: str = "") -> OpRun:
    b, region = w.batch(phase), w.region(FIELDS[kind])
    kv_heads, value_dim = (KV_HEADS, DIM) if "v" in kind.split() else (1, DIM if kind == "k" else DIM - 8)
    made = {"norm": w.norm(DIM), "numbers": w.numbers(HEADS)}
    given: dict[str, Any] = {
        name: made.get(value, value) if isinstance(value, str) else value for name, value in options.items()
    }
    turn = given.pop("rope", TURN)
    rope = evolve(turn, inv_freq=w.here(turn.inv_freq))
    spec = evolve(AttentionSpec(0, HEADS, kv_heads, DIM, value_dim, DIM**-0.5, rope), **given)
    q, gate = w.rows(b, HEADS * DIM), None
    if extra == "beside":
        q, gate = w.rows(b, 2 * HEADS * DIM).view(-1, HEADS, 2 * DIM).chunk(2, -1)
    elif spec.gate:
        gate = w.rows(b, HEADS if spec.gate_per_head else HEADS * value_dim)
    k = None if kind == "v" else w.rows(b, 8 if kind == "latent rope" else kv_heads * DIM)
    v = None if kind == "k" else w.rows(b, kv_heads * value_dim)
    pooled = w.region({"k": (1, DIM)}, 2, "pooled") if extra.endswith("entries") else None
    picked = torch.tensor([[1, -1, 0]] * b.token.shape[0], dtype=torch.int32, device=w.device)
    more = None if pooled is None else (pooled, picked if extra == "some entries" else None)

    def call(ops: Any, b: Any, q: Any) -> Any:
        return ops.attention(b, q, k, v, region, spec, gate=gate, extra=more)

    return OpRun((b, q), call, tuple(region.fields.values()))


ATTENTIONS: Mapping[str, tuple[Any, ...]] = {
    "plain": ("k v", {}),
    "norms": ("k v", {"q_norm": "norm", "k_norm": "norm", "v_norm": "norm"}),
    "window, sinks, softcap": ("k v", {"window": 4, "sinks": "numbers", "softcap": 2.0}),
    "gate": ("k v", {"gate": "sigmoid"}),
    "gate per head": ("k v", {"gate": "softplus", "gate_per_head": True}),
    "gates beside queries": ("k v", {"gate": "sigmoid", "q_norm": "norm"}, "beside"),
    "values": ("v", {"k_norm": "norm"}),
    "keys": (
        "k",
        {"rope": RopeSpec(torch.logspace(0, -2, 4), "adjacent", part="last"), "inverse_output_rope": True},
    ),
    "latents": ("latent rope", {"rope": RopeSpec(torch.logspace(0, -2, 4), "adjacent", part="last")}),
    "all entries": ("k", {"window": 4}, "all entries"),
    "some entries": ("k", {"window": 4}, "some entries"),
}
for _phase in PHASES:
    cases("attention", _attention, {f"{n}, {_phase}": (_phase, *given) for n, given in ATTENTIONS.items()})


@case("append")
def _append(w: OpWorld) -> OpRun:
    b, region = w.batch("held"), w.region(FIELDS["k v"])

    def call(ops: Any, b: Any, key: Any, value: Any) -> Any:
        ops.append(b, key, value, region)
        return key

    return OpRun((b, w.rows(b, KV_HEADS, DIM), w.rows(b, KV_HEADS, DIM)), call, tuple(region.fields.values()))


@case("attend")
def _attend(w: OpWorld) -> OpRun:
    b, region = w.batch("held"), w.region(FIELDS["k v"])
    spec = AttentionSpec(0, HEADS, KV_HEADS, DIM, DIM, DIM**-0.5, None)
    return OpRun((b, w.rows(b, HEADS, DIM)), lambda ops, b, q: ops.attend(b, q, region, spec))


# --- state


def _conv_window(w: OpWorld, phase: str) -> OpRun:
    b, slot, weight = w.batch(phase), w.slot((3, 6), "shift", row=(6,)), w.numbers(6, 4)
    return OpRun(
        (b, w.rows(b, 6)),
        lambda ops, b, x: ops.conv_window(b, x, weight, slot),
        (slot.state, slot.log["row"]),
    )


def _memory(w: OpWorld, key_heads: int, by_channel: bool) -> SlotState:
    g = (4, 8) if by_channel else (4,)
    return w.slot((4, 8, 6), "delta_fold", k=(key_heads, 8), u=(4, 6), g=g)


def _state(slot: SlotState) -> tuple[Tensor, ...]:
    return (slot.state, *slot.log.values())


def _delta(w: OpWorld, kind: Any, phase: str) -> OpRun:
    b, kda = w.batch(phase), kind == "kda"
    key_heads = 4 if kda else 2
    channels = 2 * key_heads * 8 + 4 * 6
    conv, memory = w.slot((3, channels), "shift", row=(channels,)), _memory(w, key_heads, kda)
    a = w.numbers(4).abs()
    spec = DeltaSpec(
        layer=0, key_heads=key_heads, value_heads=4, key_dim=8, value_dim=6, norm=w.norm(6),
        conv=w.numbers(channels, 4), a=a if kda else -a, dt_bias=w.numbers(32 if kda else 4), kind=kind,
    )  # fmt: skip
    inputs = (b, w.rows(b, channels), w.rows(b, 24), w.rows(b, 4), w.rows(b, 32 if kda else 4))
    return OpRun(
        inputs,
        lambda ops, b, qkv, z, beta, decay: ops.delta(b, qkv, z, beta, decay, conv, memory, spec),
        (*_state(conv), *_state(memory)),
    )


def _linear_attention(w: OpWorld, phase: str) -> OpRun:
    b, memory = w.batch(phase), _memory(w, 4, False)
    spec = LinearAttentionSpec(0, 4, 8, 6, -w.numbers(4).abs(), 0.5)
    return OpRun(
        (b, w.rows(b, 32), w.rows(b, 32), w.rows(b, 24)),
        lambda ops, b, q, k, v: ops.linear_attention(b, q, k, v, memory, spec),
        _state(memory),
    )


def _delta_scan(w: OpWorld, phase: str) -> OpRun:
    b, memory = w.batch(phase), _memory(w, 2, False)
    g, beta = -w.rows(b, 4).abs(), w.rows(b, 4).sigmoid()
    inputs = (b, w.rows(b, 2, 8), 0.3 * w.rows(b, 2, 8), w.rows(b, 4, 6))
    return OpRun(inputs, lambda ops, b, q, k, v: ops.delta_scan(b, q, k, v, g, beta, memory), _state(memory))


def _compress(w: OpWorld, phase: str, overlap: bool) -> OpRun:
    b, features = w.batch(phase), 8 * (2 if overlap else 1)
    rope = RopeSpec(w.here(torch.ones(2)))
    spec = CompressSpec(4, 8, w.numbers(4, features), w.norm(8), rope, overlap)
    tail = w.slot((spec.rows, 2 * features), "shift", row=(2 * features,))
    out = w.region({"k": (1, 8)}, 4, "pooled")

    def call(ops: Any, b: Any, kv: Any, gate: Any) -> Any:
        ops.compress(b, kv, gate, tail, out, spec)
        return kv

    state = (*_state(tail), *out.fields.values(), *out.log.values())
    return OpRun((b, w.rows(b, features), w.rows(b, features)), call, state)


def _select(w: OpWorld, phase: str) -> OpRun:
    b, keys = w.batch(phase), w.region({"key": (8,)}, 2, "pooled")
    inputs = (b, w.rows(b, 3, 8), w.rows(b, 3))
    rope = RopeSpec(w.here(torch.ones(2)))
    return OpRun(inputs, lambda ops, b, q, weight: ops.select(b, q, weight, keys, 3, rope))


for _phase in PHASES:
    cases("conv_window", _conv_window, {_phase: (_phase,)})
    cases("delta", _delta, {f"{kind}, {_phase}": (kind, _phase) for kind in ("gated", "kda")})
    cases("linear_attention", _linear_attention, {_phase: (_phase,)})
    cases("delta_scan", _delta_scan, {_phase: (_phase,)})
    cases("compress", _compress, {f"{_phase}, overlap": (_phase, True), _phase: (_phase, False)})
    cases("select", _select, {_phase: (_phase,)})

COUNT = torch.tensor([2, 0, 3], dtype=torch.int32)


@case("shift")
def _shift(w: OpWorld) -> OpRun:
    log = {"row": w.numbers(3, 5, 2)}
    return OpRun((w.numbers(3, 4, 2),), lambda ops, state: ops.shift(state, log, w.here(COUNT)))


@case("delta_fold")
def _delta_fold(w: OpWorld) -> OpRun:
    k, u, g = w.numbers(3, 5, 2, 8), w.numbers(3, 5, 4, 6), -w.numbers(3, 5, 4).abs()
    log = {"k": k, "u": u, "g": g}
    return OpRun((w.numbers(3, 4, 8, 6),), lambda ops, state: ops.delta_fold(state, log, w.here(COUNT)))


@case("write_log")
def _write_log(w: OpWorld) -> OpRun:
    b, slot = w.batch("held"), w.slot((3, 6), "shift", row=(6,))

    def call(ops: Any, b: Any, x: Any) -> Any:
        ops.write_log(b, slot, "row", x)
        return x

    return OpRun((b, w.rows(b, 6)), call, (slot.log["row"],))


def _commit(w: OpWorld) -> Commit:
    path = torch.tensor([[0, 1, 3], [0, 1, -1]], dtype=torch.int32)
    return Commit(w.here(path), w.here(torch.tensor([3, 2], dtype=torch.int32)))


def _commit_pages(w: OpWorld, stride: int) -> OpRun:
    b = w.batch("held")
    region, commit = w.region({"k": (2, 4)}, stride), _commit(w)

    def call(ops: Any, b: Any, x: Any) -> Any:
        ops.commit_pages(b, commit, (region,))
        return x

    return OpRun((b, w.numbers(1)), call, tuple(region.fields.values()))


cases("commit_pages", _commit_pages, {"entry per token": (1,), "entry per two": (2,)})


@case("commit_slot")
def _commit_slot(w: OpWorld) -> OpRun:
    b, slot = w.batch("held"), w.slot((3, 6), "shift", row=(6,))
    commit = _commit(w)

    def call(ops: Any, b: Any, x: Any) -> Any:
        ops.commit_slot(b, commit, slot)
        return x

    return OpRun((b, w.numbers(1)), call, (slot.state,))


@case("commit_slots")
def _commit_slots(w: OpWorld) -> OpRun:
    b, memories = w.batch("held"), [_memory(w, 2, False), _memory(w, 2, True), _memory(w, 2, False)]
    slots = (w.slot((3, 6), "shift", row=(6,)), *memories, w.slot((3, 6), "shift", row=(6,)))
    commit = _commit(w)

    def call(ops: Any, b: Any, x: Any) -> Any:
        ops.commit_slots(b, commit, slots)
        return x

    return OpRun((b, w.numbers(1)), call, tuple(slot.state for slot in slots))
