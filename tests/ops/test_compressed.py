"""Compressed entries: pooling, selection and attention against loops over whole texts in float64."""

from __future__ import annotations

import math

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luce_core.cache.layout import alive_rows
from luce_core.contracts import (
    AttentionSpec,
    Commit,
    CompressSpec,
    Norm,
    Region,
    RopeSpec,
    SeqTable,
    SlotState,
)
from luce_core.errors import PluginError
from luce_core.model.batch import RowSet, make_batch
from luce_core.ops import build_ops, pages

OPS = build_ops()
WIDTH, HEADS, BLOCK_TOKENS, SLOTS, HELD = 4, 3, 12, 4, 12
ROPE = RopeSpec(torch.tensor([0.8]), "adjacent", part="last")


def numbers(*shape, seed=0):
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape), dtype=torch.float32)


def spec_of(stride, overlap, rope=ROPE):
    features = WIDTH * (2 if overlap else 1)
    return CompressSpec(
        stride, WIDTH, numbers(stride, features, seed=70), Norm(numbers(WIDTH, seed=71), 1e-6), rope, overlap
    )


def state_of(spec):
    """(tail, region of entries); what nobody wrote is garbage."""
    features = 2 * spec.bias.shape[1]
    log = {"row": torch.full((SLOTS, HELD, features), 99.0)}
    tail = SlotState("tail", torch.zeros(SLOTS, spec.rows, features), log, "shift", spec.stride)
    entries = BLOCK_TOKENS // spec.stride
    shape = (1, WIDTH)
    fields = {"k": numbers(20, entries, *shape, seed=72)}
    logged = {"k": torch.full((SLOTS, HELD, *shape), 99.0)}
    return tail, Region("c", "entries", fields, entries, spec.stride, log=logged)


def entry_by_loops(kv, gate, number, spec):
    """Entry `number` of a text whose rows are kv and gate, lists of float64 rows."""
    pooled = []
    for channel in range(WIDTH):
        items = []
        if spec.overlap and number > 0:
            for t in range((number - 1) * spec.stride, number * spec.stride):
                items.append((kv[t][channel], gate[t][channel] + spec.bias[t % spec.stride, channel].item()))
        shift = WIDTH if spec.overlap else 0
        for t in range(number * spec.stride, (number + 1) * spec.stride):
            own = channel + shift
            items.append((kv[t][own], gate[t][own] + spec.bias[t % spec.stride, own].item()))
        total = sum(math.exp(g) for _, g in items)
        pooled.append(sum(x * math.exp(g) for x, g in items) / total)
    size = math.sqrt(sum(x * x for x in pooled) / WIDTH + 1e-6)
    entry = np.array([x / size * w for x, w in zip(pooled, spec.norm.weight.tolist(), strict=True)])
    if spec.rope is not None:
        turned = complex(entry[-2], entry[-1]) * np.exp(1j * 0.8 * number * spec.stride)
        entry[-2:] = turned.real, turned.imag
    return entry


class Text:
    """Rows of one text, as lists of float64."""

    def __init__(self, kv=(), gate=()):
        self.kv, self.gate = list(kv), list(gate)

    def __add__(self, other):
        return Text([*self.kv, *other.kv], [*self.gate, *other.gate])

    def entries(self, spec):
        count = len(self.kv) // spec.stride
        return [entry_by_loops(self.kv, self.gate, n, spec) for n in range(count)]


def text_of(count, spec, seed):
    features = spec.bias.shape[1]
    kv, gate = numbers(count, features, seed=seed), numbers(count, features, seed=seed + 1)
    return kv, gate, Text(kv.double().numpy(), gate.double().numpy())


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


def table_of(s, deck):
    blocks = tuple(deck[5 * s : 5 * s + 5])
    return {
        "entries": SeqTable(blocks, tuple(range(0, 5 * BLOCK_TOKENS, BLOCK_TOKENS))),
        "near": SeqTable(blocks, tuple(range(0, 5 * BLOCK_TOKENS, BLOCK_TOKENS))),
    }


