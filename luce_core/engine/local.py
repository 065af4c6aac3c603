"""The in-process generation channel: the engine on a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attrs import asdict

from luce_core.contracts import ChannelHealth, Done, EngineEvent, GenerationRequest
from luce_core.engine.engine import LuceEngine
from luce_core.engine.tenants import QueueBook
from luce_core.errors import UnavailableError

log = logging.getLogger("luce_core.engine")

IDLE_WAIT_S = 1.0  # only a bound for looking at `_stop`; submit and cancel wake the engine at once
MAX_QUEUE = 256


class LocalChannel:
    """`GenerationChannel` over a thread. At most `max_queue` requests may be unfinished at a time."""

    def __init__(
        self,
        engine: LuceEngine,
        *,
        max_queue: int = MAX_QUEUE,
        after_turn: Callable[[], None] | None = None,
    ) -> None:
        """after_turn: called on the engine's thread when a turn of its loop is over, busy or idle."""
        self.engine = engine
        self._after_turn = after_turn or (lambda: None)
        self._failure: str | None = None
        self._lock = threading.Lock()
        self._open = QueueBook(max_queue)
        self._closing = False
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="luce-engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, sink: Callable[[EngineEvent], None]) -> None:
        """Queue a request. Raises CapacityError when the queue is full, UnavailableError when the channel is
        closing or the engine stopped.
        """
        with self._lock:
            if self._failure is not None:
                raise UnavailableError(self._failure)
            if self._closing:
                raise UnavailableError("The server is shutting down and takes no more requests.")
            self._open.enter(request.request, request.tenant)
            # Under the lock: whoever ends the engine has then seen this request, or refuses it.
            self.engine.submit(request, self._forget_after(sink))

    def _forget_after(self, sink: Callable[[EngineEvent], None]) -> Callable[[EngineEvent], None]:
        def forward(event: EngineEvent) -> None:
            if isinstance(event, Done):
                with self._lock:
                    self._open.leave(event.request)
            try:
                sink(event)
            except RuntimeError:  # the receiver's event loop is gone: nobody is left to tell
                log.debug("a receiver vanished", exc_info=True)

        return forward

    def cancel(self, request: str) -> None:
        """End a request within one step."""
        self.engine.cancel(request)

    def stats(self) -> Mapping[str, float]:
        """Counters of the engine and the cache; reading them stops nothing."""
        engine = self.engine
        return {
            **engine.counters,
            "running": len(engine.running),
            "waiting": len(engine.waiting),
            "unfinished": len(self._open),
            "alive": float(self._thread.is_alive()),
            "restarts": 0.0,
            **{f"cache_{name}": value for name, value in _flat(asdict(engine.blocks.stats()))},
        }

    def health(self) -> ChannelHealth:
        """Ready as long as the engine's thread lives."""
        if self._thread.is_alive() and self._failure is None:
            return ChannelHealth("ready")
        return ChannelHealth("stopped", self._failure or "The engine was closed.")

    def close(self, drain_s: float) -> None:
        """Refuse new requests, wait for running ones, cancel the rest, join the thread."""
        with self._lock:
            self._closing = True
        deadline = time.monotonic() + drain_s
        while self._open and time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(0.01)
        self._stop = True
        self.engine.nudge()
        self._thread.join()

    def _run(self) -> None:
        engine = self.engine
        try:
            while not self._stop:
                busy = engine.step()
                self._after_turn()
                if not busy:
                    engine.blocks.check_integrity()
                    engine.wait(IDLE_WAIT_S)
            engine.cancel_all()
            self._after_turn()
        except BaseException as error:
            # The loop itself is broken (a scheduler's bug, say): say so to everyone instead of hanging them.
            log.exception("the engine stopped")
            with self._lock:
                self._failure = f"The engine stopped: {type(error).__name__}: {error}"
            engine.fail_all(self._failure)
            self._after_turn()
            raise


def _flat(stats: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Figures by group are added up."""
    for name, value in stats.items():
        yield name, float(sum(value.values()) if isinstance(value, Mapping) else value)
