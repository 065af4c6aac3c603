"""What the block manager promises, one behaviour at a time."""

from __future__ import annotations

from typing import Any

import pytest

from luce_core.contracts import Fence, Group, Hit, SeqId
from luce_core.errors import CapacityError, PlanError, UsageError

from .world import LAYOUTS, FakeStore, World, layout

NOW = Fence(0)
A = list(range(100, 120))
B = list(range(200, 220))


def world(name: str = "pages", **more: Any) -> World:
    return World(LAYOUTS[name], **more)


def cached(world: World) -> int:
    return sum(world.manager.stats().cached_blocks.values())


# --- hits


def test_a_hit_never_covers_the_whole_prompt() -> None:
    w = world()
    w.close(w.start(A[:8]))
    assert w.manager.match(A[:8]) == Hit(7, None)
    assert w.manager.match(A[:1]) == Hit(0, None)
    assert w.manager.match([]) == Hit(0, None)
    assert w.manager.match(A[:9]) == Hit(8, None)


def test_the_next_turn_of_a_conversation_starts_where_the_last_one_ended() -> None:
    w = world()
    w.close(w.start(A[:11]))
    assert w.manager.match([*A[:11], 1, 2, 3]).length == 11


def test_a_hit_may_end_within_a_block() -> None:
    w = world()
    w.close(w.start(A[:12]))
    assert w.manager.match([*A[:6], 1, 2]).length == 6
    seq = w.open([*A[:6], 1, 2])
    assert w.extend(seq, [1, 2])
    assert w.manager.stats().copies == 1
    w.verify_all()


def test_one_text_closed_twice_is_kept_once() -> None:
    w = world()
    for end in (10, 10, 9):
        w.close(w.start(A[:end]))
    assert w.manager.stats().checkpoints == 1
    assert cached(w) == 3


def test_the_best_of_several_beginnings_is_found() -> None:
    w = world()
    for text in ([*A[:5], 1], [*A[:7], 1], [*A[:6], 1, 1]):
        w.close(w.start(text))
    assert w.manager.match([*A[:8], 9]).length == 7


def test_full_blocks_of_a_running_sequence_are_shared_at_once() -> None:
    w = world()
    w.start(A[:10])
    assert w.manager.match([*A[:10], 1]).length == 8
    other = w.open([*A[:10], 1])
    assert w.manager.tables(other)["m/kv"].blocks == w.manager.tables(SeqId(0))["m/kv"].blocks[:2]
    assert w.extend(other, [*A[8:10], 1])
    assert w.manager.stats().copies == 0


def test_texts_that_meet_again_are_different_prefixes() -> None:
    w = world()
    w.close(w.start([*A[:4], *B[:4]]))
    assert w.manager.match([*B[:4], *B[:4], 1]).length == 0


def test_keys_may_be_hashes_of_any_width() -> None:
    w = world()
    keys = [2**70 + n for n in range(8)] + [-(2**63) - 1]
    w.close(w.start(keys))
    assert w.manager.match([*keys, 1]).length == 9
    assert w.manager.match([*keys[:7], 5, 1]).length == 7


def test_a_shorter_hit_may_be_opened() -> None:
    w = world()
    w.close(w.start(A[:12]))
    seq = w.open([*A[:12], 1], limit=5)
    assert w.manager.length(seq) == 5


def test_a_hit_that_is_gone_is_refused() -> None:
    w = world()
    w.close(w.start(A[:12]))
    hit = w.manager.match([*A[:12], 1])
    w.manager.clear()
    with pytest.raises(KeyError, match=r"12 tokens is not cached, 0 are"):
        w.manager.open([*A[:12], 1], hit)
    w.finish()


def test_a_hit_longer_than_the_prompt_is_refused() -> None:
    w = world()
    w.close(w.start(A[:12]))
    with pytest.raises(KeyError):
        w.manager.open(A[:12], Hit(12, None))


def test_hits_end_where_no_entry_is_half_filled() -> None:
    w = world("strided-pages")
    w.close(w.start(A[:12]))
    assert w.manager.match([*A[:7], 1, 2]).length == 6


# --- checkpoints


