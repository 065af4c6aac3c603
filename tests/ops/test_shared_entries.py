"""Entries with keys beside them, an entry per token or per few, and blocks chosen among them: against loops.

What `test_compressed.py` says of entries without keys holds here too; this is about what V4.1 adds.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luce_core.contracts import (
    AttentionSpec,
    Commit,
    CompressSpec,
    Linear,
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
WIDTH, KEY, HEADS, BLOCK_TOKENS, SLOTS, HELD = 4, 6, 3, 12, 4, 12
ANGLE = 0.8
ROPE = RopeSpec(torch.tensor([ANGLE]), "adjacent", part="last")


def numbers(*shape, seed=0):
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape), dtype=torch.float32)


MATRIX = Linear("k", KEY, WIDTH, "F32", numbers(KEY, WIDTH, seed=80))
NORM, KEY_NORM = Norm(numbers(WIDTH, seed=81), 1e-20), Norm(numbers(KEY, seed=82), 1e-20)


class World:
    """State of one stream; what nobody wrote is garbage."""

    def __init__(self, stride, deck):
        self.stride, self.deck = stride, deck
        self.spec = CompressSpec(stride, WIDTH, None, NORM, ROPE)
        self.entries, self.keys = (self._region(name, size) for name, size in (("k", WIDTH), ("key", KEY)))
        log = {"row": torch.full((SLOTS, HELD, 2 * WIDTH), 99.0)}
        self.tail = SlotState("tail", torch.zeros(SLOTS, stride, 2 * WIDTH), log, "shift", stride)
        near = {"k": numbers(20, BLOCK_TOKENS, 1, WIDTH, seed=73)}
        self.near = Region("near", "stream", near, BLOCK_TOKENS)

    def _region(self, name, size):
        shape = (1, size) if name == "k" else (size,)
        count = BLOCK_TOKENS // self.stride
        log = {name: torch.full((SLOTS, HELD, *shape), 99.0)} if self.stride > 1 else {}
        return Region(
            name, "stream", {name: numbers(20, count, *shape, seed=72)}, count, self.stride, log=log
        )

    def tables(self, s):
        blocks = tuple(self.deck[5 * s : 5 * s + 5])
        return {"stream": SeqTable(blocks, tuple(range(0, 5 * BLOCK_TOKENS, BLOCK_TOKENS)))}

    def compress(self, b, kv, gate):
        single = self.stride == 1
        keys = (self.keys, MATRIX, KEY_NORM)
        own = (None, None) if single else (gate, self.tail)
        OPS.compress(b, kv, *own, self.entries, self.spec, keys)

    def committed(self, s, count):
        """Entries and keys 0..count of sequence s, as pages have them."""
        per_block = BLOCK_TOKENS // self.stride
        places = [self.deck[5 * s + n // per_block] * per_block + n % per_block for n in range(count)]
        return (region[name].reshape(-1, size)[places] for region, name, size in self.fields())

    def fields(self):
        return (self.entries.fields, "k", WIDTH), (self.keys.fields, "key", KEY)

    def commit(self, b, paths):
        longest = max(1, *map(len, paths))
        path = torch.tensor([one + [-1] * (longest - len(one)) for one in paths], dtype=torch.int32)
        commit = Commit(path, torch.tensor([len(one) for one in paths], dtype=torch.int32))
        OPS.commit_pages(b, commit, (self.entries, self.keys))
        if self.stride > 1:
            OPS.commit_slot(b, commit, self.tail)


def normed(x, norm):
    return x / math.sqrt((x * x).mean()) * norm.weight.double().numpy()


def turned(x, angle):
    out = x.copy()
    pair = complex(x[-2], x[-1]) * complex(math.cos(angle), math.sin(angle))
    out[-2:] = pair.real, pair.imag
    return out


def by_loops(kv, gate, stride):
    """(entries, keys) of a text of float64 rows."""
    entries, keys = [], []
    for w in range(len(kv) // stride):
        rows = range(w * stride, (w + 1) * stride)
        if stride == 1:
            pooled = kv[w]
        else:
            share = np.exp(np.array([gate[t] for t in rows]))
            pooled = (share / share.sum(0) * np.array([kv[t] for t in rows])).sum(0)
        latent = normed(pooled, NORM)
        entries.append(turned(latent, ANGLE * w * stride))
        keys.append(turned(normed(MATRIX.packed.double().numpy() @ latent, KEY_NORM), ANGLE * w * stride))
    return entries, keys


def assert_rows(got, want):
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one.numpy(), other, atol=3e-5)


@st.composite
def trees(draw, most=9):
    size = draw(st.integers(1, most))
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]


def path_to(tree, row):
    path = [row]
    while tree[path[-1]] >= 0:
        path.append(tree[path[-1]])
    return path[::-1]


def text_of(count, seed):
    kv, gate = numbers(count, WIDTH, seed=seed), numbers(count, WIDTH, seed=seed + 1)
    return kv, gate, list(kv.double().numpy()), list(gate.double().numpy())


def decks(seed):
    return np.random.default_rng(seed).permutation(20).tolist()


def ranked(q, weight, keys):
    """float64 scores of all keys."""
    return [sum(w * max(0.0, q[h] @ key) for h, w in enumerate(weight)) for key in keys]


def blocks_by_loops(scores, size, count):
    blocks = [max(scores[at : at + size]) for at in range(0, len(scores), size)]
    if blocks:
        blocks[-1] = math.inf
    order = sorted(range(len(blocks)), key=lambda n: (-blocks[n], n))
    return order[:count]


def attention_by_loops(q, near, entries):
    keys = np.array([*near, *entries])
    out = np.zeros((HEADS, WIDTH))
    for head in range(HEADS):
        share = np.exp(keys @ q[head] * 0.5)
        out[head] = share @ keys / share.sum()
    return out.reshape(-1)


STRIDES = st.sampled_from([1, 2, 3])
SPEC = AttentionSpec(0, HEADS, 1, WIDTH, WIDTH, 0.5, None, window=4)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    seed=st.integers(0, 99),
    stride=STRIDES,
    sequences=st.lists(trees(), min_size=1, max_size=3),
    size=st.sampled_from([1, 2, 4]),
    count=st.sampled_from([1, 2, 30]),
    scores=st.sampled_from([1 << 24, 60]),
)
def test_a_tree_chooses_blocks_and_entries_of_its_own_paths(
    data, seed, stride, sequences, size, count, scores
):
    """Behind a prompt of any length: blocks hold committed entries, a path's own, or both."""
    world = World(stride, decks(seed))
    before = [data.draw(st.integers(0, 13)) for _ in sequences]
    texts, keys = [], []
    for s, length in enumerate(before):
        kv, gate, *rows = text_of(length, seed + 10 * s)
        key = numbers(length, WIDTH, seed=seed + 200 + s)
        texts.append(rows)
        keys.append(list(key.double().numpy()))
        if length:
            b = make_batch("prefill", [RowSet(s, 0, [0] * length, world.tables(s))])
            world.compress(b, kv, gate)
            OPS.attention(b, torch.zeros(length, HEADS * WIDTH), key, None, world.near, SPEC)
            want = by_loops(*rows, stride)
            for got, other in zip(world.committed(s, length // stride), want, strict=True):
                assert_rows(got, other)
    sets = [
        RowSet(s, before[s], [0] * len(tree), world.tables(s), parents=tree)
        for s, tree in enumerate(sequences)
    ]
    b = make_batch("held", sets)
    held = [text_of(len(tree), seed + 10 * s + 5) for s, tree in enumerate(sequences)]
    world.compress(b, *(torch.cat([one[part] for one in held]) for part in (0, 1)))
    total = sum(map(len, sequences))
    q_index, weight = numbers(total, HEADS, KEY, seed=seed + 300), numbers(total, HEADS, seed=seed + 301)
    q, key = numbers(total, HEADS * WIDTH, seed=seed + 302), numbers(total, WIDTH, seed=seed + 303)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "SCORE_ELEMENTS", scores)
        blocks = OPS.select_blocks(b, q_index, weight, world.keys, count, size, None)
        chosen = OPS.select(b, q_index, weight, world.keys, 3, None, (blocks, size))
        got = OPS.attention(b, q, key, None, world.near, SPEC, extra=(world.entries, chosen))
    row = 0
    for s, tree in enumerate(sequences):
        own = key[row : row + len(tree)].double().numpy()
        for place in range(len(tree)):
            path = path_to(tree, place)
            text = [texts[s][part] + [held[s][2 + part][r] for r in path] for part in (0, 1)]
            entries, found_by = by_loops(*text, stride)
            liked = ranked(q_index[row].double().numpy(), weight[row].double().tolist(), found_by)
            inside = blocks_by_loops(liked, size, count)
            assert blocks[row].tolist() == inside + [-1] * (count - len(inside))
            order = sorted(range(len(liked)), key=lambda n, liked=liked: (-liked[n], n))
            want = [n for n in order if n // size in inside][:3]
            assert chosen[row].tolist() == want + [-1] * (3 - len(want))
            seen = [*keys[s], *(own[r] for r in path)][-4:]
            query = q[row].double().numpy().reshape(HEADS, WIDTH)
            np.testing.assert_allclose(
                got[row].numpy(), attention_by_loops(query, seen, [entries[n] for n in want]), atol=5e-5
            )
            row += 1
    paths = [path_to(tree, data.draw(st.integers(0, len(tree) - 1))) for tree in sequences]
    world.commit(b, paths)
    for s, path in enumerate(paths):
        rows = [texts[s][part] + [held[s][2 + part][r] for r in path] for part in (0, 1)]
        kv, gate, *more = text_of(stride, seed + 400 + s)
        b = make_batch("prefill", [RowSet(s, len(rows[0]), [0] * stride, world.tables(s))])
        world.compress(b, kv, gate)
        want = by_loops(*(rows[part] + more[part] for part in (0, 1)), stride)
        for got, other in zip(world.committed(s, len(want[0])), want, strict=True):
            assert_rows(got, other)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 99), stride=STRIDES, length=st.integers(1, 30), cut=st.integers(0, 30))