def committed_entries(region, table, count):
    flat = region.fields["k"].view(-1, WIDTH)
    per_block = region.block_entries
    return [flat[table["entries"].blocks[n // per_block] * per_block + n % per_block] for n in range(count)]


SHAPES = st.sampled_from([(2, True), (3, True), (3, False), (4, False), (6, False)])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 99),
    shape=SHAPES,
    rope=st.sampled_from([ROPE, None]),
    chunks=st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), min_size=1, max_size=3),
)
def test_prefill_in_any_chunks_pools_whole_blocks(seed, shape, rope, chunks):
    spec = spec_of(*shape, rope=rope)
    tail, region = state_of(spec)
    deck = np.random.default_rng(seed).permutation(20).tolist()
    counts = [sum(chunk[s] for chunk in chunks) for s in range(2)]
    texts = [text_of(counts[s], spec, seed + 10 * s) for s in range(2)]
    at = [0, 0]
    for chunk in chunks:
        going = [s for s in range(2) if chunk[s]]
        if not going:
            continue
        own = [slice(at[s], at[s] + chunk[s]) for s in going]
        kv, gate = (
            torch.cat([texts[s][part][rows] for s, rows in zip(going, own, strict=True)]) for part in (0, 1)
        )
        sets = [RowSet(2 - s, at[s], [0] * chunk[s], table_of(s, deck)) for s in going]
        OPS.compress(make_batch("prefill", sets), kv, gate, tail, region, spec)
        for s in going:
            at[s] += chunk[s]
    for s in range(2):
        want = texts[s][2].entries(spec)
        for got, entry in zip(committed_entries(region, table_of(s, deck), len(want)), want, strict=True):
            np.testing.assert_allclose(got.numpy(), entry, atol=2e-5)


@pytest.mark.parametrize("shape", [(2, True), (3, True), (4, False)])
@pytest.mark.parametrize("length", range(9))
def test_rows_of_finished_periods_are_not_read_again(shape, length):
    """What `Slot.period` says of the tail: a snapshot need not keep them."""
    spec = spec_of(*shape)
    kv, gate, _ = text_of(length + 9, spec, 4)
    tables = table_of(0, list(range(20)))
    regions = []
    for cleared in (False, True):
        tail, region = state_of(spec)
        if length:
            b = make_batch("prefill", [RowSet(0, 0, [0] * length, tables)])
            OPS.compress(b, kv[:length], gate[:length], tail, region, spec)
        if cleared:
            alive = alive_rows(spec.rows, spec.stride, length)
            tail.state[:, : spec.rows - alive] = float("nan")
        b = make_batch("prefill", [RowSet(0, length, [0] * 9, tables)])
        OPS.compress(b, kv[length:], gate[length:], tail, region, spec)
        regions.append(region.fields["k"])
    assert regions[0].equal(regions[1])


# --- what rows see: selection and attention


def near_region():
    return Region("near", "near", {"k": numbers(20, BLOCK_TOKENS, 1, WIDTH, seed=73)}, BLOCK_TOKENS)


SINKS = torch.tensor([0.5, -1.0, 0.0])


def attention_by_loops(q, near, entries):
    """One row, float64: near keys and entries in one softmax with a sink; K = V."""
    keys = np.array([*near, *entries])
    out = np.zeros((HEADS, WIDTH))
    for head in range(HEADS):
        weight = np.exp(keys @ q[head] * 0.5)
        out[head] = weight @ keys / (weight.sum() + math.exp(SINKS[head].item()))
    return out.reshape(-1)


