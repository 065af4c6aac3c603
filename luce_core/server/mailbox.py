"""From the engine's thread to the event loop: one wake-up for everything that comes within a few
milliseconds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from luce_core.contracts import EngineEvent, Tokens

BATCH = 500
"""Events handed over in one turn of the loop: a few milliseconds."""
PACE_S = 0.004
"""Least time between two wake-ups. Each takes tens of microseconds from the engine: its thread must tell the
kernel, and both then want the interpreter and maybe the same core. At 1,500 tokens/s, waking for every token
cost a quarter of the decode time (LOG.md 2026-11-29); below 250 tokens/s nothing waits.
"""

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
        posted = self._posted
        if not posted:
            # Idle, from the mark on: what was posted before it, without waking the loop, is still found here.
            self._woken = False
            if not posted or self._woken:
                return
            self._woken = True
        # No more than a batch, so that a fast engine leaves the loop time for its clients.
        taken = 0
        while posted and taken < BATCH:
            receiver, event = posted.popleft()
            event, more = self._with_more(event)
            taken += 1 + more
            receiver(event)
        self.loop.call_later(0.0 if posted else PACE_S, self._deliver)

    def _with_more(self, event: EngineEvent) -> tuple[EngineEvent, int]:
        """The event and those behind it as one, where that can be, and how many those were."""
        posted, more = self._posted, 0
        while posted and isinstance(event, Tokens):
            both = event.followed_by(posted[0][1])
            if both is None:
                break
            posted.popleft()
            event = both
            more += 1
        return event, more
