"""One engine process and the connection to it."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from typing import Any

from attrs import define

from luce_core.supervision.messages import Beat, Boot, Command, Report


class Child:
    """One engine process and the connection to it."""

    def __init__(self, boot: Boot, python: str) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [python, "-P", "-m", "luce_core.supervision.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self.started_s = time.monotonic()
        self.ready = False
        """It has said so once."""
        self.answered = False
        """A request ended well."""
        self.failure: str | None = None
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for item in (list(sys.path), boot):
            self._commands.put(item)
        # A thread of its own, so that an engine that does not read cannot hold up the server's loop.
        self._writer = threading.Thread(target=self._write, name="luce-commands", daemon=True)
        self._writer.start()

    def send(self, command: Command) -> None:
        """Queue a command; those to a dead engine are lost."""
        self._commands.put(command)

    def _write(self) -> None:
        while (command := self._commands.get()) is not None:
            try:
                self.connection.send(command)
            except OSError:  # its end is noticed where its reports are read
                return

    def receive(self, timeout_s: float) -> Report | None:
        """The next report, or None when none comes in time. Raises EOFError or OSError when none will."""
        if not self.connection.poll(timeout_s):
            return None
        report: Report = self.connection.recv()
        return report

    def kill(self, reason: str) -> None:
        """End it now. reason: what is said about it."""
        self.failure = self.failure or reason
        self.process.kill()

    def bury(self, patience_s: float) -> str:
        """Wait for the process, give everything back, and say why it ended."""
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._commands.put(None)
        self._writer.join()
        self.connection.close()
        return self.failure or how_ended(self.process.returncode)


def how_ended(status: int) -> str:
    """In words. status: as `subprocess` has it, signals negative."""
    if status >= 0:
        return f"its process exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = "; the system may be short of memory" if -status == signal.SIGKILL else ""
    return f"its process was killed ({name}{hint})"


@define
class Watchdog:
    """Notices an engine that has work and gets nowhere, or says nothing at all. limit_s: 0 = never."""

    limit_s: float
    moved_s: float
    """When it last got on."""
    turns: int = -1

    def see(self, report: Report, now_s: float) -> None:
        """Take a report into account; a beat of a busy engine whose turns do not end is none."""
        if not isinstance(report, Beat) or not report.busy or report.turns != self.turns:
            self.moved_s = now_s
        if isinstance(report, Beat):
            self.turns = report.turns

    def stuck(self, now_s: float) -> bool:
        """Whether to kill it."""
        return 0 < self.limit_s < now_s - self.moved_s