def selected_by_loops(q, weight, entries, top_k):
    scores = [sum(w * max(0.0, q[h] @ entry) for h, w in enumerate(weight)) for entry in entries]
    return sorted(range(len(entries)), key=lambda n: (-scores[n], n))[:top_k]


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    seed=st.integers(0, 99),
    shape=SHAPES,
    sequences=st.lists(trees(), min_size=1, max_size=3),
    top_k=st.sampled_from([1, 2, 30]),
    window=st.sampled_from([None, 4]),
    scores=st.sampled_from([1 << 24, 60]),
)
def test_a_tree_sees_the_entries_of_its_own_paths(data, seed, shape, sequences, top_k, window, scores):
    """A closed entry belongs to the row that closed it; branches close the same one with other content."""
    spec = spec_of(*shape)
    tail, region = state_of(spec)
    near = near_region()
    deck = np.random.default_rng(seed).permutation(20).tolist()
    attention = AttentionSpec(0, HEADS, 1, WIDTH, WIDTH, 0.5, None, window=window, sinks=SINKS)
    before = [data.draw(st.integers(0, 13)) for _ in sequences]
    texts, keys = [], []
    for s, count in enumerate(before):
        kv, gate, text = text_of(count, spec, seed + 10 * s)
        key = numbers(count, WIDTH, seed=seed + 200 + s)
        texts.append(text)
        keys.append(list(key.double().numpy()))
        if count:
            b = make_batch("prefill", [RowSet(s, 0, [0] * count, table_of(s, deck))])
            OPS.compress(b, kv, gate, tail, region, spec)
            OPS.attention(b, torch.zeros(count, HEADS * WIDTH), key, None, near, attention)
    sets = [
        RowSet(s, before[s], [0] * len(tree), table_of(s, deck), parents=tree)
        for s, tree in enumerate(sequences)
    ]
    b = make_batch("held", sets)
    total = sum(map(len, sequences))
    held = [text_of(len(tree), spec, seed + 10 * s + 5) for s, tree in enumerate(sequences)]
    kept = tail.state.clone(), region.fields["k"].clone()
    OPS.compress(b, *(torch.cat([one[part] for one in held]) for part in (0, 1)), tail, region, spec)
    assert tail.state.equal(kept[0])
    assert region.fields["k"].equal(kept[1])
    q_index, weight = numbers(total, HEADS, WIDTH, seed=seed + 300), numbers(total, HEADS, seed=seed + 301)
    q, key = numbers(total, HEADS * WIDTH, seed=seed + 302), numbers(total, WIDTH, seed=seed + 303)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "SCORE_ELEMENTS", scores)
        chosen = OPS.select(b, q_index, weight, region, top_k, None)
        some = OPS.attention(b, q, key, None, near, attention, extra=(region, chosen))
        every = OPS.attention(b, q, key, None, near, attention, extra=(region, None))
    row = 0
    for s, tree in enumerate(sequences):
        own_keys = key[row : row + len(tree)].double().numpy()
        for place in range(len(tree)):
            path = path_to(tree, place)
            path_text = Text([held[s][2].kv[r] for r in path], [held[s][2].gate[r] for r in path])
            entries = (texts[s] + path_text).entries(spec)
            want = selected_by_loops(
                q_index[row].double().numpy(), weight[row].double().tolist(), entries, top_k
            )
            assert chosen[row].tolist() == want + [-1] * (top_k - len(want))
            seen = [*keys[s], *(own_keys[r] for r in path)][-window if window else 0 :]
            query = q[row].double().numpy().reshape(HEADS, WIDTH)
            np.testing.assert_allclose(
                some[row].numpy(), attention_by_loops(query, seen, [entries[n] for n in want]), atol=5e-5
            )
            np.testing.assert_allclose(
                every[row].numpy(), attention_by_loops(query, seen, entries), atol=5e-5
            )
            row += 1
    paths = [path_to(tree, data.draw(st.integers(0, len(tree) - 1))) for tree in sequences]
    OPS.commit_pages(b, commit_of(paths), (region,))
    OPS.commit_slot(b, commit_of(paths), tail)
    for s, path in enumerate(paths):
        text = texts[s] + Text([held[s][2].kv[r] for r in path], [held[s][2].gate[r] for r in path])
        want = text.entries(spec)
        for got, entry in zip(committed_entries(region, table_of(s, deck), len(want)), want, strict=True):
            np.testing.assert_allclose(got.numpy(), entry, atol=2e-5)
        more, length = text_of(spec.stride, spec, seed + 400 + s), len(text.kv)
        b = make_batch("prefill", [RowSet(s, length, [0] * spec.stride, table_of(s, deck))])
        OPS.compress(b, *more[:2], tail, region, spec)
        want = (text + more[2]).entries(spec)
        got = committed_entries(region, table_of(s, deck), len(want))[-1]
        np.testing.assert_allclose(got.numpy(), want[-1], atol=2e-5)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 99), shape=SHAPES, count=st.integers(1, 20), top_k=st.sampled_from([1, 3]))
