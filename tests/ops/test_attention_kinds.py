"""Regions that keep less than keys and values, gates, RoPE at the end: against the plain forms and loops."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luce_core.contracts import AttentionSpec, Norm, Region, RopeSpec, SeqTable
from luce_core.errors import PluginError
from luce_core.model.batch import RowSet, make_batch
from luce_core.model.helpers import unit_norm
from luce_core.ops import build_ops

OPS = build_ops()
ENTRIES = 4


def numbers(*shape, seed=0):
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape), dtype=torch.float32)


def region(**fields):
    """fields: name -> shape of an entry."""
    pages = {
        name: numbers(12, ENTRIES, *shape, seed=90 + n).to(torch.float32)
        for n, (name, shape) in enumerate(fields.items())
    }
    return Region("kv", "full", pages, ENTRIES)


TABLE = {"full": SeqTable((7, 2, 9, 4, 1), tuple(range(0, 5 * ENTRIES, ENTRIES)))}


@st.composite
def trees(draw, most=6):
    size = draw(st.integers(1, most))
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]


def both(prompt, tree, call):
    """`call(batch, rows)` for a prompt in prefill, then a tree held behind it -> rows of both."""
    parts = []
    if prompt:
        b = make_batch("prefill", [RowSet(0, 0, [0] * prompt, TABLE)])
        parts.append(call(b, slice(0, prompt)))
    b = make_batch("held", [RowSet(0, prompt, [0] * len(tree), TABLE, parents=tree)])
    parts.append(call(b, slice(prompt, prompt + len(tree))))
    return torch.cat(parts)


# --- values only: K = V (Gemma 4)


@settings(max_examples=30, deadline=None)
@given(prompt=st.integers(0, 9), tree=trees(), seed=st.integers(0, 99), window=st.sampled_from([None, 3]))
def test_values_alone_equal_keys_and_values_of_one_projection(prompt, tree, seed, window):
    """Gemma 4's global layers: k = rope(w · rms(k0)), v = rms(k0). Trees put entries off their index."""
    heads, dim, rows = 4, 8, prompt + len(tree)
    q, k0 = numbers(rows, heads * dim, seed=seed), numbers(rows, 2 * dim, seed=seed + 1)
    rope = RopeSpec(torch.tensor([1.0, 0.3]))
    weight = Norm(numbers(dim, seed=seed + 2), 1e-6)
    spec = AttentionSpec(
        0, heads, 2, dim, dim, 1.0, rope, k_norm=weight, v_norm=unit_norm(dim, 1e-6), window=window
    )
    usual, values = region(k=(2, dim), v=(2, dim)), region(v=(2, dim))
    want = both(prompt, tree, lambda b, r: OPS.attention(b, q[r], k0[r], k0[r], usual, spec))
    got = both(prompt, tree, lambda b, r: OPS.attention(b, q[r], None, k0[r], values, spec))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_values_alone_are_rounded_before_keys_are_made_of_them():
    dim = 4
    spec = AttentionSpec(0, 1, 1, dim, dim, 1.0, None, k_norm=Norm(torch.full((dim,), 3.0), 1e-6))
    half = Region("kv", "full", {"v": torch.zeros(12, ENTRIES, 1, dim, dtype=torch.float16)}, ENTRIES)
    q, v = numbers(2, dim), numbers(2, dim, seed=1)
    b = make_batch("prefill", [RowSet(0, 0, [0, 0], TABLE)])
    got = OPS.attention(b, q, None, v, half, spec)
    value = v.half().double()
    scores = (q.double() @ (3.0 * value).T).masked_fill(
        torch.tensor([[False, True], [False, False]]), -torch.inf
    )
    torch.testing.assert_close(got.double(), scores.softmax(-1) @ value, rtol=1e-5, atol=1e-6)


# --- keys only: V is the start of K (DeepSeek-V4)


@settings(max_examples=20, deadline=None)
@given(prompt=st.integers(0, 9), tree=trees(), seed=st.integers(0, 99), value_dim=st.sampled_from([8, 5]))
def test_keys_alone_serve_as_values(prompt, tree, seed, value_dim):
    heads, dim, rows = 3, 8, prompt + len(tree)
    q, kv = numbers(rows, heads * dim, seed=seed), numbers(rows, dim, seed=seed + 1)
    rope = RopeSpec(torch.tensor([1.0, 0.3]), "adjacent", part="last")
    norm = Norm(numbers(dim, seed=seed + 2), 1e-6)
    spec = AttentionSpec(0, heads, 1, dim, value_dim, dim**-0.5, rope, k_norm=norm, sinks=numbers(heads))
    keys, usual = region(k=(1, dim)), region(k=(1, dim), v=(1, value_dim))

    def plainly(b, r):
        key = OPS.rope(OPS.head_rms(kv[r].view(-1, 1, dim), norm), b.position, rope)
        return OPS.attention(b, q[r], kv[r], key[..., :value_dim].reshape(-1, value_dim), usual, spec)

    got = both(prompt, tree, lambda b, r: OPS.attention(b, q[r], kv[r], None, keys, spec))
    torch.testing.assert_close(got, both(prompt, tree, plainly), rtol=1e-5, atol=1e-6)


