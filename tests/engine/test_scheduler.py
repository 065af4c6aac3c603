"""Single decisions of the core's scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from luce_core.contracts import SchedulerContext, SeqId, SeqView, Work
from luce_core.engine.scheduler import FairScheduler, make_scheduler

FAR = 1 << 40


def seq(number: int, length: int, prompt: int, **more: Any) -> SeqView:
    return SeqView(
        seq=SeqId(number),
        length=length,
        prompt=prompt,
        arrived_s=more.pop("arrived_s", float(number)),
        constrained=False,
        barrier=more.pop("barrier", FAR),
        nodes=more.pop("nodes", 0),
        **more,
    )


def room(_: SeqId, __: int) -> bool:
    return True


def room_for(**limits: int) -> Callable[[SeqId, int], bool]:
    """s3=5: sequence 3 has room for 5 more rows; others for anything."""
    return lambda number, rows: rows <= limits.get(f"s{number}", FAR)


def plan(
    waiting: list[SeqView],
    running: list[SeqView],
    budget: int = 32,
    fits: Callable[[SeqId, int], bool] = room,
    most: int = 8,
) -> tuple[dict[int, tuple[str, int]], list[int]]:
    work, preempted = FairScheduler(most).plan(waiting, running, budget, fits)
    return {item.seq: (item.phase, item.rows) for item in work}, list(preempted)


def test_the_factory_takes_the_sequence_limit_from_its_context() -> None:
    scheduler = make_scheduler(SchedulerContext(options=None, max_sequences=2, row_budget=16))
    work, _ = scheduler.plan([seq(n, 0, 3) for n in range(5)], [], 16, room)
    assert [item.seq for item in work] == [0, 1]


def test_every_decoding_sequence_gets_a_row_and_the_prompt_the_rest() -> None:
    work, preempted = plan([], [seq(1, 5, 5), seq(2, 9, 4), seq(3, 2, 100)])
    assert work == {1: ("held", 1), 2: ("held", 1), 3: ("prefill", 30)}
    assert preempted == []


def test_nothing_to_do_is_no_work() -> None:
    assert plan([], []) == ({}, [])


def test_prompts_are_admitted_in_order_of_arrival() -> None:
    work, _ = plan([seq(1, 0, 20, arrived_s=9.0), seq(2, 0, 20, arrived_s=3.0)], [])
    assert work == {2: ("prefill", 20), 1: ("prefill", 12)}


def test_a_priority_counts_as_an_earlier_arrival_but_not_for_ever() -> None:
    early, urgent = seq(1, 0, 32, arrived_s=0.0), seq(2, 0, 32, arrived_s=30.0, priority=1)
    assert plan([early, urgent], [])[0] == {2: ("prefill", 32)}
    late = seq(3, 0, 32, arrived_s=61.0, priority=1)
    assert plan([early, late], [])[0] == {1: ("prefill", 32)}


def test_a_prompt_of_one_token_decodes_at_once() -> None:
    assert plan([seq(1, 0, 0)], [])[0] == {1: ("held", 1)}


def test_a_short_prompt_passes_beside_a_long_one() -> None:
    work, _ = plan([seq(2, 0, 8)], [seq(1, 0, 1000)])
    assert work == {1: ("prefill", 24), 2: ("prefill", 8)}


def test_a_prompt_too_long_for_the_short_share_waits_its_turn() -> None:
    assert plan([seq(2, 0, 9)], [seq(1, 0, 1000)])[0] == {1: ("prefill", 32)}


def test_rows_kept_for_a_short_prompt_without_room_return_to_the_long_one() -> None:
    assert plan([seq(2, 0, 8)], [seq(1, 0, 1000)], fits=room_for(s2=0))[0] == {1: ("prefill", 32)}


def test_nobody_is_admitted_past_a_sequence_without_room() -> None:
    work, preempted = plan([seq(1, 0, 20), seq(2, 0, 2)], [seq(0, 5, 5)], fits=room_for(s1=3))
    assert work == {0: ("held", 1)}
    assert preempted == []


def test_alone_a_prompt_takes_a_smaller_chunk_rather_than_none() -> None:
    assert plan([seq(1, 0, 20)], [], fits=room_for(s1=6))[0] == {1: ("prefill", 5)}


def test_nobody_is_admitted_beyond_the_sequence_limit() -> None:
    work, _ = plan([seq(9, 0, 4)], [seq(1, 5, 5), seq(2, 5, 5)], most=2)
    assert work == {1: ("held", 1), 2: ("held", 1)}


def test_the_youngest_is_preempted_when_decoding_finds_no_room() -> None:
    running = [seq(1, 5, 5), seq(2, 5, 5), seq(3, 0, 50)]
    work, preempted = plan([seq(4, 0, 4)], running, fits=room_for(s1=0))
    assert work == {2: ("held", 1)}
    assert preempted == [3]


def test_the_youngest_steps_back_itself_when_it_finds_no_room() -> None:
    work, preempted = plan([], [seq(1, 5, 5), seq(2, 5, 5)], fits=room_for(s2=0))
    assert (work, preempted) == ({1: ("held", 1)}, [2])


def test_a_lone_sequence_without_room_is_left_to_the_engine() -> None:
    assert plan([], [seq(1, 5, 5)], fits=room_for(s1=0)) == ({}, [])


def test_two_prompts_that_block_each_other_are_resolved() -> None:
    work, preempted = plan([], [seq(1, 4, 50), seq(2, 4, 50)], fits=room_for(s1=0, s2=0))
    assert (work, preempted) == ({}, [2])


def test_a_waiting_sequence_without_room_preempts_nobody() -> None:
    blocked = [seq(1, 5, 5, barrier=5), seq(2, 5, 5, barrier=5)]
    assert plan([seq(3, 0, 4)], blocked, fits=room_for(s3=0)) == ({}, [])


def test_no_prompt_row_reaches_a_barrier() -> None:
    assert plan([], [seq(1, 4, 100, barrier=10)])[0] == {1: ("prefill", 6)}
    assert plan([], [seq(1, 10, 100, barrier=10)])[0] == {}


def test_no_held_row_reaches_a_barrier() -> None:
    assert plan([], [seq(1, 7, 5, barrier=10, nodes=16)])[0] == {1: ("held", 3)}
    assert plan([], [seq(1, 9, 5, barrier=10, nodes=16)])[0] == {1: ("held", 1)}
    assert plan([], [seq(1, 10, 5, barrier=10, nodes=16)])[0] == {}


def test_a_sequence_that_waits_for_the_host_holds_up_nobody() -> None:
    assert plan([seq(1, 0, 9, barrier=0), seq(2, 0, 9)], [])[0] == {2: ("prefill", 9)}


def test_many_that_wait_for_the_host_do_not_hide_one_that_can_run() -> None:
    stuck = [seq(n, 0, 9, barrier=0) for n in range(200)]
    assert plan([*stuck, seq(300, 0, 9)], [])[0] == {300: ("prefill", 9)}


def test_nodes_get_everything_when_no_prompt_waits() -> None:
    work, _ = plan([], [seq(1, 5, 5, nodes=4), seq(2, 5, 5, nodes=100)], budget=16)
    assert work == {1: ("held", 5), 2: ("held", 11)}


def test_nodes_are_shared_evenly_and_small_wishes_leave_the_rest() -> None:
    running = [seq(1, 5, 5, nodes=100), seq(2, 5, 5, nodes=100), seq(3, 5, 5, nodes=1)]
    work, _ = plan([], running, budget=16)
    assert work == {1: ("held", 7), 2: ("held", 7), 3: ("held", 2)}


def test_nodes_get_at_most_half_while_prompts_wait() -> None:
    work, _ = plan([], [seq(1, 5, 5, nodes=100), seq(2, 0, 1000)], budget=33)
    assert work == {1: ("held", 17), 2: ("prefill", 16)}


def test_nodes_take_what_a_short_prompt_leaves() -> None:
    work, _ = plan([], [seq(1, 5, 5, nodes=100), seq(2, 0, 4)], budget=33)
    assert work == {1: ("held", 29), 2: ("prefill", 4)}


def test_nodes_without_room_leave_the_decided_row() -> None:
    assert plan([], [seq(1, 5, 5, nodes=8)], fits=room_for(s1=1))[0] == {1: ("held", 1)}


def test_a_span_is_not_cut() -> None:
    assert plan([], [seq(1, 0, 100, spans=((20, 50),))])[0] == {1: ("prefill", 20)}
    assert plan([], [seq(1, 20, 100, spans=((20, 50),))])[0] == {1: ("prefill", 32)}
    assert plan([], [seq(1, 0, 100, spans=((0, 32), (32, 60)))])[0] == {1: ("prefill", 32)}


def test_young_decode_rows_make_way_for_a_span_as_wide_as_the_step() -> None:
    running = [seq(1, 5, 5), seq(2, 5, 5), seq(3, 20, 100, spans=((20, 51),))]
    assert plan([], running)[0] == {1: ("held", 1), 3: ("prefill", 31)}


def test_decode_rows_stay_when_the_wide_span_has_no_room() -> None:
    running = [seq(1, 5, 5), seq(2, 5, 5), seq(3, 20, 100, spans=((20, 51),))]
    work, _ = plan([], running, fits=room_for(s3=30))
    assert work == {1: ("held", 1), 2: ("held", 1)}


def test_a_span_wider_than_a_step_gets_nothing() -> None:
    assert plan([], [seq(1, 0, 100, spans=((0, 33),))])[0] == {}


def test_fewer_rows_than_decoding_sequences_serve_the_oldest() -> None:
    work, _ = plan([seq(9, 0, 5)], [seq(n, 5, 5) for n in range(4)], budget=2)
    assert work == {0: ("held", 1), 1: ("held", 1)}


def test_the_answer_depends_on_nothing_but_the_arguments() -> None:
    scheduler = FairScheduler(8)
    arguments = ([seq(4, 0, 40)], [seq(1, 5, 5, nodes=3), seq(2, 3, 90)], 32, room)
    first = scheduler.plan(*arguments)
    scheduler.plan([], [seq(7, 5, 5)], 1, room)
    assert scheduler.plan(*arguments) == first
    assert isinstance(first[0][0], Work)