def test_prefill_rows_see_entries_up_to_their_own(seed, shape, count, top_k):
    spec = spec_of(*shape)
    tail, region = state_of(spec)
    kv, gate, text = text_of(count, spec, seed)
    b = make_batch("prefill", [RowSet(1, 0, [0] * count, table_of(1, list(range(20))))])
    OPS.compress(b, kv, gate, tail, region, spec)
    q, weight = numbers(count, HEADS, WIDTH, seed=seed + 1), numbers(count, HEADS, seed=seed + 2)
    chosen = OPS.select(b, q, weight, region, top_k, ROPE)
    query, key = numbers(count, HEADS * WIDTH, seed=seed + 3), numbers(count, WIDTH, seed=seed + 4)
    attention = AttentionSpec(0, HEADS, 1, WIDTH, WIDTH, 0.5, None, window=3, sinks=SINKS)
    near = near_region()
    some = OPS.attention(b, query, key, None, near, attention, extra=(region, chosen))
    entries = text.entries(spec)
    for t in range(count):
        visible = entries[: (t + 1) // spec.stride]
        turned = q[t].double().numpy().copy()
        z = (turned[:, -2] + 1j * turned[:, -1]) * np.exp(1j * 0.8 * t)
        turned[:, -2], turned[:, -1] = z.real, z.imag
        want = selected_by_loops(turned, weight[t].double().tolist(), visible, top_k)
        assert chosen[t].tolist() == want + [-1] * (top_k - len(want))
        seen = key[max(0, t - 2) : t + 1].double().numpy()
        np.testing.assert_allclose(
            some[t].numpy(),
            attention_by_loops(
                query[t].double().numpy().reshape(HEADS, WIDTH), seen, [entries[n] for n in want]
            ),
            atol=5e-5,
        )


def test_scores_that_are_equal_go_to_the_lowest_entry():
    spec = spec_of(2, False)
    tail, region = state_of(spec)
    b = make_batch("prefill", [RowSet(0, 0, [0] * 8, table_of(0, list(range(20))))])
    OPS.compress(b, *text_of(8, spec, 0)[:2], tail, region, spec)
    chosen = OPS.select(b, numbers(8, HEADS, WIDTH), torch.zeros(8, HEADS), region, 3, None)
    assert chosen[7].tolist() == [0, 1, 2]


def test_padding_rows_close_nothing_and_see_only_what_is_committed():
    spec = spec_of(2, False)
    tail, region = state_of(spec)
    tables = table_of(0, list(range(20)))
    b = make_batch("prefill", [RowSet(0, 0, [0] * 3, tables)])
    OPS.compress(b, *text_of(3, spec, 0)[:2], tail, region, spec)
    b = make_batch("held", [RowSet(0, 3, [0] * 3, tables, parents=[-1, -2, -2])])
    OPS.compress(b, *text_of(3, spec, 1)[:2], tail, region, spec)
    assert region.log["k"][0, 1:].eq(99.0).all()
    chosen = OPS.select(b, numbers(3, HEADS, WIDTH), torch.ones(3, HEADS), region, 2, None)
    assert sorted(chosen[0].tolist()) == [0, 1]
    assert chosen[1:].tolist() == [[0, -1]] * 2


def test_regions_that_are_none_are_refused():
    spec = spec_of(2, False)
    tail, region = state_of(spec)
    kv, gate, _ = text_of(2, spec, 0)
    tables = table_of(0, list(range(20)))
    b = make_batch("prefill", [RowSet(0, 0, [0] * 2, tables)])
    with pytest.raises(PluginError, match="an entry per 2 tokens; region 'c' has one per 1"):
        OPS.compress(b, kv, gate, tail, attrs.evolve(region, stride=1), spec)
    short = {"entries": SeqTable((0,), (BLOCK_TOKENS,))}
    with pytest.raises(IndexError, match="not all in blocks"):
        OPS.select(
            make_batch("held", [RowSet(0, 12, [0], short)]),
            numbers(1, HEADS, WIDTH),
            numbers(1, HEADS),
            region,
            2,
            None,
        )
