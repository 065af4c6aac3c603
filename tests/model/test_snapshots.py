"""Copies of states in host memory: their room, copies at once, copies by the mover."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from luce_core.cache import host_room as places
from luce_core.cache.host_room import ALIGN, MOST_UNDER_WAY, PIECE_BYTES, pinned_bytes
from luce_core.model import snapshots
from luce_core.model.snapshots import PinnedPieces, SavedSlot, SlotSaver, host_room


@given(st.lists(st.integers(0, 3000), max_size=12), st.sampled_from([torch.uint8, torch.float32]))
def test_rooms_have_the_shapes_asked_for_and_do_not_overlap(sizes, dtype):
    like = [torch.zeros(size, 2, dtype=dtype) for size in sizes]
    rooms = host_room(like)
    assert [room.shape for room in rooms] == [one.shape for one in like]
    for number, room in enumerate(rooms):
        room.fill_(number)
    assert all(bool((room == number).all()) for number, room in enumerate(rooms))


def test_rooms_share_pieces_and_large_ones_have_their_own(monkeypatch):
    monkeypatch.setattr(places, "PIECE_BYTES", 4 * ALIGN)
    like = [torch.zeros(n, dtype=torch.uint8) for n in (ALIGN, 1, ALIGN + 1, 9 * ALIGN, 3)]
    rooms = host_room(like)
    pieces = [room.untyped_storage().data_ptr() for room in rooms]
    assert pieces[0] == pieces[1] == pieces[2]
    assert len({*pieces}) == 3
    assert all((room.data_ptr() - piece) % ALIGN == 0 for room, piece in zip(rooms, pieces, strict=True))
    assert rooms[3].untyped_storage().nbytes() == 9 * ALIGN


@given(st.lists(st.integers(0, 9 << 20), max_size=12))
def test_pinned_memory_is_counted_in_whole_pieces(sizes):
    """At least what is copied, of each snapshot under way, and at most twice that and a piece."""
    least = MOST_UNDER_WAY * sum(sizes)
    assert least <= pinned_bytes(sizes) <= 2 * least + MOST_UNDER_WAY * (PIECE_BYTES + 2 * ALIGN * len(sizes))


def test_pinned_pieces_are_powers_of_two():
    assert pinned_bytes([3 << 20] * 48) == 2 * (9 * (16 << 20) + (16 << 20))
    assert pinned_bytes([20 << 20]) == 2 * (32 << 20)
    assert pinned_bytes([]) == 0


def test_states_of_the_cpu_are_copied_at_once():
    state = torch.arange(6.0)
    saved = SlotSaver().save([state])
    state.zero_()
    assert saved.states[0].tolist() == [0, 1, 2, 3, 4, 5]


def test_the_mover_waits_for_the_device_and_copies():
    waited = []

    class Event:
        def synchronize(self):
            waited.append(True)

    source, saver = torch.arange(4.0), SlotSaver()
    moved = saver._move([], (source,), [Event()])
    source.zero_()
    assert waited
    assert moved[0].tolist() == [0, 1, 2, 3]


@pytest.fixture
def pieces_of(monkeypatch):
    """Takes pieces for states of so many bytes, of what is pinned only in name."""
    monkeypatch.setattr(snapshots, "PIN", False)
    monkeypatch.setattr(places, "PIECE_BYTES", 4 * ALIGN)
    pinned = PinnedPieces()

    def take(*sizes):
        return pinned.take([torch.zeros(size, dtype=torch.uint8) for size in sizes])

    return pinned, take


def addresses(taken):
    return {one.data_ptr() for one in taken}


def test_pinned_pieces_are_used_again(pieces_of):
    pinned, take = pieces_of
    first, states = take(ALIGN, 9 * ALIGN, 3)
    assert [state.numel() for state in states] == [ALIGN, 9 * ALIGN, 3]
    second, _ = take(ALIGN, 9 * ALIGN, 3)
    assert not addresses(first) & addresses(second)
    pinned.give_back(first)
    third, _ = take(ALIGN, 9 * ALIGN, 3)
    assert addresses(third) == addresses(first)


def test_no_more_pieces_are_kept_than_may_be_under_way(pieces_of):
    pinned, take = pieces_of
    every = [take(ALIGN) for _ in range(MOST_UNDER_WAY + 2)]
    for taken, _ in every:
        pinned.give_back(taken)
    kept = sum(len(spare) for spare in pinned._spare.values())
    assert kept == MOST_UNDER_WAY
    take(40 * ALIGN)  # of another size: the others go
    assert not any(pinned._spare.values())


def test_pieces_come_back_when_a_move_fails(pieces_of):
    pinned, take = pieces_of
    saver = SlotSaver()
    saver._pinned = pinned
    taken, states = take(8)

    class Event:
        def synchronize(self):
            raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="gone"):
        saver._move(taken, states, [Event()])
    assert addresses(take(8)[0]) == addresses(taken)


def test_whoever_reads_a_snapshot_meets_what_went_wrong():
    failed: Future[snapshots.States] = Future()
    failed.set_exception(MemoryError("no room"))
    with pytest.raises(MemoryError, match="no room"):
        _ = SavedSlot(failed).states


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_is_queued_later_does_not_change_a_snapshot():
    saver = SlotSaver()
    states = [torch.full((1 << 20,), float(n), device="cuda") for n in range(3)]
    saved = []
    for _ in range(5):
        saved.append(saver.save(states))
        for state in states:
            state.add_(10)
    for turn, one in enumerate(saved):
        assert [float(copy.min()) for copy in one.states] == [n + 10.0 * turn for n in range(3)]
        assert [float(copy.max()) for copy in one.states] == [n + 10.0 * turn for n in range(3)]
