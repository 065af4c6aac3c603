"""Linear attention: the recurrence as a loop in float64 is the oracle, and Hugging Face's whole layers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from luce_core.contracts import Commit, DeltaSpec, LinearAttentionSpec, Norm, SlotState
from luce_core.model.batch import RowSet, make_batch
from luce_core.ops import build_ops, delta

OPS = build_ops()
KEY_HEADS, VALUE_HEADS, KEY, VALUE = 2, 6, 4, 3
KINDS = ["gated", "kda", "plain"]


def numbers(*shape, seed=0):
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape), dtype=torch.float32)


def rows_of(kind, count, seed):
    """q, k, v, g, beta of `count` rows; k of unit length, as the op gets it."""
    key_heads = VALUE_HEADS if kind == "kda" else KEY_HEADS
    q, k = numbers(count, key_heads, KEY, seed=seed), numbers(count, key_heads, KEY, seed=seed + 1)
    shape = (count, VALUE_HEADS, KEY) if kind == "kda" else (count, VALUE_HEADS)
    g = -numbers(*shape, seed=seed + 3).abs()
    beta = None if kind == "plain" else numbers(count, VALUE_HEADS, seed=seed + 4).sigmoid()
    v = numbers(count, VALUE_HEADS, VALUE, seed=seed + 2)
    return q, torch.nn.functional.normalize(k, dim=-1), v, g, beta


def picked(rows, index):
    return [None if part is None else part[index] for part in rows]


def recurrence(rows, memory=None):
    """(o, last M) of a chain of rows, one after the other, float64."""
    q, k, v, g, beta = ([None] * len(rows[0]) if part is None else part.double() for part in rows)
    memory = torch.zeros(VALUE_HEADS, KEY, VALUE, dtype=torch.float64) if memory is None else memory.clone()
    out = torch.zeros(len(q), VALUE_HEADS, VALUE, dtype=torch.float64)
    for t in range(len(q)):
        for h in range(VALUE_HEADS):
            key, query = k[t, h % k.shape[1]], q[t, h % k.shape[1]]
            kept = g[t, h].exp().view(-1, 1) * memory[h]
            u = v[t, h] if beta[t] is None else beta[t][h] * (v[t, h] - kept.T @ key)
            memory[h] = kept + torch.outer(key, u)
            out[t, h] = memory[h].T @ query
    return out, memory


def state_of(kind, slots=4, held=90):
    key_heads = VALUE_HEADS if kind == "kda" else KEY_HEADS
    g = (VALUE_HEADS, KEY) if kind == "kda" else (VALUE_HEADS,)
    shapes = {"k": (key_heads, KEY), "u": (VALUE_HEADS, VALUE), "g": g}
    log = {name: torch.full((slots, held, *shape), 99.0) for name, shape in shapes.items()}
    return SlotState("m", torch.zeros(slots, VALUE_HEADS, KEY, VALUE), log, "delta_fold")


def prefill(state, sets, rows):
    return OPS.delta_scan(make_batch("prefill", sets), *rows, state)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 99),
    kind=st.sampled_from(KINDS),
    chunks=st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), min_size=1, max_size=3),
    size=st.sampled_from([1, 2, 3, 5, 64]),
    block=st.sampled_from([1 << 24, 1]),
)
def test_prefill_in_any_chunks_is_the_recurrence(seed, kind, chunks, size, block):
    """chunks: rows of two sequences in each batch. size: rows worked off at once."""
    counts = [sum(chunk[s] for chunk in chunks) for s in range(2)]
    texts = [rows_of(kind, counts[s], seed + 10 * s) for s in range(2)]
    state, out, at = state_of(kind), [[], []], [0, 0]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CHUNK_ROWS", "CHUNK_ROWS_BY_CHANNEL"):
            patch.setattr(delta, name, size)
        patch.setattr(delta, "PRODUCT_ELEMENTS", block)
        for chunk in chunks:
            going = [s for s in range(2) if chunk[s]]
            if not going:
                continue
            parts = [picked(texts[s], slice(at[s], at[s] + chunk[s])) for s in going]
            rows = [None if one[0] is None else torch.cat(one) for one in zip(*parts, strict=True)]
            sets = [RowSet(3 - s, at[s], [0] * chunk[s], {}) for s in going]
            got = prefill(state, sets, rows)
            for s, part in zip(going, torch.split(got, [chunk[s] for s in going]), strict=True):
                out[s].append(part)
                at[s] += chunk[s]
    for s in range(2):
        want, memory = recurrence(texts[s])
        if counts[s]:
            torch.testing.assert_close(torch.cat(out[s]).double(), want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state.state[3 - s].double(), memory, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 7, 16, 64, 128])
def test_every_chunk_size_gives_the_same(monkeypatch, kind, size):
    rows = rows_of(kind, 150, 3)
    for name in ("CHUNK_ROWS", "CHUNK_ROWS_BY_CHANNEL"):
        monkeypatch.setattr(delta, name, size)
    state = state_of(kind)
    got = prefill(state, [RowSet(1, 0, [0] * 150, {})], rows)
    want, memory = recurrence(rows)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.state[1].double(), memory, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["gated", "kda"])
def test_strong_decay_does_not_overflow(kind):
    q, k, v, g, beta = rows_of(kind, 70, 4)
    rows = (q, k, v, 20 * g, beta)
    state = state_of(kind)
    got = prefill(state, [RowSet(0, 0, [0] * 70, {})], rows)
    torch.testing.assert_close(got.double(), recurrence(rows)[0], rtol=1e-4, atol=1e-5)


@st.composite
def trees(draw, most=9):
    size = draw(st.integers(1, most))
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]


def path_to(tree, row):
    path = [row]
    while tree[path[-1]] >= 0:
        path.append(tree[path[-1]])
    return path[::-1]


def commit_of(paths):
    longest = max(1, *map(len, paths))
    padded = [path + [-1] * (longest - len(path)) for path in paths]
    counts = torch.tensor([len(path) for path in paths], dtype=torch.int32)
    return Commit(torch.tensor(padded, dtype=torch.int32), counts)


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    seed=st.integers(0, 99),
    kind=st.sampled_from(KINDS),
    sequences=st.lists(trees(), min_size=1, max_size=3),
)
def test_held_rows_follow_their_path_and_a_commit_continues_it(data, seed, kind, sequences):
    before = [data.draw(st.integers(0, 5)) for _ in sequences]
    texts = [rows_of(kind, n, seed + 10 * s) for s, n in enumerate(before)]
    state = state_of(kind)
    for s, count in enumerate(before):
        if count:
            prefill(state, [RowSet(s, 0, [0] * count, {})], texts[s])
    committed = state.state.clone()
    held = [rows_of(kind, len(tree), seed + 10 * s + 5) for s, tree in enumerate(sequences)]
    rows = [None if one[0] is None else torch.cat(one) for one in zip(*held, strict=True)]
    sets = [RowSet(s, before[s], [0] * len(tree), {}, parents=tree) for s, tree in enumerate(sequences)]
    b = make_batch("held", sets)
    got = OPS.delta_scan(b, *rows, state)
    assert state.state.equal(committed)
    at = 0
    for s, tree in enumerate(sequences):
        start = recurrence(texts[s])[1]
        for row in range(len(tree)):
            want, _ = recurrence(picked(held[s], path_to(tree, row)), start)
            torch.testing.assert_close(got[at + row].double(), want[-1], rtol=1e-4, atol=1e-5)
        at += len(tree)
    paths = [path_to(tree, data.draw(st.integers(0, len(tree) - 1))) for tree in sequences]
    paths = [path if data.draw(st.booleans()) else [] for path in paths]
    OPS.commit_slot(b, commit_of(paths), state)
    for s, path in enumerate(paths):
        _, want = recurrence(picked(held[s], path), recurrence(texts[s])[1]) if path else (0, committed[s])
        torch.testing.assert_close(state.state[s].double(), want.double(), rtol=1e-4, atol=1e-5)


def test_more_than_64_held_rows():
    tree = [-1, *(node // 2 for node in range(79))]
    rows = rows_of("gated", 80, 8)
    got = OPS.delta_scan(
        make_batch("held", [RowSet(0, 0, [0] * 80, {}, parents=tree)]), *rows, state_of("gated")
    )
    for row in (0, 63, 64, 79):
        want, _ = recurrence(picked(rows, path_to(tree, row)))
        torch.testing.assert_close(got[row].double(), want[-1], rtol=1e-4, atol=1e-5)


def test_padding_rows_disturb_nobody():
    rows = rows_of("gated", 4, 9)
    state = state_of("gated")
    b = make_batch("held", [RowSet(0, 0, [0] * 4, {}, parents=[-1, 0, -2, -2])])
    got = OPS.delta_scan(b, *rows, state)
    torch.testing.assert_close(got[:2].double(), recurrence(picked(rows, slice(2)))[0], rtol=1e-4, atol=1e-5)
    assert bool(got.isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_fold_does_not_depend_on_how_the_path_was_cut(kind):
    """Bit for bit: decoding one by one and accepting many at once leave the same state."""
    _, k, v, g, _ = rows_of(kind, 3, 5)
    log = {"k": k[None], "u": v[None], "g": g[None]}
    start = numbers(1, VALUE_HEADS, KEY, VALUE, seed=6)
    at_once = OPS.delta_fold(start, log, torch.tensor([3]))
    one_by_one = start
    for step in range(3):
        part = {name: field[:, step : step + 1] for name, field in log.items()}
        one_by_one = OPS.delta_fold(one_by_one, part, torch.tensor([1]))
    assert at_once.equal(one_by_one)
    assert OPS.delta_fold(start, log, torch.tensor([0])).equal(start)


class Largest(TorchDispatchMode):
    """The largest tensor any call made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_memory_grows_with_the_rows_and_not_with_their_square(kind):
    count = 700
    rows = rows_of(kind, count, 7)
    with Largest() as seen:
        prefill(state_of(kind), [RowSet(0, 0, [0] * count, {})], rows)
    assert seen.numel <= 2 * max(part.numel() for part in rows if part is not None) + VALUE_HEADS * 64**2