@pytest.mark.parametrize("name", ["slots", "window", "strided", "only-window", "only-slots", "everything"])
def test_slots_and_windows_can_only_be_restored_at_a_checkpoint(name: str) -> None:
    w = world(name)
    seq = w.start(A[:6])
    made = w.checkpoint(seq)
    assert w.extend(seq, A[6:11])
    w.close(seq)
    assert w.manager.match([*A[:11], 1]) == Hit(6, made)
    assert w.manager.match([*A[:6]]) == Hit(0, None)
    assert w.manager.match([*A[:5], 1, 1]) == Hit(0, None)
    other = w.open([*A[:11], 1])
    assert w.extend(other, [*A[6:11], 1])
    w.verify_all()


def test_the_deepest_checkpoint_wins() -> None:
    w = world("slots", blocks=20)
    seq = w.start(A[:2])
    for end in (4, 5, 7, 9):
        w.checkpoint(seq)
        assert w.extend(seq, A[len(w.texts[seq]) : end])
    assert w.manager.match([*A[:8], 0]).length == 7
    assert w.manager.match(A[:6]).length == 5
    assert w.manager.match([*A[:4], 0]).length == 4
    assert w.manager.match([*A[:3], 0]).length == 2


def test_a_checkpoint_at_a_place_that_has_one_is_the_same() -> None:
    w = world("slots")
    first = w.start(A[:6])
    made = w.checkpoint(first)
    second = w.start(A[:7])
    w.close(second)
    third = w.open(A[:7])
    assert w.manager.length(third) == 6
    assert w.checkpoint(third) == made
    assert w.manager.stats().checkpoints == 1


def test_blocks_no_checkpoint_needs_are_given_back_at_once() -> None:
    w = world("slots")
    seq = w.start(A[:5])
    w.checkpoint(seq)
    assert w.extend(seq, A[5:20])
    w.close(seq)
    assert cached(w) == 2  # one full block, one partly filled


def test_a_snapshot_larger_than_the_budget_keeps_nothing() -> None:
    w = world("slots", cache_bytes=1000, host_bytes=6)
    seq = w.start(A[:9])
    other = w.start(B[:9])
    assert w.checkpoint(seq) != w.checkpoint(other)
    w.close(seq)
    assert w.manager.match([*A[:9], 1]).length == 0
    assert w.manager.stats().host_bytes == 0


def test_snapshots_stay_within_the_host_budget() -> None:
    w = world("only-slots", host_bytes=20)
    seq = w.start(A[:1])
    for key in A[1:9]:
        w.checkpoint(seq)
        assert w.extend(seq, [key])
    stats = w.manager.stats()
    assert (stats.checkpoints, stats.host_bytes) == (2, 14)
    assert w.manager.match(A).length == 8


# --- drafters


def test_a_hit_restores_a_drafter_where_it_can() -> None:
    w = world("drafter")
    w.close(w.start(A[:10]))
    seq = w.open([*A[:10], 1])
    assert w.manager.usable_from(seq) == {"d": 0}


def test_a_drafter_that_cannot_be_restored_does_not_shorten_the_hit() -> None:
    w = world("hybrid-drafter")
    w.close(w.start(A[:12]))
    seq = w.open([*A[:10], 1])
    assert w.manager.length(seq) == 10
    assert w.manager.usable_from(seq) == {"d": 10}
    assert w.manager.tables(seq)["d/dkv"].blocks == ()
    assert w.extend(seq, B[:6])
    assert w.manager.tables(seq)["d/dkv"].firsts == (8, 12)
    w.verify_all()


def test_without_a_checkpoint_a_drafter_with_slots_starts_afresh() -> None:
    w = world("hybrid-drafter")
    w.close(w.start(A[:10]))
    assert w.manager.usable_from(w.open([*A[:10], 1])) == {"d": 10}


def test_a_checkpoint_restores_a_drafter_with_slots() -> None:
    w = world("hybrid-drafter")
    seq = w.start(A[:10])
    w.checkpoint(seq)
    w.close(seq)
    assert w.manager.usable_from(w.open([*A[:10], 1])) == {"d": 0}


def test_what_a_drafter_lacked_is_not_handed_on_as_if_it_were_there() -> None:
    w = world("drafter", blocks=30)
    w.close(w.start(A[:10]))
    lacking = w.open([*A[:10], 1])
    w.manager._seqs[lacking].usable["d"] = 10  # as if the drafter had started here
    w.texts[lacking] = list(A[:10])
    assert w.extend(lacking, B[:10])
    w.close(lacking)
    seq = w.open([*A[:10], *B[:10], 1])
    assert w.manager.usable_from(seq) == {"d": 12}
    within = w.open([*A[:10], B[0], 1])
    assert w.manager.usable_from(within) == {"d": 11}
    w.verify_all()


