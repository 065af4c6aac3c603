"""Folds, page moves and convolution windows against sequences kept as plain lists."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luce_core.contracts import Commit, Region, SeqTable, SlotState
from luce_core.model.batch import RowSet, make_batch
from luce_core.ops import build_ops
from luce_core.ops import state as state_ops

OPS = build_ops()
KERNEL, CHANNELS = 3, 2


@st.composite
def trees(draw, most=8):
    size = draw(st.integers(1, most))
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]


def path_to(tree, row):
    path = [row]
    while tree[path[-1]] >= 0:
        path.append(tree[path[-1]])
    return path[::-1]


def commit_of(paths):
    longest = max(1, *map(len, paths))
    padded = [path + [-1] * (longest - len(path)) for path in paths]  # what lies beyond the count is garbage
    counts = torch.tensor([len(path) for path in paths], dtype=torch.int32)
    return Commit(torch.tensor(padded, dtype=torch.int32), counts)


# --- pages


@settings(max_examples=40, deadline=None)
@given(data=st.data(), sequences=st.lists(trees(), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_committed_entries_are_the_path_in_order_and_the_rest_is_untouched(data, sequences, seed):
    rng = np.random.default_rng(seed)
    deck = rng.permutation(20).tolist()
    lengths = [data.draw(st.integers(0, 9)) for _ in sequences]
    paths = [path_to(tree, data.draw(st.integers(0, len(tree) - 1))) for tree in sequences]
    paths = [path if data.draw(st.booleans()) else [] for path in paths]
    fields = {"k": torch.randn(20, 3, 2), "v": torch.randn(20, 3)}
    region = Region("kv", "full", fields, 3)
    tables = [SeqTable(tuple(deck[6 * s : 6 * s + 6]), tuple(range(0, 18, 3))) for s in range(len(sequences))]
    b = make_batch(
        "held",
        [
            RowSet(s, lengths[s], [0] * len(tree), {"full": tables[s]}, parents=tree)
            for s, tree in enumerate(sequences)
        ],
    )

    def entry(field, s, index):
        return field[tables[s].blocks[index // 3], index % 3]

    before = {name: field.clone() for name, field in fields.items()}
    OPS.commit_pages(b, commit_of(paths), (region,))
    for name, field in fields.items():
        for s, path in enumerate(paths):
            for index in range(lengths[s]):
                assert entry(field, s, index).equal(entry(before[name], s, index))
            for step, row in enumerate(path):
                want = entry(before[name], s, lengths[s] + row)
                assert entry(field, s, lengths[s] + step).equal(want)
        unused = deck[6 * len(sequences) :]
        assert field[unused].equal(before[name][unused])


def test_pages_move_across_a_gap_of_evicted_blocks():
    field = torch.arange(12.0).view(6, 2)
    region = Region("kv", "full", {"k": field}, 2)
    table = {"full": SeqTable((4, 1, 0), (0, 8, 10))}
    b = make_batch("held", [RowSet(0, 8, [0] * 4, table, parents=[-1, 0, 0, 2])])
    OPS.commit_pages(b, commit_of([[0, 2, 3]]), (region,))
    assert field[1].tolist() == [2.0, 0.0]  # row 2 lay at index 10: block 0, entry 0
    assert field[0].tolist() == [1.0, 1.0]


def test_entries_of_several_tokens_come_out_of_the_log_of_the_row_that_closed_them():
    """Stride 2, three tokens committed: rows at depth 0 close entry 1, rows at depth 2 entry 2."""
    field, log = torch.zeros(6, 2, 1), torch.arange(12.0).view(2, 6, 1)
    region = Region("c", "c", {"k": field}, 2, 2, log={"k": log})
    table = {"c": SeqTable((4, 1), (0, 4))}
    b = make_batch("held", [RowSet(1, 3, [0] * 5, table, parents=[-1, 0, 0, 2, 1])])
    OPS.commit_pages(b, commit_of([[0, 2, 3]]), (region,))
    assert field[4, :, 0].tolist() == [0, 6]  # entry 1, closed by row 0 of slot 1
    assert field[1, :, 0].tolist() == [9, 0]  # entry 2, closed by row 3
    before = field.clone()
    OPS.commit_pages(b, commit_of([[]]), (region,))
    assert field.equal(before)


# --- shift folds


@settings(max_examples=40, deadline=None)
@given(
    depth=st.integers(1, 4),
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_shift_keeps_the_newest_rows(depth, counts, seed):
    rng = np.random.default_rng(seed)
    state = torch.tensor(rng.standard_normal((len(counts), depth, 2)), dtype=torch.float32)
    log = torch.tensor(rng.standard_normal((len(counts), 5, 2)), dtype=torch.float32)
    got = OPS.shift(state, {"row": log}, torch.tensor(counts, dtype=torch.int32))
    for s, count in enumerate(counts):
        want = [*state[s].tolist(), *log[s, :count].tolist()][-depth:]
        assert got[s].tolist() == want


def test_a_commit_folds_only_sequences_that_accepted_something():
    slot = SlotState("conv", torch.zeros(3, 2, 1), {"row": torch.ones(3, 4, 1)}, "shift")
    tables = {"full": SeqTable((0,), (0,))}
    b = make_batch("held", [RowSet(2, 0, [0, 0], tables), RowSet(0, 0, [0], tables)])
    OPS.commit_slot(b, commit_of([[], [0]]), slot)
    assert slot.state[:, :, 0].tolist() == [[0, 1], [0, 0], [0, 0]]


def test_a_padding_sequence_does_not_undo_the_commit_of_the_slot_it_names():
    slot = SlotState("conv", torch.zeros(1, 2, 1), {"row": torch.ones(1, 4, 1)}, "shift")
    b = make_batch("held", [RowSet(0, 0, [0], {}), RowSet(0, 0, [0], {}, parents=[-2])])
    OPS.commit_slot(b, commit_of([[0], []]), slot)
    assert slot.state[0, :, 0].tolist() == [0, 1]


def test_a_fold_can_be_an_op_of_a_layer():
    def total(ops, state, log, count):
        steps = torch.arange(log["x"].shape[1]) < count[:, None]
        return state + (log["x"] * steps[..., None]).sum(1)

    ops = build_ops({"t.sum": total})
    slot = SlotState("sum", torch.zeros(2, 1), {"x": torch.tensor([[[1.0], [2.0], [4.0]]] * 2)}, "t.sum")
    b = make_batch("held", [RowSet(1, 0, [0, 0, 0], {}, parents=[-1, 0, 0])])
    ops.commit_slot(b, commit_of([[0, 2]]), slot)
    assert slot.state.tolist() == [[0.0], [5.0]]


# --- convolution windows: fresh runs of every path are the oracle


WEIGHT = torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.25, -3.0]])


def convolved(rows):
    """Causal convolution of one list of rows, zeros before the first, in plain Python."""
    out = []
    for at in range(len(rows)):
        window = ([[0.0, 0.0]] * (KERNEL - 1) + rows)[at : at + KERNEL]
        out.append([sum(WEIGHT[c, i].item() * window[i][c] for i in range(KERNEL)) for c in range(CHANNELS)])
    return out


def fresh_slot(slots=3, held=8):
    state = torch.zeros(slots, KERNEL - 1, CHANNELS)
    return SlotState("conv", state, {"row": torch.full((slots, held, CHANNELS), 99.0)}, "shift")


@pytest.mark.parametrize("elements", [1 << 25, 7])
def test_prefill_in_chunks_equals_one_run(monkeypatch, elements):
    monkeypatch.setattr(state_ops, "WINDOW_ELEMENTS", elements)
    rng = np.random.default_rng(0)
    texts = [rng.standard_normal((9, CHANNELS)).tolist(), rng.standard_normal((5, CHANNELS)).tolist()]
    slot, out, at = fresh_slot(), [[], []], [0, 0]
    for counts in ([1, 2], [3, 1], [0, 2], [5, 0]):
        going = [s for s in range(2) if counts[s]]
        sets = [RowSet(2 - s, at[s], [0] * counts[s], {}) for s in going]
        x = torch.tensor([row for s in going for row in texts[s][at[s] : at[s] + counts[s]]])
        got = OPS.conv_window(make_batch("prefill", sets), x, WEIGHT, slot).tolist()
        for s in going:
            out[s] += [got.pop(0) for _ in range(counts[s])]
            at[s] += counts[s]
    for s in range(2):
        np.testing.assert_allclose(out[s], convolved(texts[s]), atol=1e-5)
        assert slot.state[2 - s].tolist() == torch.tensor(texts[s][-2:]).tolist()


@settings(max_examples=40, deadline=None)
@given(data=st.data(), sequences=st.lists(trees(), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_held_windows_follow_the_path_and_a_commit_continues_it(data, sequences, seed):
    rng = np.random.default_rng(seed)
    before = [rng.standard_normal((data.draw(st.integers(0, 4)), CHANNELS)).tolist() for _ in sequences]
    slot = fresh_slot()
    for s, rows in enumerate(before):
        if rows:
            prompt = make_batch("prefill", [RowSet(s, 0, [0] * len(rows), {})])
            OPS.conv_window(prompt, torch.tensor(rows), WEIGHT, slot)
    committed = slot.state.clone()
    held = [rng.standard_normal((len(tree), CHANNELS)).tolist() for tree in sequences]
    sets = [RowSet(s, len(before[s]), [0] * len(tree), {}, parents=tree) for s, tree in enumerate(sequences)]
    b = make_batch("held", sets)
    got = OPS.conv_window(b, torch.tensor([row for rows in held for row in rows]), WEIGHT, slot).tolist()
    assert slot.state.equal(committed)
    at = 0
    for s, tree in enumerate(sequences):
        for row in range(len(tree)):
            text = before[s] + [held[s][above] for above in path_to(tree, row)]
            np.testing.assert_allclose(got[at + row], convolved(text)[-1], atol=1e-5)
        at += len(tree)
    paths = [path_to(tree, data.draw(st.integers(0, len(tree) - 1))) for tree in sequences]
    OPS.commit_slot(b, commit_of(paths), slot)
    for s, path in enumerate(paths):
        text = [[0.0, 0.0]] * 2 + before[s] + [held[s][row] for row in path]
        assert slot.state[s].tolist() == torch.tensor(text[-2:]).tolist()
