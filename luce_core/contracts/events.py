"""Plain data between the engine and its callers: requests in, events out. Two levels, tokens and text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from attrs import Factory, frozen

from luce_core.contracts.speculation import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "error"]


@frozen
class GenerationRequest:
    """What crosses into the engine. Token ids only: the engine knows no JSON and no text."""

    request: str
    prompt: tuple[int, ...]
    max_tokens: int
    """Tokens to emit at most; the engine ends with "length" there or at the end of the context."""
    params: SamplingParams
    eog: frozenset[int] = frozenset()
    """Ids that end the answer; reported, not emitted as text."""
    priority: int = 0
    keys: tuple[int, ...] = ()
    """One per prompt token where content hashes replace ids (embedded rows); empty = the ids themselves."""


@frozen
class TokenLogprob:
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(id, logprob), best first."""


@frozen
class Tokens:
    """Newly decided tokens, in order."""

    request: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@frozen
class Progress:
    request: str
    phase: Literal["queued", "reducing", "encoding", "prefill"]
    done: int
    total: int


@frozen
class Done:
    """The last event of every request, on every path, exactly once."""

    request: str
    reason: FinishReason
    usage: Mapping[str, int]
    """prompt_tokens, completion_tokens, cached_tokens, drafted_tokens, accepted_tokens."""
    timings: Mapping[str, float]
    """queue_ms, prefill_ms, decode_ms, ttft_ms."""
    aside: tuple[str, ...] = ()
    """Parts that stepped aside for this request, each with its reason."""
    error: str | None = None


EngineEvent = Tokens | Progress | Done


class GenerationChannel(Protocol):
    """The only way to the engine: in-process thread or supervised child behind one contract. Thread-safe."""

    def submit(self, request: GenerationRequest, sink: Callable[[EngineEvent], None]) -> None:
        """Queue a request. `sink` is called on the engine's thread and must not block. Raises
        CapacityError when full.
        """
        ...

    def cancel(self, request: str) -> None:
        """End a request within one step, in any phase; unknown ids are ignored (it may just have ended)."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Counters and gauges for /health and /metrics."""
        ...

    def close(self, drain_s: float) -> None:
        """Refuse new requests, let running ones finish for `drain_s` seconds, cancel the rest, join."""
        ...


# --- text events: what every API format is an adapter of


@frozen
class Start:
    request: str
    prompt_tokens: int


@frozen
class ReasoningDelta:
    text: str


@frozen
class ContentDelta:
    text: str


@frozen
class ToolCallStart:
    index: int
    id: str
    name: str


@frozen
class ToolArgsDelta:
    index: int
    text: str


@frozen
class ToolCallEnd:
    index: int


@frozen
class Logprobs:
    tokens: tuple[TokenLogprob, ...]


@frozen
class Heartbeat:
    phase: str
    done: int = 0
    total: int = 0


@frozen
class Finish:
    reason: Literal["stop", "length", "tool_calls", "cancelled"]
    usage: Mapping[str, int]
    timings: Mapping[str, float]
    stop_sequence: str | None = None
    aside: tuple[str, ...] = ()


@frozen
class Failure:
    message: str
    status: int = 500
    details: Mapping[str, Any] = Factory(dict)


TextEvent = (
    Start
    | ReasoningDelta
    | ContentDelta
    | ToolCallStart
    | ToolArgsDelta
    | ToolCallEnd
    | Logprobs
    | Heartbeat
    | Finish
    | Failure
)


@frozen
class RequestRecord:
    """What `luce_request_finished` observes and the console row shows."""

    request: str
    api: str
    model: str
    done: Done
    client: str = ""