# --- memory


def test_reserving_takes_all_groups_or_nothing() -> None:
    w = world("window", blocks=5)
    w.store.sizes.num_blocks["m/swa"]
    seq = w.start(A[:4])
    before = w.manager.stats()
    assert not w.manager.reserve(seq, 17)
    assert w.manager.stats() == before
    assert w.manager.reserve(seq, 16)
    assert w.manager.stats().free_blocks == {"m/kv": 0, "m/swa": 0}


def test_a_hopeless_request_evicts_nothing() -> None:
    w = world(blocks=6)
    w.close(w.start(A[:12]))
    seq = w.open(B)
    assert not w.manager.fits(seq, 25)
    assert not w.manager.reserve(seq, 25)
    assert cached(w) == 3
    assert w.manager.fits(seq, 24)
    assert w.manager.reserve(seq, 24)
    assert cached(w) == 0


def test_least_recently_used_goes_first_and_from_its_end() -> None:
    w = world(blocks=8, slots=4)
    w.close(w.start(A[:12]))
    w.close(w.start(B[:12]))
    w.close(w.open([*A[:12], 1]))  # used again
    seq = w.open([1])
    assert w.manager.reserve(seq, 12)
    assert w.manager.match([*A[:12], 1]).length == 12
    assert w.manager.match([*B[:12], 1]).length == 8


def test_blocks_in_use_are_never_evicted() -> None:
    w = world(blocks=6, slots=3)
    w.close(w.start(A[:12]))
    user = w.open([*A[:12], 1])
    seq = w.open(B)
    assert not w.manager.reserve(seq, 13)
    assert w.manager.reserve(seq, 12)
    w.verify(user)


def test_the_budget_bounds_what_stays() -> None:
    w = world(blocks=40, cache_bytes=50)
    w.close(w.start(A))
    assert w.manager.stats().cached_bytes == 50
    assert w.manager.match([*A, 1]).length == 20
    w.close(w.start(B[:8]))
    assert w.manager.stats().cached_bytes == 50
    assert w.manager.match([*B[:8], 1]).length == 8
    assert w.manager.match([*A, 1]).length == 12


def test_without_budget_nothing_stays() -> None:
    w = world(cache_bytes=0)
    w.close(w.start(A))
    assert w.manager.match([*A, 1]).length == 0
    assert w.manager.stats().free_blocks == {"m/kv": 12}


def test_blocks_and_slots_wait_for_the_fence_they_were_closed_with() -> None:
    w = world(blocks=5, slots=1, cache_bytes=0)
    seq = w.start(A)
    w.manager.close(seq, Fence(7))
    with pytest.raises(CapacityError, match="0 of 1 slots in use and 1 waiting for a fence"):
        w.manager.open(B, Hit(0, None))
    w.manager.retire(Fence(6))
    with pytest.raises(CapacityError):
        w.manager.open(B, Hit(0, None))
    w.manager.retire(Fence(7))
    assert w.manager.reserve(w.manager.open(B, Hit(0, None)), 20)


def test_nothing_is_evicted_for_blocks_that_would_have_to_wait() -> None:
    w = world(blocks=5)
    w.close(w.start(A[:16]), in_flight=True)
    seq = w.open(B)
    assert not w.manager.reserve(seq, 8)
    assert cached(w) == 4
    assert w.manager.match([*A[:16], 1]).length == 16


def test_a_hit_on_the_host_counts_as_used() -> None:
    w = world("slots", blocks=30, slots=3)
    for text in (A[:6], B[:6]):
        seq = w.start(text)
        w.checkpoint(seq)
        w.close(seq)
    w.manager.move(w.manager.cached_blocks(A[:6]), "host", NOW)
    w.close(w.open([*A[:6], 1]))
    w.manager.check_integrity()
    w.manager.reclaim(1)
    assert w.manager.match([*B[:6], 1]).length == 0
    assert w.manager.match([*A[:6], 1]).length == 6


