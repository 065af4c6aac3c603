"""Leases, offers, floors: the figures always add up, and nobody loses what its floor guarantees."""

from __future__ import annotations

import threading
from random import Random
from typing import Any

import pytest

from luce_core.contracts import Claim
from luce_core.engine.broker import DeviceBroker, show_bytes
from luce_core.errors import CapacityError, EngineError

MIB = 1 << 20


def claim(owner: str, num_bytes: int, floor: int = 0, *, device: str = "cpu", kind: Any = "cache") -> Claim:
    return Claim(owner, device, kind, num_bytes, floor)


class Owner:
    """Gives back what it is asked for, as far as it can, and remembers the questions."""

    def __init__(self, broker: DeviceBroker, name: str, spare: int) -> None:
        self.asked: list[int] = []
        self.spare = spare
        broker.offer(name, self.reclaim)

    def reclaim(self, wanted: int) -> int:
        self.asked.append(wanted)
        freed = min(wanted, self.spare)
        self.spare -= freed
        return freed


def held(broker: DeviceBroker) -> dict[str, int]:
    return {item.owner: item.num_bytes for item in broker.holdings()}


def test_a_lease_holds_its_bytes_while_it_lasts() -> None:
    broker = DeviceBroker("cpu", 100, [claim("weights", 60, 60)])
    with broker.lease(claim("scores", 30)):
        assert broker.free_bytes == 10
        assert held(broker) == {"weights": 60, "scores": 30}
    assert broker.free_bytes == 40
    assert held(broker) == {"weights": 60}


def test_a_lease_ends_with_an_exception_too() -> None:
    broker = DeviceBroker("cpu", 100)
    with pytest.raises(ValueError, match="mine"), broker.lease(claim("scores", 30)):
        raise ValueError("mine")
    assert broker.free_bytes == 100


def test_nobody_is_asked_while_enough_is_free() -> None:
    broker = DeviceBroker("cpu", 100, [claim("cache", 40)])
    owner = Owner(broker, "cache", 40)
    with broker.lease(claim("scores", 60)):
        pass
    assert owner.asked == []


def test_owners_give_back_in_the_order_of_their_offers_and_only_what_is_missing() -> None:
    broker = DeviceBroker("cpu", 100, [claim("parked", 30), claim("cache", 30), claim("ring", 30)])
    cache, ring, parked = (Owner(broker, name, 30) for name in ("cache", "ring", "parked"))
    with broker.lease(claim("scores", 50)):
        assert held(broker) == {"parked": 30, "cache": 0, "ring": 20, "scores": 50}
    assert (cache.asked, ring.asked, parked.asked) == ([30], [10], [])
    assert broker.free_bytes == 50


def test_a_floor_is_never_asked_for() -> None:
    broker = DeviceBroker("cpu", 100, [claim("ring", 100, 70)])
    owner = Owner(broker, "ring", 100)
    with pytest.raises(CapacityError), broker.lease(claim("scores", 31)):
        pass
    with broker.lease(claim("scores", 30)):
        assert held(broker)["ring"] == 70
    assert owner.asked == [30]


def test_an_owner_that_frees_less_passes_the_rest_to_the_next() -> None:
    broker = DeviceBroker("cpu", 100, [claim("cache", 50), claim("ring", 50)])
    Owner(broker, "cache", 5)
    ring = Owner(broker, "ring", 50)
    with broker.lease(claim("scores", 20)):
        assert ring.asked == [15]


def test_an_owner_may_free_more_than_asked() -> None:
    broker = DeviceBroker("cpu", 100, [claim("cache", 100)])
    broker.offer("cache", lambda wanted: 64)
    with broker.lease(claim("scores", 20)):
        assert broker.free_bytes == 44


def test_too_little_says_who_holds_what_and_keeps_what_came_free() -> None:
    broker = DeviceBroker("cuda:0", 8 * MIB, [claim("weights", 6 * MIB, 6 * MIB, device="cuda:0")])
    wanted = claim("pflash scorer", 3 * MIB, device="cuda:0", kind="transient")
    with pytest.raises(CapacityError) as caught, broker.lease(wanted):
        pass
    text = str(caught.value)
    assert "'cuda:0'" in text
    assert "'pflash scorer' (transient)" in text
    assert "got 2.0 MiB free, wanted 3.0 MiB of 8.0 MiB" in text
    assert "weights 6.0 MiB (keeps 6.0 MiB)" in text
    assert held(broker) == {"weights": 6 * MIB}


def test_claims_that_do_not_fit_are_refused_at_once() -> None:
    with pytest.raises(CapacityError, match=r"weights 60 bytes.*state 50 bytes.*at most 100 bytes"):
        DeviceBroker("cpu", 100, [claim("weights", 60), claim("state", 50)])


