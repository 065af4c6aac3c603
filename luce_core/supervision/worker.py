"""The engine's process: `python -m luce_core.supervision.worker FD`, started by `SupervisedChannel` only.

Boot, compose, run a `LocalChannel`, forward commands to it and its events back. When the other end closes,
the process ends at once: there is nobody left to answer.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NoReturn

from luce_core.contracts import EngineEvent, Tokens
from luce_core.errors import LuceError
from luce_core.logs import set_up_logging
from luce_core.supervision.messages import (
    Beat,
    Boot,
    Cancel,
    Command,
    Events,
    Failed,
    Loading,
    Ready,
    Report,
    Submit,
)

if TYPE_CHECKING:
    from luce_core.engine.local import LocalChannel

log = logging.getLogger("luce_core.engine")

NOTHING = Events(())
PACE_S = 0.004
"""Between messages with tokens, at least: under what anybody sees, and few wake-ups for a fast model."""
LOADING_STEPS = 100
"""Messages about progress while weights are loaded, at most."""


def main(descriptor: int) -> None:
    """Serve one connection until it closes."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the server tells us
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(descriptor)
    outbox = Outbox(connection)
    sys.path[:] = connection.recv()  # before anything that may only be found there is unpickled
    try:
        boot: Boot = connection.recv()
        set_up_logging(boot.log_level)
        run(boot, connection, outbox)
    except LuceError as error:
        outbox.send(Failed(str(error)))
        sys.exit(1)
    except Exception as error:
        log.exception("the engine could not be started")
        outbox.send(Failed(f"{type(error).__name__}: {error}"))
        sys.exit(1)


def run(boot: Boot, connection: Connection, outbox: Outbox) -> None:
    """Compose and answer. Returns when the server closes the engine; raises when it cannot be built."""
    from luce_core.compose import compose
    from luce_core.engine.engine import LuceEngine
    from luce_core.engine.local import LocalChannel
    from luce_core.engine.warming import warm

    pipeline = compose(boot.plan, boot.make_registry(), progress=_progress(outbox))
    engine = LuceEngine(pipeline)
    if boot.plan.values["engine.warmup"]:
        warm(engine)
    turns = Turns()
    # Whoever starts us bounds the queue; a second bound here could only disagree.
    channel = LocalChannel(engine, max_queue=sys.maxsize, after_turn=turns.over)
    pipeline.observers.engine_started(pipeline)
    outbox.send(Ready())
    closing = threading.Event()
    threading.Thread(
        target=_beat, args=(channel, turns, outbox, boot.beat_s, closing), name="luce-beat", daemon=True
    ).start()
    for command in _commands(connection):
        if isinstance(command, Submit):
            channel.submit(command.request, outbox.event)
        elif isinstance(command, Cancel):
            channel.cancel(command.request)
        else:
            break
    closing.set()
    pipeline.observers.engine_stopping(pipeline)
    channel.close(0.0)
    outbox.send(NOTHING)


class Outbox:
    """Sends reports from any thread. Tokens go out together, by a thread of their own and `PACE_S` apart:
    the engine's does not stop to wake another process after every step.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pending: list[EngineEvent] = []
        self._pending_lock = threading.Lock()
        self._send_lock = threading.Lock()
        """Held from taking events to sending them: they arrive in the order they were made."""
        self._due = threading.Event()
        threading.Thread(target=self._deliver, name="luce-outbox", daemon=True).start()

    def send(self, report: Report) -> None:
        """One message, behind the events before it. The process ends when nobody listens."""
        with self._send_lock:
            with self._pending_lock:
                events, self._pending = self._pending, []
            try:
                if events:
                    self._connection.send(Events(tuple(events)))
                if report != NOTHING:
                    self._connection.send(report)
            except OSError:
                _orphaned()

    def event(self, event: EngineEvent) -> None:
        """(engine thread) What the sink of every request is."""
        with self._pending_lock:
            last = self._pending[-1] if self._pending else None
            both = last.followed_by(event) if isinstance(last, Tokens) else None
            if both is None:
                self._pending.append(event)
            else:
                self._pending[-1] = both
        if isinstance(event, Tokens):
            self._due.set()
        else:
            # At once: who was admitted must be known when the step that follows kills this process.
            self.send(NOTHING)

    def _deliver(self) -> None:
        while True:
            self._due.wait()
            self._due.clear()
            self.send(NOTHING)
            time.sleep(PACE_S)


class Turns:
    """Counts the turns of the engine's loop."""

    def __init__(self) -> None:
        self.count = 0

    def over(self) -> None:
        """(engine thread) A turn is over."""
        self.count += 1


def _commands(connection: Connection) -> Iterator[Command]:
    while True:
        try:
            command: Command = connection.recv()
        except (EOFError, OSError):
            _orphaned()
        yield command


def _orphaned() -> NoReturn:
    """The server is gone, and with it everyone who waits for an answer."""
    os._exit(1)


def _progress(outbox: Outbox) -> Callable[[int, int], None]:
    shown = -1

    def report(done: int, total: int) -> None:
        nonlocal shown
        step = LOADING_STEPS * done // max(total, 1)
        if step != shown:
            shown = step
            outbox.send(Loading(done, total))

    return report


def _beat(
    channel: LocalChannel, turns: Turns, outbox: Outbox, beat_s: float, closing: threading.Event
) -> None:
    while not closing.wait(beat_s):
        health = channel.health()
        if health.status != "ready" and not closing.is_set():
            outbox.send(Failed(health.detail))
            os._exit(1)
        stats = channel.stats()
        outbox.send(Beat(turns.count, stats["unfinished"] > 0, stats))


if __name__ == "__main__":
    main(int(sys.argv[1]))