# --- the whole layer


def slots_for(spec, slots=3, held=16):
    channels = spec.conv.shape[0]
    conv = SlotState(
        "conv", torch.zeros(slots, spec.conv.shape[1] - 1, channels),
        {"row": torch.zeros(slots, held, channels)}, "shift",
    )  # fmt: skip
    g = (spec.value_heads, spec.key_dim) if spec.kind == "kda" else (spec.value_heads,)
    shapes = {"k": (spec.key_heads, spec.key_dim), "u": (spec.value_heads, spec.value_dim), "g": g}
    log = {name: torch.zeros(slots, held, *shape) for name, shape in shapes.items()}
    memory = torch.zeros(slots, spec.value_heads, spec.key_dim, spec.value_dim)
    return conv, SlotState("m", memory, log, "delta_fold")


def cut_three_ways(layer, want, tolerance):
    """layer(batch, rows, slots) against the whole: one prefill; prefill and decode; a held chain."""
    count = want.shape[0]
    whole = layer(make_batch("prefill", [RowSet(0, 0, [0] * count, {})]), slice(None), 0)
    torch.testing.assert_close(whole, want, rtol=0, atol=tolerance)
    half = count - 5
    parts = [layer(make_batch("prefill", [RowSet(1, 0, [0] * half, {})]), slice(half), 1)]
    parts.append(layer(make_batch("held", [RowSet(1, half, [0] * 5, {})]), slice(half, count), 1))
    torch.testing.assert_close(torch.cat(parts), want, rtol=0, atol=tolerance)