def test_rows_of_a_prompt_choose_among_what_lies_before_them(seed, stride, length, cut):
    world, cut = World(stride, decks(seed)), min(cut, length)
    kv, gate, *rows = text_of(length, seed)
    _, keys = by_loops(*rows, stride)
    q, weight = numbers(length, HEADS, KEY, seed=seed + 1), numbers(length, HEADS, seed=seed + 2)
    got, within = [], []
    for start, stop in ((0, cut), (cut, length)):
        if start == stop:
            continue
        part = slice(start, stop)
        b = make_batch("prefill", [RowSet(1, start, [0] * (stop - start), world.tables(1))])
        world.compress(b, kv[part], gate[part])
        blocks = OPS.select_blocks(b, q[part], weight[part], world.keys, 2, 3, None)
        got += blocks.tolist()
        within += OPS.select(b, q[part], weight[part], world.keys, 2, None, (blocks, 3)).tolist()
    for t in range(length):
        liked = ranked(q[t].double().numpy(), weight[t].double().tolist(), keys[: (t + 1) // stride])
        inside = blocks_by_loops(liked, 3, 2)
        assert [n for n in got[t] if n >= 0] == inside
        order = sorted(range(len(liked)), key=lambda n, liked=liked: (-liked[n], n))
        assert [n for n in within[t] if n >= 0] == [n for n in order if n // 3 in inside][:2]


@pytest.mark.parametrize("stride", [1, 2])
def test_padding_rows_close_nothing_and_may_lie_beyond_the_blocks(stride):
    """A drafter's chain is padded beyond the room a sequence has."""
    world = World(stride, decks(0))
    short = {"stream": SeqTable((world.deck[0],), (0,))}
    length = BLOCK_TOKENS - 2
    kv, gate, *_ = text_of(length, 0)
    world.compress(make_batch("prefill", [RowSet(0, 0, [0] * length, short)]), kv, gate)
    b = make_batch("held", [RowSet(0, length, [0] * 6, short, parents=[-1, 0, -2, -2, -2, -2])])
    kept = world.entries.fields["k"].clone()
    kv, gate, *_ = text_of(6, 1)
    world.compress(b, kv, gate)
    changed = (world.entries.fields["k"] != kept).flatten(1).any(1).nonzero()[:, 0].tolist()
    assert changed == ([world.deck[0]] if stride == 1 else [])
    chosen = OPS.select(b, numbers(6, HEADS, KEY), torch.ones(6, HEADS), world.keys, 30, None)
    counts = (chosen >= 0).sum(1).tolist()
    assert counts == [(length + 1) // stride, (length + 2) // stride, *[length // stride] * 4]
    blocks = OPS.select_blocks(b, numbers(6, HEADS, KEY), torch.ones(6, HEADS), world.keys, 9, 4, None)
    assert (blocks >= 0).sum(1).tolist() == [-(-count // 4) for count in counts]


def test_equal_scores_go_to_the_lowest_block_behind_the_newest():
    world = World(1, decks(0))
    kv, gate, *_ = text_of(10, 0)
    b = make_batch("prefill", [RowSet(0, 0, [0] * 10, world.tables(0))])
    world.compress(b, kv, gate)
    blocks = OPS.select_blocks(b, numbers(10, HEADS, KEY), torch.zeros(10, HEADS), world.keys, 3, 2, None)
    assert blocks[[0, 1, 2, 9]].tolist() == [[0, -1, -1], [0, -1, -1], [1, 0, -1], [4, 0, 1]]


def test_gates_and_tails_go_with_the_stride():
    one, two = World(1, decks(0)), World(2, decks(0))
    b = make_batch("prefill", [RowSet(0, 0, [0] * 2, one.tables(0))])
    kv, gate, *_ = text_of(2, 0)
    with pytest.raises(PluginError, match="per 1 tokens takes no gate and no tail"):
        OPS.compress(b, kv, gate, two.tail, one.entries, one.spec)
    with pytest.raises(PluginError, match="per 2 tokens takes a gate and a tail"):
        OPS.compress(b, kv, None, None, two.entries, two.spec)
    with pytest.raises(PluginError, match="region 'k' has one per 1"):
        OPS.compress(b, kv, gate, two.tail, one.entries, two.spec)