def test_bringing_a_hit_back_evicts_nothing_it_needs() -> None:
    w = World(LAYOUTS["slots"], blocks=4, slots=2)
    seq = w.start(A[:14])
    w.checkpoint(seq)
    w.close(seq)
    w.manager.move(w.manager.cached_blocks(A[:14])[:1], "host", NOW)
    other = w.start(B[:4])
    with pytest.raises(CapacityError, match="come back"):
        w.open([*A[:14], 1])
    w.close(other)
    w.open([*A[:14], 1])
    w.verify_all()


def test_cached_blocks_in_flight_are_shared_but_not_overwritten() -> None:
    w = world(blocks=5, slots=3)
    w.close(w.start(A[:16]), in_flight=True)
    seq = w.open(B)
    assert w.manager.reserve(seq, 4)
    assert not w.manager.reserve(seq, 8)
    assert w.open([*A[:16], 1]) is not None
    w.close(SeqId(2))
    w.retire()
    assert w.manager.reserve(seq, 8)


def test_window_blocks_go_when_they_left_the_window() -> None:
    w = world("window", blocks=12)  # window 6, blocks of 4
    seq = w.start(A[:4])
    for key in A[4:18]:
        assert w.extend(seq, [key])
    tables = w.manager.tables(seq)
    assert tables["m/kv"].firsts == (0, 4, 8, 12, 16)
    assert tables["m/swa"].firsts == (8, 12, 16)
    assert w.manager.stats().used_blocks == {"m/kv": 5, "m/swa": 3}


def test_a_long_prompt_fits_a_small_window_pool_step_by_step() -> None:
    w = World({"m": layout(Group("swa", window=6))}, blocks=5)
    seq = w.open([1])
    assert not w.manager.fits(seq, 60)
    assert w.manager.fits(seq, 60, step_tokens=8)
    assert not w.manager.fits(seq, 60, step_tokens=12)
    assert w.manager.room(60, step_tokens=8)
    assert not w.manager.room(60)
    for start in range(0, 60, 8):
        assert w.extend(seq, list(range(start, min(start + 8, 60))))
    w.verify_all()


def test_room_needs_a_slot() -> None:
    w = world(slots=1)
    assert w.manager.room(48)
    assert not w.manager.room(49)
    w.open([1])
    assert not w.manager.room(1)


def test_a_group_with_a_stride_takes_as_many_blocks_as_one_without() -> None:
    w = world("strided", blocks=20)  # stride 4, blocks of 4: one entry a block
    seq = w.start(A[:4])
    for rows in (1, 3, 40):
        assert w.manager.reserve(seq, rows)
        assert len(w.manager.tables(seq)["m/c4"].blocks) == len(w.manager.tables(seq)["m/kv"].blocks)


# --- forks


def test_a_fork_shares_until_it_writes() -> None:
    w = world(blocks=12)
    seq = w.start(A[:10])
    child = w.fork(seq)
    assert w.manager.tables(child) == w.manager.tables(seq)
    assert w.manager.stats().used_blocks == {"m/kv": 3}
    assert w.extend(seq, [1])  # the parent goes on in place
    assert w.manager.stats().copies == 0
    assert w.extend(child, [2])
    assert w.manager.stats().copies == 1
    assert w.manager.stats().used_blocks == {"m/kv": 4}
    w.verify_all()


def test_the_last_holder_of_a_shared_block_writes_in_place() -> None:
    w = world("slots")
    seq = w.start(A[:10])
    child = w.fork(seq)
    w.close(seq)
    assert w.extend(child, [2])
    assert w.manager.stats().copies == 0
    w.verify_all()


def test_but_not_while_work_of_another_may_still_write_it() -> None:
    w = world("slots")
    seq = w.start(A[:10])
    child = w.fork(seq)
    w.close(seq, in_flight=True)
    assert w.extend(child, [2])
    assert w.manager.stats().copies == 1


def test_a_fork_takes_the_slots_along() -> None:
    w = world("slots")
    child = w.fork(w.start(A[:10]))
    assert w.extend(child, [5])
    w.verify_all()


# --- tiers


def test_what_a_stopped_sequence_comes_back_for_is_not_copied_while_there_is_room() -> None:
    for name in ("pages", "slots", "window"):
        w = world(name, swap_bytes=1000)
        kept = w.stop(w.start(A[:10]))
        assert kept is not None
        assert w.manager.stats().swaps == 0
        seq = w.open([*A[:10], 1])
        assert len(w.texts[seq]) == 10
        w.release(kept)
        w.finish()


