"""Rows of n-gram tables against Python's integers, whatever way a text takes into a batch."""

from __future__ import annotations

from itertools import pairwise

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luce_core.contracts import Commit, NgramSpec, RecallSpec, SeqTable, SlotState
from luce_core.model.batch import RowSet, make_batch
from luce_core.ops import build_ops

OPS = build_ops()
VOCAB, TABLES, SLOTS, HELD, PAD = 40, 2, 4, 9, 3
NO_TABLE = {"near": SeqTable((0,), (0,))}


def spec_of(size, heads):
    rng = np.random.default_rng(size)
    largest = (2**63 - 1) // VOCAB  # products use all 63 bits
    return NgramSpec(
        compressed=torch.tensor(rng.integers(0, VOCAB - 1, VOCAB), dtype=torch.int32),
        pad=PAD,
        multipliers=torch.tensor(rng.integers(largest // 2, largest, (TABLES, size))),
        primes=torch.tensor(rng.integers(2, 16_000_057, (TABLES, size - 1, heads))),
        offsets=torch.tensor(rng.integers(0, 2**31 - 16_000_057, (TABLES, size - 1, heads))),
    )


def history_of(size):
    """Zero before the first token; logs are garbage."""
    log = {"row": torch.full((SLOTS, HELD, 1), 99, dtype=torch.int32)}
    return SlotState("history", torch.zeros(SLOTS, size - 1, 1, dtype=torch.int32), log, "shift")


def by_integers(text, given_rows, spec):
    """Rows of the n-grams that end at the last token of `text`."""
    size = spec.multipliers.shape[1]
    ids, over = [], False
    for back in range(size):
        at = len(text) - 1 - back
        over = over or at < 0 or at in given_rows
        ids.append(PAD if over else int(spec.compressed[text[at]]))
    rows = []
    for table in range(TABLES):
        factors, mixed, own = spec.multipliers[table].tolist(), 0, []
        for j, (compressed, factor) in enumerate(zip(ids, factors, strict=True)):
            mixed ^= compressed * factor
            if j:
                moduli, starts = (x[table, j - 1].tolist() for x in (spec.primes, spec.offsets))
                own += [mixed % prime + start for prime, start in zip(moduli, starts, strict=True)]
        rows.append(own)
    return rows


SIZES = st.sampled_from([(2, 3), (3, 1), (4, 2)])
TEXTS = st.lists(st.integers(0, VOCAB - 1), max_size=20)


@settings(max_examples=60, deadline=None)
@given(
    shape=SIZES, texts=st.tuples(TEXTS, TEXTS), cuts=st.lists(st.integers(0, 20), max_size=3), data=st.data()
)
def test_prompts_in_any_chunks(shape, texts, cuts, data):
    """Two prompts beside each other, with rows given as embeddings among their tokens."""
    spec, history = spec_of(*shape), history_of(shape[0])
    given_rows = [data.draw(st.sets(st.integers(0, max(0, len(text) - 1)), max_size=4)) for text in texts]
    bounds = sorted({0, 20, *cuts})
    for start, stop in pairwise(bounds):
        parts = [text[start:stop] for text in texts]
        sets = [RowSet(s + 1, start, part, NO_TABLE) for s, part in enumerate(parts) if part]
        if not sets:
            continue
        b = make_batch("prefill", sets)
        wanted, rows = [], []
        for text, part, own in zip(texts, parts, given_rows, strict=True):
            rows += [len(wanted) + at - start for at in sorted(own) if start <= at < start + len(part)]
            wanted += [by_integers(text[: start + n + 1], own, spec) for n in range(len(part))]
        if rows:
            given_batch = torch.tensor(rows, dtype=torch.int32)
            b = attrs.evolve(b, embeds=torch.zeros(len(rows), 1), embed_rows=given_batch)
        assert OPS.ngram_rows(b, history, spec).tolist() == wanted


@st.composite
def trees(draw, most=9):
    size = draw(st.integers(1, most))
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]


def path_to(tree, row):
    path = [row]
    while tree[path[-1]] >= 0:
        path.append(tree[path[-1]])
    return path[::-1]


@settings(max_examples=60, deadline=None)
@given(shape=SIZES, sequences=st.lists(st.tuples(TEXTS, trees()), min_size=1, max_size=3), data=st.data())
def test_a_row_of_a_tree_goes_by_its_own_path(shape, sequences, data):
    spec, history = spec_of(*shape), history_of(shape[0])
    drawn = st.lists(st.integers(0, VOCAB - 1), min_size=9, max_size=9)
    tokens = [data.draw(drawn)[: len(tree)] for _, tree in sequences]
    for s, (text, _) in enumerate(sequences):
        if text:
            OPS.ngram_rows(make_batch("prefill", [RowSet(s, 0, text, NO_TABLE)]), history, spec)
    kept = history.state.clone()
    sets = [
        RowSet(s, len(text), tokens[s], NO_TABLE, parents=tree) for s, (text, tree) in enumerate(sequences)
    ]
    b = make_batch("held", sets)
    got = OPS.ngram_rows(b, history, spec).tolist()
    assert history.state.equal(kept)
    wanted = [
        by_integers(text + [tokens[s][row] for row in path_to(tree, place)], (), spec)
        for s, (text, tree) in enumerate(sequences)
        for place in range(len(tree))
    ]
    assert got == wanted
    paths = [path_to(tree, data.draw(st.integers(0, len(tree) - 1))) for _, tree in sequences]
    longest = max(map(len, paths))
    padded = torch.tensor([path + [-1] * (longest - len(path)) for path in paths], dtype=torch.int32)
    counts = torch.tensor([len(path) for path in paths], dtype=torch.int32)
    OPS.commit_slot(b, Commit(padded, counts), history)
    for s, (text, _) in enumerate(sequences):
        text = [*text, *(tokens[s][row] for row in paths[s]), 7]  # noqa: PLW2901
        b = make_batch("held", [RowSet(s, len(text) - 1, [7], NO_TABLE)])
        assert OPS.ngram_rows(b, history, spec).tolist() == [by_integers(text, (), spec)]


def test_rows_of_a_stored_table_keep_their_shape():
    class Table:
        def read(self, rows):
            assert rows.dtype == np.int32
            return np.stack([rows, -rows], -1).astype(np.float32)

    rows = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    assert OPS.stored_rows(Table(), rows).tolist() == [[[3, -3], [1, -1]], [[0, 0], [2, -2]]]


@pytest.mark.parametrize("likeness", [0.0, 2.0, -2.0, 1e-4, -1e-4])
def test_streams_take_as_much_as_they_are_like_the_key(likeness):
    """One row, one stream of two features: rms of both is 1, so the sum is 2 · weight · sign."""
    b = make_batch("prefill", [RowSet(0, 0, [1], NO_TABLE)])
    h, key, value = torch.tensor([[[3.0, 3.0]]]), [5.0, 5.0], [10.0, 20.0]
    spec = RecallSpec(torch.full((1, 2), likeness / 2 * 2**0.5), 1e-20)
    got = OPS.streams_recall(b, h, torch.tensor([key + value]), spec)
    root = np.copysign(np.sqrt(max(abs(likeness), 1e-6)), likeness)
    gate = 1 / (1 + np.exp(-root))
    np.testing.assert_allclose(got[0, 0].numpy(), [3 + gate * 10, 3 + gate * 20], rtol=1e-6)


def test_a_stream_of_zeros_is_like_nothing():
    b = make_batch("prefill", [RowSet(0, 0, [1], NO_TABLE)])
    spec = RecallSpec(torch.ones(2, 3), 1e-20)
    got = OPS.streams_recall(b, torch.zeros(1, 2, 3), torch.ones(1, 9), spec)
    np.testing.assert_allclose(got.numpy(), np.full((1, 2, 3), 1 / (1 + np.exp(-1e-3))), rtol=1e-6)