def test_a_gated_deltanet_layer_equals_hugging_faces():
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    config = Qwen3_5TextConfig(
        hidden_size=16, num_hidden_layers=4, linear_key_head_dim=8, linear_value_head_dim=6,
        linear_num_key_heads=2, linear_num_value_heads=6, rms_norm_eps=1e-6,
    )  # fmt: skip
    torch.manual_seed(0)
    layer = Qwen3_5GatedDeltaNet(config, 0)
    for name, parameter in layer.named_parameters():
        torch.nn.init.normal_(parameter, std=0.5)
        if name == "norm.weight":
            parameter.data += 1
    x = numbers(150, 16)
    with torch.no_grad():
        want = layer(x[None])[0]
        mine = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    # Files tile the value heads: file head rho · Kh + kappa is Hugging Face's kappa · r + rho.
    heads = torch.arange(6).view(2, 3).T.reshape(-1)
    values = (heads[:, None] * 6 + torch.arange(6)).reshape(-1)
    channels = torch.cat((torch.arange(32), 32 + values))
    spec = DeltaSpec(
        layer=0, key_heads=2, value_heads=6, key_dim=8, value_dim=6, norm=Norm(mine["norm.weight"], 1e-6),
        conv=mine["conv1d.weight"].squeeze(1)[channels], a=-mine["A_log"].exp()[heads],
        dt_bias=mine["dt_bias"][heads],
    )  # fmt: skip
    slots = slots_for(spec)

    def run(b, rows, slot):
        part = x[rows]
        y = OPS.delta(
            b, part @ mine["in_proj_qkv.weight"][channels].T, part @ mine["in_proj_z.weight"][values].T,
            part @ mine["in_proj_b.weight"][heads].T, part @ mine["in_proj_a.weight"][heads].T, *slots, spec,
        )  # fmt: skip
        return y @ mine["out_proj.weight"][:, values].T

    cut_three_ways(run, want, 2e-5 * float(want.abs().max()))