def test_it_goes_after_all_that_nobody_waits_for_and_comes_back_from_the_host() -> None:
    w = world(blocks=6, swap_bytes=1000)
    kept = w.stop(w.start(A[:8]))
    w.close(w.start(B[:8]))
    assert kept is not None
    other = w.start(list(range(300, 316)))
    assert w.manager.match([*B[:8], 1]).length == 0
    assert w.manager.stats().swaps == 0
    assert w.extend(other, [1, 2, 3, 4])
    assert (w.manager.stats().swaps, w.manager.stats().swap_bytes) == (1, 10)
    w.close(other)
    seq = w.open([*A[:8], 1])
    assert len(w.texts[seq]) == 8
    assert w.manager.stats().swap_bytes == 0
    w.release(kept)
    w.verify_all()


def test_one_that_never_comes_back_leaves_no_copy() -> None:
    w = world(blocks=6, swap_bytes=1000)
    kept = w.stop(w.start(A[:8]))
    assert kept is not None
    w.start(list(range(300, 324)))
    assert w.manager.stats().swap_bytes == 20
    w.release(kept)
    stats = w.manager.stats()
    assert (stats.swap_bytes, stats.host_bytes, stats.retained) == (0, 0, 0)
    assert w.manager.match([*A[:8], 1]).length == 0


def test_what_two_wait_for_is_counted_once_and_stays_for_the_second() -> None:
    w = world(blocks=6, swap_bytes=30)
    first = w.stop(w.start(A[:8]))
    second = w.stop(w.start([*A[:8], 1]))
    assert first is not None
    assert second is not None
    assert w.stop(w.start(B[:4])) is None, "30 bytes are set aside"
    w.start(list(range(300, 324)))
    w.release(first)
    assert w.manager.match([*A[:8], 1, 2]).length == 9
    w.manager.check_integrity()


@pytest.mark.parametrize(("swap_bytes", "most_bytes"), [(29, 1000), (1000, 29)])
def test_a_state_too_large_for_the_budget_or_its_worth_is_not_kept(swap_bytes: int, most_bytes: int) -> None:
    w = world(swap_bytes=swap_bytes)
    assert w.stop(w.start(A[:10]), most_bytes=most_bytes) is None
    assert w.manager.stats().retained == 0
    assert w.manager.match([*A[:10], 1]).length == 10, "it is cached as any other"


def test_clearing_forgets_those_that_would_come_back() -> None:
    w = world("slots", swap_bytes=1000)
    kept = w.stop(w.start(A[:10]))
    assert kept is not None
    w.manager.clear()
    assert w.manager.match([*A[:10], 1]).length == 0
    w.release(kept)
    w.finish()


def test_spilled_blocks_come_back_with_their_content() -> None:
    w = world(blocks=6, spill=True)
    w.close(w.start(A))
    w.close(w.start(B))
    assert w.manager.stats().spills
    assert w.manager.match([*A, 1]).length == 20
    seq = w.open([*A, 1])
    assert w.extend(seq, [1])
    w.verify_all()
    w.finish()


def test_a_hit_on_the_host_needs_room_on_the_device() -> None:
    w = world(blocks=6, spill=True)
    w.close(w.start(A))
    w.start(B)
    with pytest.raises(CapacityError, match="20 tokens cannot come back from the host"):
        w.open([*A, 1])
    w.manager.check_integrity()
    assert w.manager.match([*A, 1]).length == 20


def test_blocks_move_to_the_host_and_back() -> None:
    w = world(blocks=12)
    w.close(w.start(A[:12]))
    blocks = w.manager.cached_blocks(A)
    assert len(blocks) == 3
    assert w.manager.move(blocks[1:], "host", Fence(3)) == 3
    assert w.manager.stats().host_bytes == 20
    w.manager.check_integrity()
    w.manager.retire(Fence(3))
    w.manager.move(blocks, "device", Fence(3))
    assert w.manager.stats().host_bytes == 0
    w.open([*A[:12], 1])
    w.verify_all()


def test_blocks_given_to_the_host_wait_for_the_fence() -> None:
    w = world(blocks=3)
    w.close(w.start(A[:12]))
    w.manager.move(w.manager.cached_blocks(A), "host", Fence(2))
    seq = w.open([1])
    assert not w.manager.reserve(seq, 4)
    w.manager.retire(Fence(2))
    assert w.manager.reserve(seq, 12)


