"""What reaches the loop is what was posted, in order; tokens that waited together may come as one event."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from attrs import define, field

from luce_core.contracts import Done, EngineEvent, TokenLogprob, Tokens
from luce_core.contracts.events import MOST_JOINED
from luce_core.server.mailbox import BATCH, Mailbox


def on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())

    return run


@define
class Heard:
    events: list[EngineEvent] = field(factory=list)

    @property
    def ids(self) -> list[int]:
        return [token for event in self.events if isinstance(event, Tokens) for token in event.ids]


def done(request: str) -> Done:
    return Done(request, "stop", {}, {})


def scored(token: int) -> Tokens:
    return Tokens("a", (token,), (TokenLogprob(token, -1.0),))


def test_neighbours_of_one_request_are_joined() -> None:
    both = Tokens("a", (1,)).followed_by(Tokens("a", (2, 3)))
    assert both == Tokens("a", (1, 2, 3))
    scores = scored(1).followed_by(scored(2))
    assert scores is not None
    assert [item.token for item in scores.logprobs] == [1, 2] == list(scores.ids)


@pytest.mark.parametrize(
    "event",
    [Tokens("b", (2,)), done("a"), scored(2)],
    ids=["another request", "its end", "one with scores"],
)
def test_what_does_not_belong_together_is_not(event: EngineEvent) -> None:
    assert Tokens("a", (1,)).followed_by(event) is None


def test_an_event_does_not_grow_without_end() -> None:
    whole = Tokens("a", tuple(range(MOST_JOINED)))
    assert whole.followed_by(Tokens("a", (1,))) is None


@on_a_loop
async def test_every_token_comes_once_and_in_order_however_many_wait() -> None:
    mail = Mailbox(asyncio.get_running_loop())
    rng = random.Random(3)
    heard = {name: Heard() for name in "abc"}
    sent: dict[str, list[int]] = {name: [] for name in "abc"}
    ended = asyncio.Event()

    def hear(name: str, event: EngineEvent) -> None:
        heard[name].events.append(event)
        if all(one.events and isinstance(one.events[-1], Done) for one in heard.values()):
            ended.set()

    def post(name: str, event: EngineEvent) -> None:
        mail.post(lambda event: hear(name, event), event)

    def engine() -> None:
        for token in range(4 * BATCH):
            name = rng.choice("aaaaaabc")
            sent[name].append(token)
            post(name, Tokens(name, (token,)))
        for name in sent:
            post(name, done(name))

    thread = threading.Thread(target=engine)
    thread.start()
    await asyncio.to_thread(thread.join)  # this loop goes on taking while the other thread posts
    await ended.wait()
    assert {name: one.ids for name, one in heard.items()} == sent
    for one in heard.values():
        assert sum(isinstance(event, Done) for event in one.events) == 1


@on_a_loop
async def test_tokens_that_wait_together_are_one_event() -> None:
    mail = Mailbox(asyncio.get_running_loop())
    heard, ended = Heard(), asyncio.Event()

    def hear(event: EngineEvent) -> None:
        heard.events.append(event)
        if isinstance(event, Done):
            ended.set()

    for token in range(10):  # the loop does not turn in between
        mail.post(hear, Tokens("a", (token,)))
    mail.post(hear, done("a"))
    await ended.wait()
    assert heard.events == [Tokens("a", tuple(range(10))), done("a")]


@on_a_loop
async def test_a_turn_of_the_loop_takes_no_more_than_a_batch() -> None:
    mail = Mailbox(asyncio.get_running_loop())
    turns: list[int] = []
    heard = Heard()
    number = itertools.count()

    def hear(event: EngineEvent) -> None:
        heard.events.append(event)
        turns.append(turn)

    turn = 0
    for token in range(3 * BATCH):
        mail.post(hear, Tokens(f"{next(number) // 10}", (token,)))
    while len(heard.ids) < 3 * BATCH:
        await asyncio.sleep(0)
        turn += 1
    taken = [sum(1 for at in turns if at == one) for one in set(turns)]
    assert len(taken) >= 3
    assert heard.ids == list(range(3 * BATCH))
