"""The self-checks of op layers, each in a process of its own: most of their time goes into compiling kernels,
one after the other, and a kernel that takes its process with it leaves the other checks alone.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from attrs import frozen

from luce_core.contracts import DeviceInfo, KernelCheck, OpLayer
from luce_core.errors import LuceError
from luce_core.op_layers import prepare
from luce_core.registry import guarded, resolve
from luce_core.supervision.child import how_ended

PATIENCE_S = 10.0
"""For a process that has said all to leave its device and its files in order."""


@frozen
class SelfCheck:
    """One self-check of a layer, on a device."""

    layer: OpLayer
    run: str
    """One of the layer's `self_checks`."""
    title: str
    """Of the plugin, for errors."""
    device: DeviceInfo
    options: Any
    """Of the plugin; None = it has none."""

    @property
    def subject(self) -> str:
        """In words."""
        return f"The self-check {self.run!r} of op layer {self.layer.name!r} of {self.title}"

    def findings(self) -> Iterator[KernelCheck]:
        """Run it, in this process. Raises LuceError."""
        prepare(self.layer, self.title, self.device, self.options)
        subject = self.subject
        checks = iter(guarded(subject, partial(resolve(self.run, subject), self.device.id)))
        while (check := guarded(subject, partial(next, checks, None))) is not None:
            yield check


Finding = KernelCheck | str
"""What was checked, or why no more could be."""


class Worker:
    """A self-check in its process, and what it has found."""

    def __init__(self, check: SelfCheck) -> None:
        context = get_context("spawn")
        self.check = check
        self.found: deque[Finding] = deque()
        self.over = False
        self.connection, theirs = context.Pipe(duplex=False)
        with theirs:
            self.process = context.Process(target=_work, args=(check, theirs), daemon=True)
            self.process.start()

    def receive(self) -> None:
        """Take in one message, or that there will be no more."""
        try:
            message: Finding | None = self.connection.recv()
        except EOFError:
            self.process.join()
            how = how_ended(self.process.exitcode or 0)
            message = f"{self.check.subject} broke off: {how}."
        self.over = message is None or isinstance(message, str)
        if message is not None:
            self.found.append(message)

    def end(self, patience_s: float = 0.0) -> None:
        """Nobody asks any more. patience_s: for a process to end by itself."""
        self.process.join(patience_s)
        self.process.kill()
        self.process.join()
        self.connection.close()


def _work(check: SelfCheck, connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it reaches the whole group; who started us ends us
    try:
        for found in check.findings():
            connection.send(found)
        connection.send(None)
    except LuceError as error:
        connection.send(str(error))


def side_by_side(checks: Sequence[SelfCheck], at_once: int) -> Iterator[tuple[SelfCheck, Finding]]:
    """What each finds, in order, as soon as that is known. at_once: processes, at most."""
    waiting, shown = deque(checks), deque[Worker]()
    working: dict[Any, Worker] = {}
    try:
        while waiting or shown:
            while waiting and len(working) < at_once:
                worker = Worker(waiting.popleft())
                working[worker.connection] = worker
                shown.append(worker)
            for ready in wait(working):
                worker = working[ready]
                worker.receive()
                if worker.over:
                    del working[ready]
                    worker.end(PATIENCE_S)
            while shown:
                first = shown[0]
                while first.found:
                    yield first.check, first.found.popleft()
                if not first.over:
                    break
                shown.popleft()
    finally:
        for worker in working.values():
            worker.end()