def test_blocks_in_use_do_not_move() -> None:
    w = world()
    w.start(A[:12])
    with pytest.raises(ValueError, match="used by running sequences"):
        w.manager.move(w.manager.cached_blocks(A), "host", NOW)


def test_there_is_no_disk_yet() -> None:
    with pytest.raises(UsageError, match=r"'disk'.*Use 'device' or 'host'"):
        world().manager.move([], "disk", NOW)


def test_a_block_nobody_knows_does_not_move() -> None:
    with pytest.raises(KeyError):
        world().manager.move([99], "host", NOW)


def test_reclaiming_gives_host_bytes_back() -> None:
    w = world("only-slots")
    seq = w.start(A[:1])
    for key in A[1:5]:
        w.checkpoint(seq)
        assert w.extend(seq, [key])
    assert w.manager.stats().host_bytes == 28
    assert w.manager.reclaim(8) == 14
    assert w.manager.reclaim(100) == 14
    assert w.manager.reclaim(1) == 0


# --- misuse


@pytest.mark.parametrize(
    "call",
    [
        lambda m, s: m.reserve(s, 1),
        lambda m, s: m.fits(s, 1),
        lambda m, s: m.advance(s, [1]),
        lambda m, s: m.length(s),
        lambda m, s: m.slot(s),
        lambda m, s: m.tables(s),
        lambda m, s: m.usable_from(s),
        lambda m, s: m.fork(s),
        lambda m, s: m.checkpoint(s),
        lambda m, s: m.close(s, NOW),
    ],
)
def test_a_stale_sequence_raises(call: Any) -> None:
    w = world()
    seq = w.start(A[:4])
    w.manager.close(seq, NOW)
    with pytest.raises(KeyError):
        call(w.manager, seq)
    assert w.manager.open(A, Hit(0, None)) != seq


def test_committing_more_than_was_reserved_raises() -> None:
    w = world()
    seq = w.open(A)
    assert w.manager.reserve(seq, 3)
    with pytest.raises(ValueError, match="room for 4 tokens, not 5: reserve first"):
        w.manager.advance(seq, A[:5])
    assert w.manager.length(seq) == 0


def test_committing_into_a_shared_block_raises() -> None:
    w = world()
    w.close(w.start(A[:10]))
    seq = w.open([*A[:10], 1])
    with pytest.raises(ValueError, match="reserve first"):
        w.manager.advance(seq, [1])


def test_no_slot_left_says_what_to_do() -> None:
    w = world(slots=1)
    seq = w.start(A[:4])
    with pytest.raises(CapacityError, match=r"No sequence can be opened: got 1 of 1 .*--max-sequences"):
        w.manager.open(B, Hit(0, None))
    with pytest.raises(CapacityError, match=r"Sequence 0 cannot be forked"):
        w.manager.fork(seq)


def test_a_store_that_does_not_fit_the_layouts_is_refused() -> None:
    store = FakeStore(LAYOUTS["pages"], block_tokens=6)
    with pytest.raises(PlanError) as caught:
        World.manager_of(store, {"m": layout(Group("kv"), Group("c4", stride=4))})
    assert len(caught.value.problems) == 2
    assert "['m/kv']" in str(caught.value)
    assert "'m/c4' has an entry per 4 tokens; a block of 6 tokens cuts one" in str(caught.value)


# --- figures


def test_stats_count_blocks_and_hits() -> None:
    w = world(blocks=12)
    w.close(w.start(A[:10]))
    w.start([*A[:10], 1, 2, 3])
    stats = w.manager.stats()
    assert (stats.asked_tokens, stats.hit_tokens) == (23, 10)
    assert stats.used_blocks == {"m/kv": 4}
    assert stats.cached_blocks == {"m/kv": 0}
    assert stats.free_blocks == {"m/kv": 8}
    assert (stats.sequences, stats.free_slots) == (1, 2)


def test_tables_are_the_same_object_until_a_block_comes_or_goes() -> None:
    w = world()
    seq = w.start(A[:5])
    tables = w.manager.tables(seq)
    assert w.extend(seq, A[5:7])
    assert w.manager.tables(seq) is tables
    assert w.extend(seq, A[7:9])
    assert w.manager.tables(seq) is not tables