def test_reclaimed_bytes_can_be_regained_when_free_again() -> None:
    broker = DeviceBroker("cpu", 100, [claim("cache", 80)])
    Owner(broker, "cache", 80)
    with broker.lease(claim("scores", 70)):
        assert held(broker)["cache"] == 30
        assert broker.regain("cache", 50) == 0
    assert broker.regain("cache", 20) == 20
    assert broker.regain("cache", 500) == 30
    assert broker.regain("cache", 1) == 0
    assert held(broker) == {"cache": 80}


def test_two_leases_of_one_owner_add_up() -> None:
    broker = DeviceBroker("cpu", 100, [claim("cache", 10)])
    with broker.lease(claim("cache", 20)), broker.lease(claim("cache", 30)):
        assert held(broker) == {"cache": 60}
    assert held(broker) == {"cache": 10}


def test_a_lease_is_not_reclaimed() -> None:
    broker = DeviceBroker("cpu", 100, [claim("cache", 10)])
    owner = Owner(broker, "cache", 100)
    with broker.lease(claim("cache", 80)), broker.lease(claim("scores", 20)):
        assert owner.asked == [10]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (claim("a", 5, device="cuda:1"), "claims memory of 'cuda:1' from the broker of 'cpu'"),
        (claim("a", 5, 6), "floor of 6"),
        (claim("a", -1, -1), "floor of -1"),
    ],
)
def test_a_claim_that_makes_no_sense_is_refused(wrong: Claim, message: str) -> None:
    broker = DeviceBroker("cpu", 100)
    with pytest.raises(EngineError, match=message), broker.lease(wrong):
        pass
    assert broker.free_bytes == 100


def test_an_offer_needs_a_claim_and_is_made_once() -> None:
    broker = DeviceBroker("cpu", 100, [claim("cache", 10)])
    with pytest.raises(EngineError, match=r"'ring' offers memory .* without a claim.*cache"):
        broker.offer("ring", lambda wanted: 0)
    broker.offer("cache", lambda wanted: 0)
    with pytest.raises(EngineError, match="twice"):
        broker.offer("cache", lambda wanted: 0)


def test_a_withdrawn_offer_is_not_asked() -> None:
    broker = DeviceBroker("cpu", 100, [claim("cache", 100)])
    owner = Owner(broker, "cache", 100)
    broker.withdraw("cache")
    with pytest.raises(CapacityError), broker.lease(claim("scores", 1)):
        pass
    assert owner.asked == []
    with pytest.raises(EngineError, match="never made"):
        broker.withdraw("cache")


@pytest.mark.parametrize("freed", [-1, 41])
def test_an_owner_that_lies_is_named(freed: int) -> None:
    broker = DeviceBroker("cpu", 100, [claim("cache", 100, 60)])
    broker.offer("cache", lambda wanted: freed)
    lie = f"'cache' says it freed {freed} bytes"
    with pytest.raises(EngineError, match=lie), broker.lease(claim("scores", 10)):
        pass
    assert held(broker) == {"cache": 100}


def test_an_owner_that_fails_fails_the_lease_and_changes_nothing() -> None:
    broker = DeviceBroker("cpu", 100, [claim("cache", 100)])

    def reclaim(wanted: int) -> int:
        raise RuntimeError("device lost")

    broker.offer("cache", reclaim)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="device lost"), broker.lease(claim("scores", 10)):
            pass
    assert held(broker) == {"cache": 100}


def test_giving_back_may_not_ask_for_memory() -> None:
    broker = DeviceBroker("cpu", 100, [claim("cache", 100)])

    def reclaim(wanted: int) -> int:
        with broker.lease(claim("nested", 1)):
            return wanted

    broker.offer("cache", reclaim)
    with pytest.raises(EngineError, match=r"'nested' asks .* while 'cache' gives back"):
        broker.lease(claim("scores", 10)).__enter__()
    assert held(broker) == {"cache": 100}


def test_the_figures_add_up_under_threads() -> None:
    broker = DeviceBroker("cpu", 1000, [claim("weights", 300, 300), claim("cache", 600, 100)])
    owner = Owner(broker, "cache", 500)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        dice = Random(seed)
        try:
            for _ in range(200):
                try:
                    with broker.lease(claim(f"t{seed}", dice.randint(1, 400))):
                        assert broker.free_bytes >= 0
                except CapacityError:
                    pass
        except BaseException as error:  # noqa: BLE001 - carried to the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert held(broker) == {"weights": 300, "cache": 600 - (500 - owner.spare)}
    assert broker.regain("cache", 1000) == 500 - owner.spare


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (3 * MIB, "3.0 MiB"), (5 << 50, "5120.0 TiB")],
)
def test_sizes_are_shown_with_units(num_bytes: int, text: str) -> None:
    assert show_bytes(num_bytes) == text
