"""The one tree of errors a user can meet.

    LuceError
    ├── UsageError           the command line, environment or a config file is wrong        (exit status 2)
    ├── ModelFormatError     a model file is corrupt, truncated, hostile or not what a part expects
    ├── PluginError          a plugin the user named did not load, or broke its contract
    ├── PlanError            the parts do not fit together; carries every problem at once
    ├── CapacityError        memory, context or a queue is too small for what was asked
    ├── UnavailableError     the engine loads, restarts or ends; becomes a 503 that says when to come back
    ├── DownloadError        a model could not be fetched or did not verify
    ├── RequestError         one request is wrong; becomes a 4xx in the API's own envelope
    │   └── ContextOverflow  the prompt does not fit the context
    └── EngineError          our own fault, or the device's; becomes a 5xx

Every message says what failed, the subject in quotes, what was got, what was wanted, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from luce_core.contracts import Problem


class LuceError(Exception):
    """Root of every error raised on purpose; shown without a traceback unless `--debug`."""

    exit_status = 1


class UsageError(LuceError):
    """The command line, environment or configuration is wrong."""

    exit_status = 2


class ModelFormatError(LuceError):
    """A model file is not what it should be; the message names the key or tensor."""


class PluginError(LuceError):
    """A plugin the user named did not load, or a plugin broke its contract."""


class PlanError(LuceError):
    """The parts do not fit together. `problems` holds all of them, found in one pass."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{problem.message} {problem.fix}" for problem in self.problems))


class CapacityError(LuceError):
    """Memory, context or a queue is too small for what was asked."""


class UnavailableError(LuceError):
    """Nobody can answer just now: the engine loads, restarts or shuts down. retry_after_s: whole seconds."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class DownloadError(LuceError):
    """A model could not be fetched, or what arrived did not verify."""


class RequestError(LuceError):
    """One request is wrong.

    status: HTTP status; code: machine-readable cause in the API's own vocabulary; param: offending field.
    """

    def __init__(
        self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        self.status = status
        self.code = code
        self.param = param
        super().__init__(message)


class ContextOverflow(RequestError):
    """The prompt does not fit; agents parse the two numbers, so they must be true. field: of the body."""

    def __init__(self, prompt_tokens: int, context_tokens: int, field: str = "messages") -> None:
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens
        super().__init__(
            f"This model's maximum context length is {context_tokens} tokens. "
            f"However, your {field} resulted in {prompt_tokens} tokens. "
            f"Please reduce the length of the {field}.",
            code="context_length_exceeded",
            param=field,
        )


class EngineError(LuceError):
    """The engine or the device failed; the request did nothing wrong."""
