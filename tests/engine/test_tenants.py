"""What tenants were served, and who may still queue."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce_core.engine.scheduler import PATIENCE_ROWS
from luce_core.engine.tenants import FREE_SHARE, QueueBook, TenantLedger
from luce_core.errors import CapacityError

# --- rows served


def test_a_newcomer_starts_level_with_whoever_was_served_least() -> None:
    ledger = TenantLedger()
    for tenant, rows in (("a", 100), ("b", 70)):
        ledger.join(tenant)
        ledger.charge([(tenant, rows)])
    ledger.join("c")
    assert [ledger.served(tenant) for tenant in "abc"] == [100, 170, 100], "b came when a had 100"


def test_leaving_pays_no_debt_while_others_stay() -> None:
    ledger = TenantLedger()
    ledger.join("a")
    ledger.join("b")
    ledger.charge([("a", 100), ("b", 10)])
    ledger.leave("a")
    ledger.join("a")
    assert ledger.served("a") - ledger.served("b") == 90


def test_a_debt_is_forgotten_when_the_others_have_caught_up() -> None:
    ledger = TenantLedger()
    for tenant in "abc":
        ledger.join(tenant)
    ledger.charge([("a", 100)])
    ledger.leave("a")
    ledger.charge([("b", 150), ("c", 160)])
    ledger.leave("c")
    assert len(ledger) == 2, "a is forgotten, c is remembered"
    ledger.join("a")
    assert ledger.served("a") == ledger.served("b")


def test_when_nobody_is_left_nothing_is_remembered() -> None:
    ledger = TenantLedger()
    ledger.join("a")
    ledger.charge([("a", 100)])
    ledger.leave("a")
    assert len(ledger) == 0
    ledger.join("a")
    assert ledger.served("a") == 0


def test_rows_nobody_had_a_use_for_are_no_credit() -> None:
    ledger = TenantLedger(credit=50)
    ledger.join("a")
    ledger.join("b")
    ledger.charge([("a", 1000), ("b", 10)])
    assert ledger.served("a") - ledger.served("b") == 50


def test_many_that_come_and_go_are_not_all_remembered() -> None:
    ledger = TenantLedger(remembered=10)
    ledger.join("stays")
    for number in range(1000):
        ledger.join(str(number))
        ledger.charge([(str(number), 5 + number % 7)])
        ledger.leave(str(number))
    assert len(ledger) <= 11


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 40)), max_size=60))
def test_nobody_is_ever_behind_by_more_than_the_credit_or_ahead_of_what_it_got(
    rounds: list[tuple[str, int]],
) -> None:
    ledger = TenantLedger(credit=60)
    got: Counter[str] = Counter()
    present: Counter[str] = Counter()
    for tenant, rows in rounds:
        if rows % 3 == 0 and present[tenant]:
            ledger.leave(tenant)
            present[tenant] -= 1
            continue
        ledger.join(tenant)
        present[tenant] += 1
        ledger.charge([(tenant, rows)])
        got[tenant] += rows
        served = [ledger.served(name) for name in "abcd" if present[name]]
        assert max(served) - min(served) <= 60
        assert max(served) <= sum(got.values())


# --- places of the queue


def fill(book: QueueBook, tenant: str, most: int = 10**6) -> int:
    """Enter requests of `tenant` until it is refused or `most` are in; returns how many."""
    for number in range(most):
        try:
            book.enter(f"{tenant}{len(book)}-{number}", tenant)
        except CapacityError:
            return number
    return most


def test_alone_a_tenant_may_fill_the_queue() -> None:
    book = QueueBook(36)
    assert fill(book, "a") == 36
    with pytest.raises(CapacityError, match="36 requests are unfinished; 36 may be"):
        book.enter("one more", "a")


def test_once_another_has_come_the_first_leaves_places() -> None:
    book = QueueBook(36)
    book.enter("b", "b")
    book.leave("b")
    assert fill(book, "a") == 27
    with pytest.raises(CapacityError, match="27 requests of this API key are unfinished, and 9 of 36"):
        book.enter("one more", "a")
    assert fill(book, "b") == 7
    assert fill(book, "c") == 2


def test_a_queue_that_was_full_opens_to_a_newcomer_with_the_first_place() -> None:
    book = QueueBook(8)
    fill(book, "a")
    with pytest.raises(CapacityError):
        book.enter("b", "b")
    book.leave("a0-0")
    with pytest.raises(CapacityError, match="kept for other keys"):
        book.enter("a again", "a")
    book.enter("b", "b")
    assert "b" in book


def test_whoever_has_nothing_queued_gets_a_place_while_one_is_free() -> None:
    for seed in range(200):
        dice = Random(seed)
        book = QueueBook(dice.randint(1, 40))
        tenants = [str(n) for n in range(dice.randint(2, 6))]
        there: list[str] = []
        for number in range(300):
            if there and dice.random() < 0.4:
                book.leave(there.pop(dice.randrange(len(there))))
            tenant = dice.choice(tenants)
            own = sum(name.startswith(f"{tenant}:") for name in there)
            free = book.most - len(book)
            try:
                book.enter(f"{tenant}:{number}", tenant)
            except CapacityError:
                assert own or not free
                assert not free or own >= FREE_SHARE * free
            else:
                there.append(f"{tenant}:{number}")
            assert len(book) == len(there) <= book.most


def test_a_request_that_is_unknown_leaves_nothing() -> None:
    book = QueueBook(2)
    book.leave("nobody")
    assert len(book) == 0


def test_an_id_in_use_is_a_bug() -> None:
    book = QueueBook(2)
    book.enter("a", "")
    with pytest.raises(AssertionError, match="'a' is in use"):
        book.enter("a", "")


# --- in the engine


def test_the_engine_lets_a_newcomer_pass_the_queue_of_another_tenant(toy: Any) -> None:
    for tenant, passes in (("b", True), ("a", False)):
        rig, law = toy("pages", max_sequences=2, chunk=16)
        hog = [rig.submit([5, 6, number + 1], 100, tenant="a") for number in range(12)]
        for _ in range(5):
            rig.engine.step()
        newcomer = rig.submit([9, 8, 7], 4, tenant=tenant)
        for _ in range(PATIENCE_ROWS // 2 + 10):
            rig.engine.step()
        assert newcomer.is_done == passes
        assert len(rig.engine.tenants) == 1, "b has left, and owes nothing"
        rig.run()
        assert newcomer.ids == law.greedy([9, 8, 7], 4)
        assert hog[11].ids == law.greedy([5, 6, 12], 100)
        assert len(rig.engine.tenants) == 0
