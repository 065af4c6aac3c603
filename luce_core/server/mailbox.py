"""From the engine's thread to the event loop: one wake-up for everything a step of the engine sends."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from luce_core.contracts import EngineEvent

BATCH = 500
"""Events handed over in one turn of the loop: a few milliseconds."""

Receiver = Callable[[EngineEvent], None]


class Mailbox:
    """Hands events to receivers on one event loop, in the order they were posted."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._posted: deque[tuple[Receiver, EngineEvent]] = deque()
        self._woken = False

    def post(self, receiver: Receiver, event: EngineEvent) -> None:
        """Call `receiver(event)` on the loop, soon. Any thread. Raises RuntimeError when the loop is gone."""
        self._posted.append((receiver, event))
        if not self._woken:
            self._woken = True
            try:
                self.loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                self._woken = False
                raise

    def _deliver(self) -> None:
        # Before counting: what is posted from here on is either counted or wakes the loop again. No more than
        # a batch, so that a fast engine leaves the loop time for its clients.
        self._woken = False
        posted = self._posted
        for _ in range(min(len(posted), BATCH)):
            receiver, event = posted.popleft()
            receiver(event)
        if posted and not self._woken:
            self._woken = True
            self.loop.call_soon(self._deliver)
