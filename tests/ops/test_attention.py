"""Paged attention against plain lists: the oracle keeps every sequence as keys and values in float64."""

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
from luce_core.ops import build_ops
from luce_core.ops import pages as module

OPS = build_ops()
HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 8, 6


def region(num_blocks=40, entries=4, dtype=torch.float32, window=None, group="full"):
    generator = torch.Generator().manual_seed(99)
    k = torch.randn(num_blocks, entries, KV_HEADS, DIM, generator=generator).to(dtype)  # garbage, not zeros
    v = torch.randn(num_blocks, entries, KV_HEADS, VALUE_DIM, generator=generator).to(dtype)
    return Region("kv", group, {"k": k, "v": v}, entries, 1, window)


def spec(**changes):
    fields = {"layer": 0, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "value_dim": VALUE_DIM}
    return AttentionSpec(**{**fields, "scale": DIM**-0.5, "rope": None, **changes})


def rows_of(rng, count):
    q = rng.standard_normal((count, HEADS * DIM))
    k = rng.standard_normal((count, KV_HEADS * DIM))
    v = rng.standard_normal((count, KV_HEADS * VALUE_DIM))
    return tuple(torch.tensor(x, dtype=torch.float32) for x in (q, k, v))


def rounded(x, dtype):
    return x.to(dtype).double().numpy()


class Oracle:
    """One sequence as lists: entries (index, k, v) that are committed."""

    def __init__(self, dtype=torch.float32):
        self.dtype = dtype
        self.index, self.k, self.v = [], [], []

    def add(self, index, k, v):
        self.index.append(index)
        self.k.append(rounded(k.view(KV_HEADS, DIM), self.dtype))
        self.v.append(rounded(v.view(KV_HEADS, VALUE_DIM), self.dtype))

    def read(self, q, index, spec, extra=()):
        """The answer of one row that sees everything here within the window, and `extra` entries."""
        entries = list(zip(self.index, self.k, self.v, strict=True)) + list(extra)
        if spec.window is not None:
            entries = [entry for entry in entries if entry[0] > index - spec.window]
        q = q.double().numpy().reshape(HEADS, DIM)
        out = np.zeros((HEADS, VALUE_DIM))
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            scores = np.array([q[head] @ k[kv_head] for _, k, _ in entries]) * spec.scale
            if spec.softcap:
                scores = spec.softcap * np.tanh(scores / spec.softcap)
            weight = np.exp(scores)
            total = weight.sum() + (np.exp(spec.sinks[head].item()) if spec.sinks is not None else 0.0)
            out[head] = sum(w * v[kv_head] for w, (_, _, v) in zip(weight, entries, strict=True)) / total
        return out.reshape(-1)


def table(blocks, entries, firsts=None):
    return SeqTable(tuple(blocks), tuple(firsts or range(0, len(blocks) * entries, entries)))


def run(phase, sets, qkv, region, spec, **more):
    batch = make_batch(phase, sets)
    return OPS.attention(batch, *qkv, region, spec, **more)


OPTIONS = st.fixed_dictionaries(
    {
        "window": st.sampled_from([None, 1, 3, 5, 100]),
        "softcap": st.sampled_from([0.0, 2.0]),
        "sinks": st.sampled_from([None, torch.tensor([0.5, -1.0, 2.0, 0.0])]),
    }
)
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    chunks=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=3),
    options=OPTIONS,
    dtype=DTYPES,
    scores=st.sampled_from([1 << 24, 40]),
)
def test_prefill_in_any_chunks_and_company_equals_the_dense_answer(seed, chunks, options, dtype, scores):
    """chunks: per sequence, sizes of its chunks; round r of all sequences is one batch."""
    rng = np.random.default_rng(seed)
    pages, how = region(dtype=dtype), spec(**options)
    deck = rng.permutation(40).tolist()
    tables = [table(deck[8 * s : 8 * s + 8], 4) for s in range(len(chunks))]
    oracles = [Oracle(dtype) for _ in chunks]
    lengths = [0] * len(chunks)
    for turn in range(3):
        going = [s for s, sizes in enumerate(chunks) if turn < len(sizes)]
        if not going:
            break
        counts = [chunks[s][turn] for s in going]
        sets = [
            RowSet(s, lengths[s], [0] * n, {"full": tables[s]}) for s, n in zip(going, counts, strict=True)
        ]
        q, k, v = rows_of(rng, sum(counts))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "SCORE_ELEMENTS", scores)
            got = run("prefill", sets, (q, k, v), pages, how)
        row = 0
        for s, count in zip(going, counts, strict=True):
            for _ in range(count):
                oracles[s].add(lengths[s], k[row], v[row])
                want = oracles[s].read(q[row], lengths[s], how)
                np.testing.assert_allclose(got[row].numpy(), want, rtol=2e-4, atol=2e-5)
                lengths[s] += 1
                row += 1


