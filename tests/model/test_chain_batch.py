"""Batches of a drafter: another owner's view of a batch, and the chains it runs while it proposes."""

import pytest
import torch
from attrs import asdict
from hypothesis import given, settings
from hypothesis import strategies as st

from luce_core.contracts import Commit, Round, SeqTable, Tap
from luce_core.model.batch import RowSet, chain_batch, make_batch, make_tables


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other


SEQUENCES = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, 70), st.integers(0, 9)), min_size=1, max_size=4
)


@settings(max_examples=60, deadline=None)
@given(SEQUENCES, st.integers(1, 70), st.integers(1, 3))
def test_a_chain_is_what_the_engine_would_make_of_its_rows(sequences, rows, axes):
    """(length, room, slot) of each sequence; rows beyond the room are padding there too."""
    tables = [
        {"d/kv": SeqTable((3 + n, 9), (0, 8)), "other/kv": SeqTable((1,), (0,))}
        for n, _ in enumerate(sequences)
    ]
    tokens = torch.arange(len(sequences) * rows, dtype=torch.int32).view(len(sequences), rows)
    unused = None
    view = Round(
        slot=i32([slot for _, _, slot in sequences]), anchor=tokens[:, 0],
        length=i32([length for length, _, _ in sequences]), usable_from=i32([0] * len(sequences)),
        history=torch.zeros(1, 1), params=unused, noise=unused, capacity=rows,
        room=i32([room for _, room, _ in sequences]), table=make_tables(tables),
    )  # fmt: skip
    made = chain_batch(view, tokens, "d", axes=axes)
    wanted = make_batch(
        "held",
        [
            RowSet(
                slot, length, tokens[s].tolist(), {"kv": tables[s]["d/kv"]},
                parents=[row - 1 if row <= room else -2 for row in range(rows)],
            )
            for s, (length, room, slot) in enumerate(sequences)
        ],
        axes=axes,
    )  # fmt: skip
    real = made.parent != -2
    one, other = asdict(made), asdict(wanted)
    for name in ("index", "position"):  # a padding row stands nowhere
        one[name], other[name] = one[name][..., real], other[name][..., real]
    assert [key for key in one if not same(one[key], other[key])] == []


def test_another_owner_sees_its_own_tables_and_nothing_of_the_targets():
    tap = Tap("final", 0)
    rows = RowSet(2, 8, [5], {"kv": SeqTable((0, 1), (0, 8)), "d/kv": SeqTable((4, 6), (0, 8))})
    batch = make_batch("held", [rows], taps={tap: torch.zeros(1, 4)})
    own = batch.of("d")
    assert set(own.table) == {"kv"}
    assert own.table["kv"].block.tolist() == [[4, 6]]
    assert batch.table["kv"].block.tolist() == [[0, 1]]
    assert (own.taps, own.embeds, own.embed_rows, own.pending) == ({}, None, None, None)
    assert own.token is batch.token
    assert batch.of("nobody").table == {}


def test_a_commit_that_is_pending_for_the_target_is_not_the_drafters():
    from attrs import evolve

    rows = RowSet(0, 0, [5], {"d/kv": SeqTable((4,), (0,))})
    batch = evolve(make_batch("held", [rows]), pending=Commit(i32([[0]]), i32([1])))
    assert batch.of("d").pending is None


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 130])
def test_every_row_of_a_chain_sees_those_before_it(rows):
    view = Round(
        slot=i32([0]), anchor=i32([1]), length=i32([5]), usable_from=i32([0]), history=torch.zeros(1, 1),
        params=None, noise=None, capacity=rows, room=i32([rows]),
    )  # fmt: skip
    sees = chain_batch(view, torch.ones(1, rows, dtype=torch.int32), "d").sees
    for row in range(rows):
        seen = [bit for bit in range(rows) if int(sees[row, bit // 64]) >> (bit % 64) & 1]
        assert seen == list(range(row + 1))


@pytest.mark.parametrize("axes", [1, 3])
def test_behind_images_positions_are_shifted_against_indexes(axes):
    unused = None
    tokens = torch.arange(6, dtype=torch.int32).view(2, 3)
    view = Round(
        slot=i32([0, 1]), anchor=tokens[:, 0], length=i32([10, 20]), usable_from=i32([0, 0]),
        history=torch.zeros(1, 1), params=unused, noise=unused, capacity=3, room=i32([2, 2]),
        shift=i32([-4, 0]), table={},
    )  # fmt: skip
    made = chain_batch(view, tokens, "d", axes=axes)
    assert made.index.tolist() == [10, 11, 12, 20, 21, 22]
    assert made.position.tolist() == [[6, 7, 8, 20, 21, 22]] * axes