def test_the_last_features_of_the_output_are_turned_back():
    heads, dim = 2, 6
    rope = RopeSpec(torch.tensor([0.7]), "adjacent", part="last")
    spec = AttentionSpec(0, heads, 1, dim, dim, 1.0, rope)
    q, kv = numbers(5, heads * dim), numbers(5, dim, seed=1)
    b = make_batch("prefill", [RowSet(0, 0, [0] * 5, TABLE)])
    plain = OPS.attention(b, q, kv, None, region(k=(1, dim)), spec).view(5, heads, dim)
    turned = attrs.evolve(spec, inverse_output_rope=True)
    got = OPS.attention(b, q, kv, None, region(k=(1, dim)), turned).view(5, heads, dim)
    assert got[..., :4].equal(plain[..., :4])
    for row in range(5):
        z = torch.complex(plain[row, :, 4], plain[row, :, 5]) * torch.exp(torch.tensor(-0.7j * row))
        torch.testing.assert_close(got[row, :, 4:], torch.stack([z.real, z.imag], -1), rtol=1e-5, atol=1e-6)


# --- latent and rotated part (MLA)


@settings(max_examples=30, deadline=None)
@given(prompt=st.integers(0, 9), tree=trees(), seed=st.integers(0, 99))
def test_absorbed_mla_equals_expanded_heads(prompt, tree, seed):
    """Ling's and DeepSeek's form: attention over latents with W_kb absorbed into q, W_vb behind; against
    full K, V.
    """
    heads, nope, turned, latent, value = 3, 5, 4, 6, 7
    rows = prompt + len(tree)
    q = numbers(rows, heads, nope + turned, seed=seed)
    kv = numbers(rows, latent + turned, seed=seed + 1)
    key_of, value_of = (
        numbers(heads, latent, nope, seed=seed + 2),
        numbers(heads, value, latent, seed=seed + 3),
    )
    norm = Norm(numbers(latent, seed=seed + 4), 1e-6)
    gate = numbers(rows, heads, seed=seed + 5)
    rope = RopeSpec(torch.tensor([1.0, 0.2]), "adjacent", part="last")
    scale = (nope + turned) ** -0.5
    spec = AttentionSpec(
        0, heads, 1, latent + turned, latent, scale, rope, v_norm=norm, gate="sigmoid", gate_per_head=True
    )
    pages = region(latent=(latent,), rope=(turned,))

    def absorbed(b, r):
        from luce_core.contracts import Linear

        into = Linear("k_b", heads * latent, nope, "F32", key_of.reshape(-1, nope))
        out = Linear("v_b", heads * value, latent, "F32", value_of.reshape(-1, latent))
        query = OPS.cat((OPS.head_linear(q[r][..., :nope], into), q[r][..., nope:]), -1)
        query = query.reshape(-1, heads * (latent + turned))
        y = OPS.attention(b, query, kv[r][:, latent:], kv[r][:, :latent], pages, spec, gate=gate[r])
        return OPS.head_linear(y.view(-1, heads, latent), out).reshape(-1, heads * value)

    full = AttentionSpec(0, heads, heads, nope + turned, value, scale, rope)
    usual = region(k=(heads, nope + turned), v=(heads, value))

    def expanded(b, r):
        hidden = OPS.rms(kv[r][:, :latent], norm)
        keys = torch.einsum("hln,tl->thn", key_of, hidden)
        keys = torch.cat((keys, kv[r][:, None, latent:].expand(-1, heads, -1)), -1).reshape(
            -1, heads * (nope + turned)
        )
        values = torch.einsum("hvl,tl->thv", value_of, hidden).reshape(-1, heads * value)
        y = OPS.attention(b, q[r].reshape(-1, heads * (nope + turned)), keys, values, usual, full)
        return (y.view(-1, heads, value) * gate[r].sigmoid()[..., None]).reshape(-1, heads * value)

    torch.testing.assert_close(
        both(prompt, tree, absorbed), both(prompt, tree, expanded), rtol=1e-4, atol=1e-5
    )