@st.composite
def trees(draw):
    size = draw(st.integers(1, 7))
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    parents=st.lists(trees(), min_size=1, max_size=3),
    committed=st.lists(st.integers(0, 11), min_size=3, max_size=3),
    options=OPTIONS,
    dtype=DTYPES,
    scores=st.sampled_from([1 << 24, 40]),
)
def test_held_rows_see_committed_ones_and_ancestors(seed, parents, committed, options, dtype, scores):
    rng = np.random.default_rng(seed)
    pages, how = region(dtype=dtype), spec(**options)
    deck = rng.permutation(40).tolist()
    oracles, sets = [], []
    for s, tree in enumerate(parents):
        blocks = {"full": table(deck[8 * s : 8 * s + 8], 4)}
        oracle = Oracle(dtype)
        if committed[s]:
            _, k, v = own = rows_of(rng, committed[s])
            run("prefill", [RowSet(s, 0, [0] * committed[s], blocks)], own, pages, how)
            for index in range(committed[s]):
                oracle.add(index, k[index], v[index])
        oracles.append(oracle)
        sets.append(RowSet(s, committed[s], [0] * len(tree), blocks, parents=tree))
    q, k, v = rows_of(rng, sum(map(len, parents)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SCORE_ELEMENTS", scores)
        got = run("held", sets, (q, k, v), pages, how)
    start = 0
    for s, tree in enumerate(parents):
        for row in range(len(tree)):
            path = ancestors(tree, row)
            extra = Oracle(dtype)
            for depth, above in enumerate(path):
                extra.add(committed[s] + depth, k[start + above], v[start + above])
            seen = list(zip(extra.index, extra.k, extra.v, strict=True))
            want = oracles[s].read(q[start + row], committed[s] + len(path) - 1, how, seen)
            np.testing.assert_allclose(got[start + row].numpy(), want, rtol=2e-4, atol=2e-5)
        start += len(tree)


def ancestors(tree, row):
    path = [row]
    while tree[path[-1]] >= 0:
        path.append(tree[path[-1]])
    return path[::-1]


def test_more_than_64_held_rows_need_a_second_word_of_bits():
    rng = np.random.default_rng(3)
    pages, how = region(), spec()
    count = 90
    tree = [-1, *(node // 2 for node in range(count - 1))]
    q, k, v = rows_of(rng, count)
    sets = [RowSet(0, 0, [0] * count, {"full": table(range(40), 4)}, parents=tree)]
    got = run("held", sets, (q, k, v), pages, how)
    for row in (0, 63, 64, 65, 89):
        oracle = Oracle()
        path = ancestors(tree, row)
        for depth, above in enumerate(path):
            oracle.add(depth, k[above], v[above])
        np.testing.assert_allclose(got[row].numpy(), oracle.read(q[row], len(path) - 1, how), atol=2e-5)


def test_blocks_that_were_evicted_leave_a_gap_and_nothing_else():
    """A sequence of 16 tokens whose tokens 4..11 are gone: what is left is read, by its own indices."""
    rng = np.random.default_rng(4)
    pages, how = region(), spec(window=14)
    q, k, v = rows_of(rng, 16)
    run("prefill", [RowSet(0, 0, [0] * 16, {"full": table([7, 3, 9, 1], 4)})], (q, k, v), pages, how)
    left = {"full": table([7, 1, 5], 4, firsts=[0, 12, 16])}
    q1, k1, v1 = rows_of(rng, 1)
    got = run("held", [RowSet(0, 16, [0], left)], (q1, k1, v1), pages, how)
    oracle = Oracle()
    for index in [*range(4), *range(12, 16)]:
        oracle.add(index, k[index], v[index])
    oracle.add(16, k1[0], v1[0])
    np.testing.assert_allclose(got[0].numpy(), oracle.read(q1[0], 16, how), atol=2e-5)
    assert oracle.read(q1[0], 16, spec()) != pytest.approx(got[0].numpy())  # the window cut tokens 0..2


def test_a_write_into_an_evicted_gap_is_refused():
    pages = region()
    sets = [RowSet(0, 6, [0], {"full": table([0, 1], 4, firsts=[0, 12])})]
    with pytest.raises(IndexError, match="token 6"):
        run("held", sets, rows_of(np.random.default_rng(0), 1), pages, spec())


def test_padding_rows_write_nothing_and_give_zeros_where_nothing_is_seen():
    pages = region()
    before = {name: field.clone() for name, field in pages.fields.items()}
    qkv = rows_of(np.random.default_rng(5), 3)
    blocks = {"full": table([2], 4)}
    got = run("held", [RowSet(0, 0, [0, 0, 0], blocks, parents=[-1, -2, -2])], qkv, pages, spec())
    assert torch.equal(got[1:], torch.zeros(2, HEADS * VALUE_DIM))
    for name, field in pages.fields.items():
        changed = (field != before[name]).flatten(2).any(-1).nonzero().tolist()
        assert changed == [[2, 0]]


def test_rows_of_a_bidirectional_span_see_each_other():
    rng = np.random.default_rng(6)
    pages, how = region(), spec()
    q, k, v = rows_of(rng, 6)
    batch = make_batch("prefill", [RowSet(0, 0, [0] * 6, {"full": table([0, 1], 4)})])
    span = torch.tensor([-1, 0, 0, 0, -1, -1], dtype=torch.int32)
    got = OPS.attention(attrs.evolve(batch, span=span), q, k, v, pages, how)
    sees = {0: 1, 1: 4, 2: 4, 3: 4, 4: 5, 5: 6}
    for row, count in sees.items():
        oracle = Oracle()
        for index in range(count):
            oracle.add(index, k[index], v[index])
        np.testing.assert_allclose(got[row].numpy(), oracle.read(q[row], 100, how), atol=2e-5)


def test_head_norms_rope_and_gate_come_in_their_order():
    rng = np.random.default_rng(7)
    weights = [torch.tensor(rng.uniform(0.5, 2, n), dtype=torch.float32) for n in (DIM, DIM, VALUE_DIM)]
    norms = [Norm(weight, 1e-6) for weight in weights]
    rope = RopeSpec(torch.tensor([1.0, 0.1]), "halves")
    how = spec(q_norm=norms[0], k_norm=norms[1], v_norm=norms[2], rope=rope, gate="sigmoid")
    q, k, v = rows_of(rng, 5)
    gate = torch.tensor(rng.standard_normal((5, HEADS * VALUE_DIM)), dtype=torch.float32)
    pages = region()
    sets = [RowSet(0, 0, [0] * 5, {"full": table([4, 2], 4)})]
    got = run("prefill", sets, (q, k, v), pages, how, gate=gate)

    def normed(x, norm, width):
        x = x.double().numpy().reshape(5, -1, width)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * norm.weight.double().numpy()

    def turned(x):
        out = x.copy()
        for token in range(5):
            for pair, frequency in enumerate((1.0, 0.1)):
                z = (x[token, :, pair] + 1j * x[token, :, pair + 2]) * np.exp(1j * token * frequency)
                out[token, :, pair], out[token, :, pair + 2] = z.real, z.imag
        return out

    query, key = turned(normed(q, norms[0], DIM)), turned(normed(k, norms[1], DIM))
    value = normed(v, norms[2], VALUE_DIM)
    oracle = Oracle(torch.float64)
    for row in range(5):
        oracle.add(row, torch.tensor(key[row]), torch.tensor(value[row]))
        want = oracle.read(torch.tensor(query[row]), row, spec())
        want = want / (1 + np.exp(-gate[row].double().numpy()))
        np.testing.assert_allclose(got[row].numpy(), want, atol=2e-5)


@pytest.mark.parametrize("size", [-200.0, 200.0])
def test_sinks_far_from_the_scores_do_not_overflow(size):
    rng = np.random.default_rng(10)
    q, k, v = rows_of(rng, 3)
    sets = [RowSet(0, 0, [0] * 3, {"full": table([4], 4)})]
    got = run("prefill", sets, (q, k, v), region(), spec(sinks=torch.full((HEADS,), size)))
    want = torch.zeros_like(got) if size > 0 else run("prefill", sets, (q, k, v), region(), spec())
    torch.testing.assert_close(got, want)


def test_a_layer_without_keys_reads_what_another_layer_wrote():
    rng = np.random.default_rng(8)
    pages = region()
    sets = [RowSet(0, 0, [0] * 5, {"full": table([4, 2], 4)})]
    q, k, v = rows_of(rng, 5)
    first = run("prefill", sets, (q, k, v), pages, spec())
    assert torch.equal(run("prefill", sets, (q, None, None), pages, spec()), first)


def test_the_output_can_be_turned_back():
    rng = np.random.default_rng(9)
    rope = RopeSpec(torch.tensor([1.0, 0.3, 0.05]), "adjacent")
    q, k, v = rows_of(rng, 1)
    blocks = {"full": table([4], 4)}
    q1, k1, v1 = rows_of(rng, 1)
    pages = region()
    run("prefill", [RowSet(0, 0, [0], blocks)], (q, k, v), pages, spec(rope=rope))
    plain = run("held", [RowSet(0, 1, [0], blocks)], (q1, k1, v1), pages, spec(rope=rope))
    inverse = spec(rope=rope, inverse_output_rope=True)
    back = run("held", [RowSet(0, 1, [0], blocks)], (q1, k1, v1), pages, inverse)
    position = torch.tensor([[1]], dtype=torch.int32)
    again = OPS.rope(back.view(1, HEADS, VALUE_DIM), position, rope)
    torch.testing.assert_close(again.view(1, -1), plain)


def test_what_the_reference_cannot_read_is_said():
    pages = region()
    latent = Region("latent", "full", {"latent": pages.fields["k"]}, 4)
    sets = [RowSet(0, 0, [0], {"full": table([0], 4)})]
    qkv = rows_of(np.random.default_rng(0), 1)
    with pytest.raises(PluginError, match="'latent'"):
        run("prefill", sets, qkv, latent, spec())
    with pytest.raises(PluginError, match="compressed entries are one field"):
        run("prefill", sets, qkv, pages, spec(), extra=(pages, None))
    with pytest.raises(PluginError, match="one per 4"):
        run("prefill", sets, qkv, Region("kv", "full", pages.fields, 4, stride=4), spec())
