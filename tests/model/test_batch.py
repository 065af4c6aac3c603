"""Host rows to batches: every tensor against what the contract says, by a plain-Python reading of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luce_core.contracts import SeqTable, Tap
from luce_core.model.batch import RowSet, make_batch


@st.composite
def row_sets(draw):
    length = draw(st.integers(0, 50))
    count = draw(st.integers(1, 70))
    tree = draw(st.booleans())
    parents = None
    if tree:
        parents = [-1, *(draw(st.integers(-1, node - 1)) for node in range(1, count))]
    blocks = draw(st.integers(0, 5))
    table = SeqTable(tuple(range(10, 10 + blocks)), tuple(range(0, 4 * blocks, 4)))
    wanted = draw(st.none() | st.lists(st.integers(0, count - 1), max_size=3))
    return RowSet(
        slot=draw(st.integers(0, 7)),
        length=length,
        tokens=draw(st.lists(st.integers(0, 99), min_size=count, max_size=count)),
        tables={"full": table, "window": table},
        sure=draw(st.integers(1, count)),
        parents=parents,
        wanted=wanted,
    )


@pytest.mark.parametrize("seqs", [1, 2, 3])
@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("least", [1, 16])
def test_both_halves_of_a_table_begin_where_tensors_do(seqs, blocks, least):
    """Kernels are compiled for what is known of a pointer: each would be there twice."""
    table = {"full": SeqTable(tuple(range(10, 10 + blocks)), tuple(range(0, 4 * blocks, 4)))}
    rows = [RowSet(s, 0, [1, 2], table) for s in range(seqs)]
    made = make_batch("prefill", rows, least_blocks=least).table["full"]
    assert made.block.data_ptr() % 16 == made.first.data_ptr() % 16 == 0
    assert made.block.shape == made.first.shape == (seqs, max(least, blocks))
    assert made.block[:, :blocks].tolist() == [list(table["full"].blocks)] * seqs
    assert made.first[:, :blocks].tolist() == [list(table["full"].firsts)] * seqs
    assert made.count.tolist() == [blocks] * seqs


def ancestors(parents, row):
    found = [row]
    while parents[found[-1]] >= 0:
        found.append(parents[found[-1]])
    return found


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(row_sets(), min_size=1, max_size=4), phase=st.sampled_from(["held", "prefill"]))
def test_every_tensor_says_what_the_contract_says(rows, phase):
    b = make_batch(phase, rows, axes=3)
    start = 0
    wanted = []
    for s, row in enumerate(rows):
        count = len(row.tokens)
        here = slice(start, start + count)
        assert b.query_start[s] == start
        assert b.token[here].tolist() == list(row.tokens)
        assert b.seq[here].tolist() == [s] * count
        chain = list(range(-1, count - 1))
        parents = list(row.parents) if phase == "held" and row.parents is not None else chain
        assert b.parent[here].tolist() == parents
        depth = [len(ancestors(parents, j)) - 1 for j in range(count)]
        assert b.index[here].tolist() == [row.length + d for d in depth]
        assert b.position[:, here].tolist() == [[row.length + d for d in depth]] * 3
        if phase == "held":
            assert b.sure[s] == row.sure
            for j in range(count):
                bits = [int(b.sees[start + j, bit // 64]) >> (bit % 64) & 1 for bit in range(count)]
                assert {bit for bit in range(count) if bits[bit]} == set(ancestors(parents, j))
        default = range(count) if phase == "held" else ()
        wanted += [start + j for j in (default if row.wanted is None else row.wanted)]
        for group, table in row.tables.items():
            used = len(table.blocks)
            assert b.table[group].count[s] == used
            assert b.table[group].block[s, :used].tolist() == list(table.blocks)
            assert b.table[group].first[s, :used].tolist() == list(table.firsts)
        start += count
    assert b.query_start[-1] == start
    assert b.wanted.tolist() == wanted
    assert b.slot.tolist() == [row.slot for row in rows]
    assert b.length.tolist() == [row.length for row in rows]
    integers = (b.token, b.index, b.position, b.seq, b.slot, b.wanted, b.parent)
    assert {tensor.dtype for tensor in integers} == {torch.int32}
    assert b.sees.dtype == torch.int64


def test_one_decoded_row_takes_the_short_way_to_the_same_batch():
    table = SeqTable((5, 2), (0, 16))
    one = RowSet(3, 17, [42], {"full": table}, parents=[-1], wanted=[0])
    short = make_batch("held", [one])
    long = make_batch("held", [one, RowSet(0, 0, [1], {"full": table})])
    for name in ("token", "index", "seq", "slot", "length", "sure", "parent", "wanted"):
        assert getattr(short, name).tolist() == getattr(long, name)[:1].tolist(), name
        assert getattr(short, name).dtype == getattr(long, name).dtype
    assert short.query_start.tolist() == [0, 1]
    assert short.sees.tolist() == [[1]]
    assert short.position.tolist() == [[17]]
    assert short.table["full"].block.tolist() == [[5, 2]]
    assert short.table["full"].count.tolist() == [2]


def test_a_single_row_without_logits_or_of_padding_is_not_mistaken_for_plain_decoding():
    table = {"full": SeqTable((0,), (0,))}
    assert make_batch("held", [RowSet(0, 0, [1], table, wanted=[])]).wanted.tolist() == []
    assert make_batch("held", [RowSet(0, 0, [1], table, parents=[-2])]).sees.tolist() == [[0]]
    assert make_batch("prefill", [RowSet(0, 4, [1], table)]).wanted.tolist() == []


def test_padding_rows_see_nothing():
    b = make_batch("held", [RowSet(0, 3, [1, 0, 0], {}, parents=[-1, -2, -2])])
    assert b.sees.tolist() == [[1], [0], [0]]
    assert b.index.tolist() == [3, 3, 3]


def test_given_positions_replace_the_index_for_rope_only():
    rows = [RowSet(0, 2, [1, 2], {}, positions=[[9, 9], [8, 9], [7, 9]]), RowSet(1, 5, [3], {})]
    b = make_batch("held", rows, axes=3)
    assert b.position.tolist() == [[9, 9, 5], [8, 9, 5], [7, 9, 5]]
    assert b.index.tolist() == [2, 3, 5]
    single = make_batch("held", [RowSet(0, 2, [1], {}, positions=[[9]])])
    assert (single.position.tolist(), single.index.tolist()) == ([[9]], [2])


def test_a_row_before_its_parent_is_refused():
    with pytest.raises(ValueError, match="row 1 has the parent 2"):
        make_batch("held", [RowSet(0, 0, [1, 2, 3], {}, parents=[-1, 2, 0])])


def test_taps_are_passed_on():
    taps = {Tap("residual", 0): torch.zeros(1, 4)}
    row = RowSet(0, 0, [1], {})
    assert make_batch("held", [row], taps=taps).taps == taps
    assert make_batch("prefill", [row], taps=taps).taps == taps


def test_embedded_rows_stand_where_their_sequence_has_them():
    """Two sequences with three stretches; a batch without any has none."""
    one, two, three = torch.ones(2, 4), 2 * torch.ones(1, 4), 3 * torch.ones(2, 4)
    rows = [
        RowSet(0, 0, [7] * 6, {}, embeds=((1, one), (5, two))),
        RowSet(1, 9, [7] * 3, {}),
        RowSet(2, 4, [7] * 4, {}, embeds=((2, three),)),
    ]
    batch = make_batch("prefill", rows)
    assert batch.embed_rows.tolist() == [1, 2, 5, 11, 12]
    assert torch.equal(batch.embeds, torch.cat((one, two, three)))
    plain = make_batch("prefill", rows[1:2])
    assert plain.embeds is None
    assert plain.embed_rows is None
