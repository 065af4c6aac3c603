"""The answers to one request while they are made: engine events folded into text, told apart by index."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from attrs import evolve

from luce_core.contracts import (
    ContentDelta,
    Done,
    EngineEvent,
    Failure,
    Finish,
    GenerationChannel,
    GenerationRequest,
    Heartbeat,
    Logprobs,
    ReasoningDelta,
    TextEvent,
    ToolArgsDelta,
    ToolCallEnd,
)
from luce_core.server.mailbox import Mailbox
from luce_core.text.fold import TextFold, merged

if TYPE_CHECKING:
    from luce_core.server.service import Generation

JOIN_CHARS = 1024
"""Waiting text is joined up to about this length: joining stays cheap where the reader is stuck."""
MAX_WAITING_BYTES = 8 << 20
"""Of text events nobody takes; beyond it the request is ended."""
TEXTS = (ContentDelta, ReasoningDelta, ToolArgsDelta)
EVENT_BYTES = 200  # about what a waiting event takes beside its text, and each log-probability in it


class Choice:
    """One answer: what was asked of the engine and how far its text is."""

    __slots__ = ("done", "fold", "index", "request", "wanted")

    def __init__(self, index: int, wanted: Generation, request: GenerationRequest, fold: TextFold) -> None:
        self.index = index
        self.wanted = wanted
        self.request = request
        self.fold = fold
        self.done = False


class AnswerEvents(Protocol):
    """Text events of one or more choices, as they come."""

    @property
    def choices(self) -> Sequence[Choice]:
        """Those that were asked for."""
        ...

    def __aiter__(self) -> AnswerEvents: ...

    async def __anext__(self) -> list[tuple[int, TextEvent]]:
        """All events that wait, one at least, each with the index of its choice."""
        ...

    def close(self) -> None:
        """Cancel what has not ended. Never waits; may be called twice."""
        ...


class Answers:
    """Text events of one or more choices, in the order they came, each with the index of its choice.

    Lives on one event loop. Events are folded when they arrive, not when they are taken: a stop string ends
    its request even while nobody reads, and text that waits is joined. `Finish` or `Failure` is the last
    event of every choice. `close` cancels what has not ended; it never waits and may be called twice.
    """

    def __init__(
        self, channel: GenerationChannel, finished: Callable[[Choice, Done], None], heartbeat_s: float | None
    ) -> None:
        self.choices: list[Choice] = []
        self._channel = channel
        self._finished = finished
        self._heartbeat_s = heartbeat_s
        self._loop = asyncio.get_running_loop()
        self._came: list[tuple[int, TextEvent]] = []
        self._waiting_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._closed = False
        self._heard = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        if heartbeat_s is not None:
            self._timer = self._loop.call_at(self._heard + heartbeat_s, self._look)

    def submit(self, wanted: Generation, request: GenerationRequest, fold: TextFold, mail: Mailbox) -> None:
        """Queue one more choice. Raises what the channel raises; the choices before it run on."""
        choice = Choice(len(self.choices), wanted, request, fold)
        receiver = partial(self._arrived, choice)
        self._channel.submit(request, partial(mail.post, receiver))
        self.choices.append(choice)

    def __aiter__(self) -> Answers:
        return self

    async def __anext__(self) -> list[tuple[int, TextEvent]]:
        """All events that wait, one at least."""
        while not self._came:
            if self._error is not None:
                raise self._error
            if self._closed or all(choice.done for choice in self.choices):
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        came, self._came = self._came, []
        self._waiting_bytes = 0
        return came

    def close(self) -> None:
        """Cancel what has not ended and forget what waits."""
        if self._closed:
            return
        self._closed = True
        self._came.clear()
        if self._timer is not None:
            self._timer.cancel()
        for choice in self.choices:
            if not choice.done:
                self._channel.cancel(choice.request.request)
        self._wake()

    # --- called on the loop

    def _arrived(self, choice: Choice, event: EngineEvent) -> None:
        try:
            self._take(choice, event)
        except Exception as error:  # noqa: BLE001 - raised again in `__anext__`, where the request is handled
            self._error = self._error or error
            self._wake()
        if isinstance(event, Done):
            choice.done = True
            stopped = choice.fold.over and event.reason == "cancelled"
            self._finished(choice, evolve(event, reason="stop") if stopped else event)
            self._wake()

    def _take(self, choice: Choice, event: EngineEvent) -> None:
        if self._closed:
            return
        fold = choice.fold
        over = fold.over
        texts = fold.feed(event)
        if texts:  # tokens may make none for long: an argument that comes whole, a text that may be a tag
            self._heard = self._loop.time()
        for text in texts:
            self._append(choice.index, text)
        if fold.over and not over and not isinstance(event, Done):
            self._channel.cancel(choice.request.request)

    def _append(self, index: int, event: TextEvent) -> None:
        if self._waiting_bytes > MAX_WAITING_BYTES and not isinstance(event, Finish | Failure):
            self._channel.cancel(self.choices[index].request.request)
            return
        came = self._came
        self._waiting_bytes += _weight(event)
        if came and isinstance(event, TEXTS):
            last_index, last = came[-1]
            if last_index == index and isinstance(last, TEXTS) and len(last.text) < JOIN_CHARS:
                both = merged(last, event)
                if both is not None:
                    came[-1] = (index, both)
                    return
        came.append((index, event))
        if self._waiter is not None:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _look(self) -> None:
        """A heartbeat after each silence. One timer, set anew when it fires, not with every event."""
        if self._closed or self._heartbeat_s is None or all(choice.done for choice in self.choices):
            return
        now = self._loop.time()
        if now >= self._heard + self._heartbeat_s:
            self._heard = now
            if self._waiter is not None:  # otherwise the reader is busy sending, and nothing is silent
                self._append(0, Heartbeat("waiting"))
        self._timer = self._loop.call_at(self._heard + self._heartbeat_s, self._look)


def _weight(event: TextEvent) -> int:
    if isinstance(event, TEXTS):
        return EVENT_BYTES + 4 * len(event.text)
    if isinstance(event, ToolCallEnd):
        return EVENT_BYTES + 4 * len(event.raw)
    if isinstance(event, Logprobs):
        return EVENT_BYTES * (1 + sum(1 + len(item.top) for item in event.tokens))
    return EVENT_BYTES
