"""Tenants in turn: single decisions, and what holds for tenants under random load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from math import ceil
from random import Random
from typing import Any

import pytest

from luce_core.contracts import SeqId, SeqView
from luce_core.engine.scheduler import (
    LOOKAHEAD,
    MOST_PRIORITY,
    PATIENCE_ROWS,
    PRIORITY_ROWS,
    FairScheduler,
    for_places,
    in_turn,
    rank,
    spread,
)
from luce_core.engine.tenants import TenantLedger

FAR = 1 << 40


def seq(number: int, length: int, prompt: int, tenant: str = "", served: int = 0, **more: Any) -> SeqView:
    return SeqView(
        seq=SeqId(number),
        length=length,
        prompt=prompt,
        arrived_s=more.pop("arrived_s", float(number)),
        constrained=False,
        barrier=FAR,
        nodes=0,
        tenant=tenant,
        served=served,
        **more,
    )


def room(_: SeqId, __: int) -> bool:
    return True


def plan(
    waiting: list[SeqView],
    running: list[SeqView],
    budget: int = 32,
    fits: Callable[[SeqId, int], bool] = room,
    most: int = 8,
) -> tuple[dict[int, int], list[int]]:
    work, preempted = FairScheduler(most).plan(waiting, running, budget, fits)
    return {item.seq: item.rows for item in work}, list(preempted)


def order(views: list[SeqView]) -> list[int]:
    return [view.seq for view in in_turn(views, 32)]


# --- who is next


def test_one_tenant_is_served_in_order_of_arrival() -> None:
    dice = Random(1)
    for _ in range(50):
        views = [
            seq(n, 0, dice.randint(0, 99), "a", 7, arrived_s=dice.random() * 90, priority=dice.randint(-1, 2))
            for n in range(dice.randint(0, 20))
        ]
        in_order = sorted(views, key=rank)
        assert in_turn(views, 32) == spread(views) == in_order
        assert for_places(views, [], 1) == in_order[:LOOKAHEAD]


def test_the_tenant_served_least_goes_first_whenever_it_came() -> None:
    assert order([seq(1, 0, 9, "a", 100), seq(2, 0, 9, "b", 90)]) == [2, 1]


def test_tenants_take_turns_by_the_rows_they_would_get() -> None:
    line = [seq(n, 0, 16, "a") for n in (1, 2, 3)] + [seq(n, 0, 32, "b") for n in (4, 5)]
    assert order(line) == [1, 4, 2, 3, 5]


def test_a_priority_leads_by_so_many_rows_and_no_more() -> None:
    def first(lead: int, priority: int) -> int:
        return order([seq(1, 0, 9, "a", 0), seq(2, 0, 9, "b", lead, priority=priority)])[0]

    assert first(PRIORITY_ROWS - 1, 1) == 2
    assert first(PRIORITY_ROWS + 1, 1) == 1
    assert first(MOST_PRIORITY * PRIORITY_ROWS + 1, 10**9) == 1


def test_a_free_place_goes_to_who_runs_least_then_to_who_was_served_least() -> None:
    running = [seq(1, 5, 5, "a", 0), seq(2, 5, 5, "b", 50), seq(3, 5, 5, "b", 50)]
    waiting = [
        seq(n, 0, 9, tenant, {"a": 0, "b": 50, "c": 90}[tenant]) for n, tenant in enumerate("aabbcc", 10)
    ]
    assert [view.seq for view in for_places(waiting, running, 1)] == [14]
    assert [view.seq for view in for_places(waiting, running, 5)] == [14, 10, 15, 11, 12]


def test_who_runs_most_has_the_last_place() -> None:
    running = [seq(1, 5, 5, "a"), seq(2, 5, 5, "a"), seq(3, 5, 5, "a"), seq(9, 5, 5, "b")]
    assert [view.seq for view in spread(running)] == [1, 9, 2, 3]


def test_short_prompts_of_a_tenant_ahead_do_not_pass() -> None:
    long = seq(1, 0, 1000, "a", 0)
    assert plan([long, seq(2, 0, 8, "b", 32)], [])[0] == {1: 24, 2: 8}
    assert plan([long, seq(2, 0, 8, "b", 33)], [])[0] == {1: 32}


# --- who gives way


def test_memory_is_given_back_by_the_tenant_that_runs_most() -> None:
    running = [seq(1, 5, 5, "a"), seq(2, 5, 5, "a"), seq(9, 5, 5, "b")]
    work, preempted = plan([], running, fits=lambda number, _rows: number != 1)
    assert preempted == [2], "the only sequence of b is younger, and stays"
    assert work == {9: 1}


@pytest.mark.parametrize(
    ("ahead", "given"), [(PATIENCE_ROWS - 1, []), (PATIENCE_ROWS, [2]), (PATIENCE_ROWS + 500, [2])]
)
def test_a_tenant_of_which_nothing_runs_gets_a_place_when_patience_ends(ahead: int, given: list[int]) -> None:
    running = [seq(1, 5, 5, "a", ahead), seq(2, 5, 5, "a", ahead)]
    work, preempted = plan([seq(9, 0, 4, "b")], running, most=2)
    assert preempted == given
    assert set(work) == {1, 2} - set(given)


def test_lack_of_memory_counts_as_lack_of_a_place() -> None:
    running = [seq(1, 5, 5, "a", 500), seq(2, 5, 5, "a", 500)]
    assert plan([seq(9, 0, 4, "b")], running, fits=lambda number, _rows: number != 9) == ({1: 1}, [2])


def test_nobody_gives_its_only_place() -> None:
    running = [seq(1, 5, 5, "a", 500), seq(2, 5, 5, "c", 500)]
    assert plan([seq(9, 0, 4, "b")], running, most=2)[1] == []


def test_a_tenant_that_runs_something_waits_like_anybody() -> None:
    running = [seq(1, 5, 5, "a", 500), seq(2, 5, 5, "a", 500), seq(3, 5, 5, "b")]
    assert plan([seq(9, 0, 4, "b")], running, most=3)[1] == []


def test_nobody_gives_a_place_while_one_is_free() -> None:
    running = [seq(1, 5, 5, "a", 500), seq(2, 5, 5, "a", 500)]
    work, preempted = plan([seq(9, 0, 4, "b")], running, most=3)
    assert (work, preempted) == ({1: 1, 2: 1, 9: 4}, [])


# --- under load


class Request:
    """One request of the loads below."""

    def __init__(self, number: int, tenant: str, prompt: int, answer: int, arrived: int) -> None:
        self.seq = SeqId(number)
        self.tenant = tenant
        self.prompt = self.replay = prompt
        self.total = prompt + answer
        self.length = 0
        self.arrived = arrived
        self.first_work: int | None = None
        self.first_token: int | None = None


class Load:
    """A server with plenty of memory and few places. `more` makes what arrives in each step."""

    def __init__(self, most: int, budget: int, more: Callable[[Load], Iterator[Request]]) -> None:
        self.most, self.budget, self.more = most, budget, more
        self.scheduler = FairScheduler(most)
        self.ledger = TenantLedger()
        self.waiting: dict[SeqId, Request] = {}
        self.running: dict[SeqId, Request] = {}
        self.served: Counter[str] = Counter()
        self.preempted: Counter[str] = Counter()
        self.done: list[Request] = []
        self.now = 0

    def view(self, one: Request) -> SeqView:
        served = self.ledger.served(one.tenant)
        return seq(one.seq, one.length, one.replay, one.tenant, served, arrived_s=float(one.arrived))

    def step(self) -> None:
        for one in self.more(self):
            self.waiting[one.seq] = one
            self.ledger.join(one.tenant)
        waiting = [self.view(one) for one in self.waiting.values()]
        running = [self.view(one) for one in self.running.values()]
        work, preempted = self.scheduler.plan(waiting, running, self.budget, room)
        assert sum(item.rows for item in work) <= self.budget
        worked = {item.seq for item in work}
        for view in running:
            stalled = view.length >= view.prompt and view.seq not in worked
            assert not stalled or view.seq in preempted, f"{view} could decode and was not let"
        for number in preempted:
            one = self.running.pop(number)
            one.replay, one.length = max(one.length, one.replay), 0
            self.waiting[number] = one
            self.preempted[one.tenant] += 1
        for item in work:
            self.run(item.seq, item.rows)
        assert len(self.running) <= self.most
        self.check_admitted({view.seq for view in waiting} & worked)
        self.now += 1

    def check_admitted(self, admitted: set[SeqId]) -> None:
        """Nobody got the last free place while of another tenant that waits less ran."""
        runs = Counter(one.tenant for one in self.running.values())
        waits = {one.tenant for one in self.waiting.values()}
        if len(self.running) < self.most or not admitted <= self.running.keys():
            return
        for tenant in {self.running[number].tenant for number in admitted}:
            least = min((runs[other] for other in waits), default=runs[tenant])
            assert runs[tenant] <= least + 1, f"{tenant!r} was admitted; {runs} run, {waits} wait"

    def run(self, number: SeqId, rows: int) -> None:
        one = self.running.get(number) or self.waiting.pop(number)
        self.running[number] = one
        one.first_work = self.now if one.first_work is None else one.first_work
        if one.length >= one.replay and one.first_token is None:
            one.first_token = self.now
        one.length += rows
        self.served[one.tenant] += rows
        self.ledger.charge([(one.tenant, rows)])
        if one.length >= one.total:
            del self.running[number]
            self.ledger.leave(one.tenant)
            self.done.append(one)


def test_a_newcomer_waits_as_long_beside_300_requests_as_beside_5() -> None:
    """Until its first token no other tenant gets more than the newcomer, its patience, and a step or two."""
    for seed in range(10):
        dice = Random(seed)
        most, budget = dice.randint(2, 6), dice.randint(24, 96)
        others = dice.randint(1, most - 1)
        arrival, prompt = dice.randint(5, 120), dice.randint(1, 300)
        for queued in (5, 300):
            load = _crowd(Random(seed), most, budget, others, queued, longest=3000)
            newcomer = Request(10**6, "new", prompt, 8, arrival)
            many = load.more
            load.more = lambda at, n=newcomer, m=many: [n] if at.now == n.arrived else m(at)  # type: ignore[assignment, misc, return-value]
            least = (budget - most) * 3 // 8
            rows = (others + 1) * (prompt + PATIENCE_ROWS + 2 * budget)
            bound = PATIENCE_ROWS // 2 + ceil(rows / least) + 2
            while newcomer.first_token is None:
                assert load.now <= arrival + bound, (seed, queued, bound)
                load.step()


def _crowd(dice: Random, most: int, budget: int, tenants: int, queued: int, longest: int = 60) -> Load:
    made = 0

    def more(load: Load) -> Iterator[Request]:
        nonlocal made
        there = Counter(one.tenant for one in (*load.waiting.values(), *load.running.values()))
        for tenant in map(str, range(tenants)):
            for _ in range(queued - there[tenant]):
                made += 1
                prompt = dice.choice([0, dice.randint(1, 9), dice.randint(1, 200)])
                yield Request(made, tenant, prompt, dice.randint(1, longest), load.now)

    return Load(most, budget, more)


LONGEST = 260  # rows of a request of `_crowd`


@pytest.mark.parametrize("tenants", [2, 3, 5])
def test_tenants_that_always_wait_get_equal_places(tenants: int) -> None:
    """Where there are fewer places than tenants they take turns: a tenant is ahead by a request a place."""
    for seed in range(8):
        dice = Random(seed)
        most, budget = dice.randint(1, 8), dice.randint(12, 96)
        load = _crowd(dice, most, budget, tenants, queued=6)
        for _ in range(300):
            load.step()
            names = [str(n) for n in range(tenants)]
            runs = Counter(one.tenant for one in load.running.values())
            counts = [runs[name] for name in names]
            assert sum(counts) < most or max(counts) - min(counts) <= 1, (seed, load.now, counts)
            rows = [load.served[name] for name in names]
            assert tenants <= most or max(rows) - min(rows) <= most * LONGEST + budget, (seed, load.now, rows)


def _prompts(lengths: dict[str, int], waiting: int) -> Callable[[Load], Iterator[Request]]:
    """Every tenant always has `waiting` requests with prompts of one length, and answers of two tokens."""
    made = 0

    def more(load: Load) -> Iterator[Request]:
        nonlocal made
        there = Counter(one.tenant for one in (*load.waiting.values(), *load.running.values()))
        for tenant, prompt in lengths.items():
            for _ in range(waiting - there[tenant]):
                made += 1
                yield Request(made, tenant, prompt, 2, load.now)

    return more


@pytest.mark.parametrize(
    "lengths", [(700, 700), (2000, 130, 400), (3000, 40), (20, *[900] * 5), (100, 101, 102, 5000)]
)
def test_tenants_whose_prompts_always_wait_get_equal_rows(lengths: tuple[int, ...]) -> None:
    """Whatever their lengths: nobody is ahead by more than a step, the lead of short prompts and decoding."""
    for seed in range(2):
        dice = Random(seed)
        most, budget = 14 * len(lengths), dice.randint(128, 256)
        load = Load(most, budget, _prompts(dict(zip("abcdef", lengths, strict=False)), waiting=14))
        for _ in range(150):
            load.step()
            rows = load.served.values()
            assert max(rows) - min(rows) <= 3 * budget, (seed, load.now, load.served)
        assert min(load.served.values()) > 20 * budget


def test_rows_nobody_else_can_use_are_not_withheld() -> None:
    """A tenant whose answers are long and prompts short holds no more than its places back."""
    made = 0

    def more(load: Load) -> Iterator[Request]:
        nonlocal made
        there = Counter(one.tenant for one in (*load.waiting.values(), *load.running.values()))
        for tenant, prompt, answer in (("reads", 3000, 20), ("writes", 5, 300)):
            for _ in range(8 - there[tenant]):
                made += 1
                yield Request(made, tenant, prompt, answer, load.now)

    load = Load(4, 64, more)
    for _ in range(800):
        load.step()
    assert load.served["reads"] > 800 * 30
    assert load.ledger.served("reads") - load.ledger.served("writes") <= load.ledger.credit


def test_random_loads_end_and_nobody_gives_way_for_ever() -> None:
    """Thousands of them: each ends within the steps its rows take one by one, and the rows computed twice."""
    for seed in range(1000):
        dice = Random(seed)
        requests = [
            Request(
                n,
                dice.choice("aaab") if seed % 2 else dice.choice("abcd"),
                dice.choice([0, dice.randint(1, 40)]),
                dice.randint(1, 12),
                dice.randint(0, 20),
            )
            for n in range(dice.randint(2, 9))
        ]
        load = Load(
            dice.randint(1, 4),
            dice.randint(6, 32),
            lambda at, r=requests: (one for one in r if one.arrived == at.now),  # type: ignore[misc]
        )
        most_steps = 21 + sum(one.total for one in requests)
        while len(load.done) < len(requests):
            load.step()
            again = sum(load.served.values()) - sum(one.length for one in requests)
            assert load.now <= most_steps + again
        assert load.preempted.total() <= sum(load.served.values()) // PATIENCE_ROWS
        assert len(load.ledger) == 0
