"""The channel to an engine in a process of its own: started, watched, and started again when it dies.

One thread of the server's process owns the child: it starts it, reads what it reports, and buries it. What
was being answered when the engine died ends with an error; what had not been admitted waits for the next
engine. Nothing here imports torch: the server's process stays small, and its loop is not held up by the
engine's.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping

from luce_core.contracts import ChannelHealth, Done, FinishReason, GenerationRequest
from luce_core.engine.checks import late_error
from luce_core.engine.tenants import QueueBook
from luce_core.errors import EngineError, UnavailableError
from luce_core.supervision.child import Child, Watchdog
from luce_core.supervision.entry import Entry, Sink
from luce_core.supervision.messages import (
    Beat,
    Boot,
    Cancel,
    Close,
    Events,
    Failed,
    Loading,
    Ready,
    Report,
    Submit,
)

log = logging.getLogger("luce_core.engine")

STEP_TIMEOUT_S = 300.0
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 60.0
STEADY_S = 60.0
"""An engine that lived so long was no failed start, whether anybody asked it something or not."""
PATIENCE = 3
"""Failed starts in a row after which nothing is queued any more and what waits is given up."""
DEATHS = 10
"""Engines that may die with one request in their queue."""
DEATH_S = 5.0
"""What a process may take to end once its connection has."""
CLOSE_S = 30.0
"""What plugins may take to put their things away when the server ends."""
CLOSED = "The server is shutting down and takes no more requests."


class SupervisedChannel:
    """`GenerationChannel` over a child process.

    max_queue: requests that may be unfinished. step_timeout_s: an engine that has work and ends no turn for
    so long is killed; 0 = never. All on the supervisor's thread: on_progress(bytes, bytes in all) while the
    first engine loads, on_ready() when an engine begins to answer, on_failed(error) when the first one could
    not be started, after which the channel is stopped.
    """

    def __init__(
        self,
        boot: Boot,
        *,
        max_queue: int,
        step_timeout_s: float = STEP_TIMEOUT_S,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        on_ready: Callable[[], None] = lambda: None,
        on_failed: Callable[[EngineError], None] = lambda error: None,
        python: str = sys.executable,
    ) -> None:
        self._boot = boot
        self._python = python
        self._step_timeout_s = step_timeout_s
        self._on_progress, self._on_ready, self._on_failed = on_progress, on_ready, on_failed
        self._lock = threading.Lock()
        self._fewer = threading.Condition(self._lock)
        """Notified when a request or an engine is gone."""
        self._entries: dict[str, Entry] = {}
        self._queue = QueueBook(max_queue)
        self._child: Child | None = None
        """The one that answers; None while there is none."""
        self._starting: Child | None = None
        self._health = ChannelHealth("loading", progress=0.0)
        self._retry_at_s: float | None = None
        self._restarts = 0
        self._failed_starts = 0
        self._stats: Mapping[str, float] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="luce-supervisor", daemon=True)
        self._thread.start()

    # --- any thread

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        """Queue a request. Raises CapacityError when the queue is full, UnavailableError while the first
        engine loads, after failed starts, and when the server ends.
        """
        with self._lock:
            self._check_open()
            self._queue.enter(request.request, request.tenant)
            self._entries[request.request] = Entry(request, sink)
            if self._child is not None:
                self._child.send(Submit(request))

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise UnavailableError(CLOSED)
        if self._health.status == "loading":
            raise UnavailableError(f"loading model: {100 * (self._health.progress or 0.0):.0f} %")
        if self._health.status == "stopped" or self._failed_starts >= PATIENCE:
            raise UnavailableError(
                self._health.detail, retry_after_s=max(1, round(self._retry_in_s() or 1.0))
            )

    def cancel(self, request: str) -> None:
        """End a request within one step, or at once when no engine has it."""
        with self._lock:
            entry = self._entries.get(request)
            if entry is None:
                return
            entry.cancelled = True
            if self._child is not None:
                self._child.send(Cancel(request))
                return
            self._forget(request)
        entry.end("cancelled")

    def stats(self) -> Mapping[str, float]:
        """The engine's figures, a beat old at most, and the channel's own."""
        with self._lock:
            return {
                "running": 0.0,
                "waiting": float(len(self._entries)),
                **self._stats,
                "unfinished": float(len(self._entries)),
                "restarts": float(self._restarts),
                "alive": float(self._child is not None),
            }

    def health(self) -> ChannelHealth:
        """How the engine is, and while it is not there, when the next one starts."""
        with self._lock:
            now = self._health
            return ChannelHealth(now.status, now.detail, now.progress, self._restarts, self._retry_in_s())

    def _retry_in_s(self) -> float | None:
        return None if self._retry_at_s is None else max(0.0, self._retry_at_s - time.monotonic())

    @property
    def pid(self) -> int | None:
        """The process of the engine that answers; None while there is none."""
        child = self._child
        return None if child is None else child.process.pid

    def close(self, drain_s: float) -> None:
        """Refuse new requests, let running ones finish for `drain_s` seconds, cancel the rest, join."""
        deadline_s = time.monotonic() + drain_s
        with self._fewer:
            self._closing.set()
            while self._entries and self._child is not None:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    break
                self._fewer.wait(left_s)
            if self._child is not None:
                self._child.send(Close())
            elif self._starting is not None:
                self._starting.kill("it was not needed any more")
        self._thread.join()

    # --- the supervisor's thread

    def _supervise(self) -> None:
        try:
            self._keep_running()
            self._stop(CLOSED, "cancelled")
        except BaseException as error:  # a bug of ours: say so to everyone instead of hanging them
            log.exception("the supervisor of the engine stopped")
            self._stop(f"The supervisor stopped: {type(error).__name__}: {error}", "error")
            raise

    def _keep_running(self) -> None:
        while not self._closing.is_set():
            reason = self._run_one()
            if self._closing.is_set():
                return
            if self._health.status == "loading":
                # Whoever starts the server should hear it, not its clients.
                detail = f"The engine could not be started: {reason}"
                self._stop(detail, "error")
                self._on_failed(EngineError(detail))
                self._closing.wait()
            else:
                self._mourn(reason)
                self._closing.wait(self._retry_in_s())

    def _stop(self, detail: str, reason: FinishReason) -> None:
        with self._lock:
            self._health = ChannelHealth("stopped", detail)
            child, self._child = self._child or self._starting, None
            entries = self._taken(lambda entry: True)
        if child is not None:
            child.kill(detail)
        for entry in entries:
            entry.end(reason, detail if reason == "error" else None)

    def _run_one(self) -> str:
        """One engine from its start to its end; returns why it ended."""
        try:
            child = Child(self._boot, self._python)
        except OSError as error:
            self._failed_starts += 1
            return f"its process could not be started: {error}"
        with self._lock:
            self._starting, self._retry_at_s = child, None
            if self._closing.is_set():  # `close` came before there was somebody to tell
                child.kill("it was not needed any more")
        self._watch(child)
        with self._fewer:
            self._child = self._starting = None
            self._stats = {}
            self._fewer.notify_all()
        reason = child.bury(CLOSE_S if self._closing.is_set() else DEATH_S)
        steady = child.answered or (child.ready and time.monotonic() - child.started_s > STEADY_S)
        self._failed_starts = 0 if steady else self._failed_starts + 1
        return reason

    def _watch(self, child: Child) -> None:
        """Take reports until the connection ends."""
        watchdog = Watchdog(self._step_timeout_s, time.monotonic())
        while True:
            try:
                report = child.receive(self._boot.beat_s)
            except (EOFError, OSError):
                return
            now_s = time.monotonic()
            if report is not None:
                watchdog.see(report, now_s)
                self._take(child, report)
            if child.ready and watchdog.stuck(now_s):
                child.kill(
                    f"it got nowhere for longer than the {self._step_timeout_s:g} s of --step-timeout, and "
                    "was killed"
                )

    def _take(self, child: Child, report: Report) -> None:
        if isinstance(report, Events):
            self._deliver(child, report)
        elif isinstance(report, Beat):
            with self._lock:
                self._stats = report.stats
        elif isinstance(report, Loading):
            self._loading(report)
        elif isinstance(report, Ready):
            self._ready(child)
        elif isinstance(report, Failed):
            child.failure = report.message

    def _deliver(self, child: Child, report: Events) -> None:
        for event in report.events:
            with self._fewer:
                entry = self._entries.get(event.request)
                if entry is not None and isinstance(event, Done):
                    self._forget(event.request)
                    self._fewer.notify_all()
            if entry is None:
                continue
            if isinstance(event, Done) and event.reason != "error":
                child.answered = True
            entry.tell(event)

    def _loading(self, report: Loading) -> None:
        first = self._health.status == "loading"
        with self._lock:
            self._health = ChannelHealth(
                self._health.status, self._health.detail, report.done / max(report.total, 1)
            )
        if first:
            self._on_progress(report.done, report.total)

    def _ready(self, child: Child) -> None:
        with self._fewer:
            child.ready = True
            self._health = ChannelHealth("ready")
            now_s = time.monotonic()
            late = self._taken(lambda entry: entry.left_s(now_s) <= 0)
            for entry in self._entries.values():
                child.send(Submit(entry.again(now_s)))
            self._child, self._starting = child, None
        for entry in late:
            entry.end("error", late_error(entry.request, queued=True), late=True)
        self._on_ready()

    def _mourn(self, reason: str) -> None:
        """Say why the engine died to whom it concerns, and when the next one starts."""
        failed = self._failed_starts
        delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** (failed - 1)) if failed else 0.0
        again = f"It is started again in {delay_s:g} s" if delay_s else "It is started again now"
        count = f", after {failed} starts in a row that answered nothing" if failed > 1 else ""
        detail = f"The engine stopped: {reason}. {again}{count}."
        log.error("%s", detail)
        with self._fewer:
            self._restarts += 1
            self._health = ChannelHealth("restarting", detail)
            self._retry_at_s = time.monotonic() + delay_s
            for entry in self._entries.values():
                entry.deaths += 1
            lost = self._taken(lambda entry: entry.admitted or entry.cancelled)
            given_up = self._taken(lambda entry: failed >= PATIENCE or entry.deaths >= DEATHS)
        for entry in lost:
            if entry.cancelled:
                entry.end("cancelled")
            else:
                entry.end("error", f"The engine stopped while it answered: {reason}. Send the request again.")
        for entry in given_up:
            entry.end("error", f"{detail} This request waited through {entry.deaths} of its ends.")

    def _taken(self, which: Callable[[Entry], bool]) -> list[Entry]:
        """(under the lock) Take out the entries that `which` is true for."""
        taken = [entry for entry in self._entries.values() if which(entry)]
        for entry in taken:
            self._forget(entry.request.request)
        self._fewer.notify_all()
        return taken

    def _forget(self, request: str) -> None:
        del self._entries[request]
        self._queue.leave(request)