# --- gates, spans, errors


@pytest.mark.parametrize("kind", ["sigmoid", "softplus"])
@pytest.mark.parametrize("per_head", [False, True])
def test_gates(kind, per_head):
    heads, dim = 4, 6
    spec = AttentionSpec(0, heads, 2, dim, dim, 1.0, None)
    q, k, v = numbers(3, heads * dim), numbers(3, 2 * dim, seed=1), numbers(3, 2 * dim, seed=2)
    gate = 3 * numbers(3, heads if per_head else heads * dim, seed=3)
    b = make_batch("prefill", [RowSet(0, 0, [0] * 3, TABLE)])
    pages = region(k=(2, dim), v=(2, dim))
    plain = OPS.attention(b, q, k, v, pages, spec).double().view(3, heads, dim)
    factor = 1 / (1 + (-gate.double()).exp()) if kind == "sigmoid" else gate.double().exp().log1p()
    factor = factor.view(3, heads, -1).expand(3, heads, dim)
    gated = attrs.evolve(spec, gate=kind, gate_per_head=per_head)
    got = OPS.attention(b, q, k, v, pages, gated, gate=gate)
    torch.testing.assert_close(got.double(), (plain * factor).view(3, -1), rtol=1e-5, atol=1e-6)


def test_a_layer_can_stay_causal_within_a_span():
    spec = AttentionSpec(0, 2, 1, 4, 4, 1.0, None, bidirectional_spans=False)
    q, k, v = numbers(4, 8), numbers(4, 4, seed=1), numbers(4, 4, seed=2)
    b = make_batch("prefill", [RowSet(0, 0, [0] * 4, TABLE)])
    spanned = attrs.evolve(b, span=torch.tensor([-1, 0, 0, -1], dtype=torch.int32))
    pages = region(k=(1, 4), v=(1, 4))
    causal = OPS.attention(b, q, k, v, pages, spec)
    assert OPS.attention(spanned, q, k, v, pages, spec).equal(causal)
    seeing = attrs.evolve(spec, bidirectional_spans=True)
    assert not OPS.attention(spanned, q, k, v, pages, seeing).equal(causal)


def test_what_does_not_fit_is_said():
    spec = AttentionSpec(3, 2, 1, 4, 4, 1.0, None)
    q, k = numbers(1, 8), numbers(1, 4)
    b = make_batch("prefill", [RowSet(0, 0, [0], TABLE)])
    with pytest.raises(PluginError, match="'kv' has the fields v, so op 'attention' takes v"):
        OPS.attention(b, q, k, k, region(v=(1, 4)), spec)
    with pytest.raises(PluginError, match="'kv' has the fields k, v, so op 'attention' takes k and v"):
        OPS.attention(b, q, None, k, region(k=(1, 4), v=(1, 4)), spec)
    with pytest.raises(PluginError, match="region 'kv' has key"):
        OPS.attention(b, q, k, k, region(key=(1, 4)), spec)
    with pytest.raises(PluginError, match=r"layer 3 has the gate 'sigmoid' and got none"):
        OPS.attention(b, q, k, None, region(k=(1, 4)), attrs.evolve(spec, gate="sigmoid"))
    axes = RopeSpec(torch.tensor([1.0, 0.5]), sections=(1, 1))
    with pytest.raises(PluginError, match="several axes"):
        OPS.attention(
            make_batch("prefill", [RowSet(0, 0, [0], TABLE)], axes=2),
            q, None, k, region(v=(1, 4)), attrs.evolve(spec, rope=axes),
        )  # fmt: skip


def test_scores_of_long_chunks_never_exist_at_once(monkeypatch):
    """A mask of all 1,200 rows by all entries would be 1.4 million numbers."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from luce_core.ops import pages

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor):
                    self.numel = max(self.numel, tensor.numel())
            return out

    rows = 1200
    monkeypatch.setattr(pages, "SCORE_ELEMENTS", 1 << 17)
    fields = {"k": torch.zeros(1, rows, 1, 2), "v": torch.zeros(1, rows, 1, 2)}
    b = make_batch("prefill", [RowSet(0, 0, [0] * rows, {"full": SeqTable((0,), (0,))})])
    with Largest() as seen:
        OPS.attention(
            b, numbers(rows, 4), numbers(rows, 2), numbers(rows, 2), Region("kv", "full", fields, rows),
            AttentionSpec(0, 2, 1, 2, 2, 1.0, None),
        )  # fmt: skip
    assert seen.numel <= 1 << 17
