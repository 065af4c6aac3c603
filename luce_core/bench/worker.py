"""An engine in a process of its own that answers commands: one line of JSON each way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from luce_core.errors import EngineError, UsageError

CLOSE_S = 30
"""How long a worker may take to end after its input was closed."""
ERROR_CHARS = 400
"""Of what a dead worker wrote last, what is shown."""
OURS = frozenset({"PYTHONPATH", "PYTHONHOME"})
"""Variables of this Python that would lead another one astray."""


class Worker:
    """`about` is what it says of itself when it is ready. Everything else it says answers `ask`.

    title: how errors name it; hints: signal -> what to do about it.
    """

    def __init__(
        self,
        title: str,
        command: Sequence[str],
        *,
        keep_env: bool = False,
        hints: Mapping[signal.Signals, str] | None = None,
    ) -> None:
        self.title = title
        self.hints = hints or {}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        env = {name: value for name, value in os.environ.items() if keep_env or name not in OURS}
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=env,
                text=True,
            )
        except OSError as error:
            self._errors.close()
            raise UsageError(
                f"{title} cannot be started: {command[0]!r}: {error.strerror or error}. Name the Python of "
                "an environment that has it."
            ) from error
        try:
            self.about: Mapping[str, Any] = self._read("started")
        except BaseException:
            self.close()
            raise

    def ask(self, do: str, **arguments: Any) -> Any:
        """The answer to one command. EngineError when the process ends instead."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._dead(f"asked to {do}") from None
        return self._read(f"asked to {do}")

    def _read(self, when: str) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._dead(when)
        try:
            return json.loads(line)
        except ValueError:
            raise EngineError(f"{self.title} said {line.strip()[:80]!r} when {when}, wanted JSON.") from None

    def _dead(self, when: str) -> EngineError:
        status = self._process.wait(CLOSE_S)
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip()[-ERROR_CHARS:]
        last = said.splitlines()[-1].strip() if said else ""
        if status >= 0:
            return EngineError(f"{self.title} ended with status {status} when {when}. {last}".strip())
        number = signal.Signals(-status)
        hint = self.hints.get(number, "")
        return EngineError(f"{self.title} was ended by {number.name} when {when}. {hint or last}".strip())

    def close(self) -> None:
        """Let it end; kill it if it does not. Repeating it changes nothing."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what was not read any more
                    pipe.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()
