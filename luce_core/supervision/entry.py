"""One unfinished request, as the server's process knows it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from attrs import Factory, define, evolve

from luce_core.contracts import (
    Done,
    EngineEvent,
    FinishReason,
    GenerationRequest,
    Progress,
    PromptLogprobs,
    Tokens,
)

log = logging.getLogger("luce_core.engine")

Sink = Callable[[EngineEvent], None]


@define(eq=False)
class Entry:
    """One unfinished request."""

    request: GenerationRequest
    sink: Sink
    arrived_s: float = Factory(time.monotonic)
    admitted: bool = False
    """The engine had it in a step: running it again could repeat what the client has, or kill again."""
    cancelled: bool = False
    deaths: int = 0
    """Engines that died with it in their queue."""
    emitted: int = 0
    first_s: float = 0.0

    def see(self, event: EngineEvent) -> None:
        """Take note of how far the request is."""
        if isinstance(event, Tokens):
            self.emitted += len(event.ids)
            self.first_s = self.first_s or time.monotonic()
            self.admitted = True
        elif isinstance(event, PromptLogprobs) or (isinstance(event, Progress) and event.phase != "queued"):
            self.admitted = True

    def tell(self, event: EngineEvent) -> None:
        """Pass an event on."""
        self.see(event)
        try:
            self.sink(event)
        except RuntimeError:  # the receiver's event loop is gone: nobody is left to tell
            log.debug("a receiver vanished", exc_info=True)

    def left_s(self, now_s: float) -> float:
        """Until its deadline."""
        given = self.request.deadline_s
        return math.inf if given is None else given - (now_s - self.arrived_s)

    def again(self, now_s: float) -> GenerationRequest:
        """The request for another engine: what it waited here counts."""
        if self.request.deadline_s is None:
            return self.request
        return evolve(self.request, deadline_s=self.left_s(now_s))

    def end(self, reason: FinishReason, error: str | None = None, *, late: bool = False) -> None:
        """Send the last event in place of an engine that cannot."""
        now = time.monotonic()
        first = self.first_s or now
        done = Done(
            request=self.request.request,
            reason=reason,
            usage={
                "prompt_tokens": len(self.request.prompt),
                "completion_tokens": self.emitted,
                "cached_tokens": 0,
                "drafted_tokens": 0,
                "accepted_tokens": 0,
            },
            timings={
                "queue_ms": 0.0,
                "prefill_ms": 0.0,
                "decode_ms": (now - first) * 1e3,
                "ttft_ms": (first - self.arrived_s) * 1e3,
            },
            error=error,
            late=late,
        )
        self.tell(done)