@pytest.mark.parametrize("lower", [-5.0, -1.0])
def test_a_kimi_delta_attention_layer_equals_hugging_faces(lower):
    from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDeltaAttention

    config = SimpleNamespace(
        hidden_size=12, linear_num_heads=3, linear_head_dim=8, linear_conv_kernel_dim=4, hidden_act="silu",
        kda_safe_gate=True, kda_lower_bound=lower, rms_norm_eps=1e-6,
    )  # fmt: skip
    torch.manual_seed(1)
    layer = BailingHybridDeltaAttention(config, 0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = numbers(70, 12)
    with torch.no_grad():
        want = layer(x[None])[0]
        mine = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    spec = DeltaSpec(
        layer=0, key_heads=3, value_heads=3, key_dim=8, value_dim=8, norm=Norm(mine["o_norm.weight"], 1e-6),
        conv=mine["conv1d.weight"].squeeze(1), a=mine["forget_gate.A_log"].exp(),
        dt_bias=mine["forget_gate.dt_bias"], kind="kda", lower=lower,
    )  # fmt: skip
    slots = slots_for(spec)

    def run(b, rows, slot):
        part = x[rows]
        qkv = torch.cat([part @ mine[f"{name}_proj.weight"].T for name in "qkv"], -1)
        y = OPS.delta(
            b, qkv, part @ mine["g_proj.weight"].T, part @ mine["b_proj.weight"].T,
            part @ mine["forget_gate.f_proj.weight"].T, *slots, spec,
        )  # fmt: skip
        return y @ mine["o_proj.weight"].T

    cut_three_ways(run, want, 1e-4 * float(want.abs().max()))


def test_lightning_attention_is_the_recurrence_without_the_delta():
    """One decay per head, as in MiniMax and Ling 2.5: o_t = Σ_s d^(t-s) (q_t · k_s) v_s, s up to t."""
    heads, key, value, count = 3, 4, 5, 80
    q, k, v = (numbers(count, heads * n, seed=s) for s, n in enumerate((key, key, value)))
    slope = torch.tensor([0.1, 0.5, 0.0])
    spec = LinearAttentionSpec(0, heads, key, value, -slope, scale=0.5)
    shapes = {"k": (heads, key), "u": (heads, value), "g": (heads,)}
    log = {name: torch.zeros(2, 8, *shape) for name, shape in shapes.items()}
    state = SlotState("m", torch.zeros(2, heads, key, value), log, "delta_fold")
    b = make_batch("prefill", [RowSet(1, 0, [0] * count, {})])
    got = OPS.linear_attention(b, q, k, v, state, spec).view(count, heads, value)
    for h in range(heads):
        rows = [part.double().view(count, heads, -1)[:, h] for part in (q, k, v)]
        place = torch.arange(count, dtype=torch.float64)
        since = place[:, None] - place
        decay = torch.where(since >= 0, (-slope[h].double() * since).exp(), 0.0)
        want = 0.5 * (rows[0] @ rows[1].T * decay) @ rows[2]
        torch.testing.assert_close(got[:, h].double(), want, rtol=1e-4, atol=1e-4)
