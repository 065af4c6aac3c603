"""Plain data between the engine and its callers: requests in, events out. Two levels, tokens and text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from attrs import Factory, frozen

from luce_core.contracts.media import MediaSpan
from luce_core.contracts.speculation import ConstraintSpec, SamplingParams

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
    tenant: str = ""
    """Who it is from: requests of one tenant wait for each other before others wait for them."""
    deadline_s: float | None = None
    """Seconds left when it is submitted; None = as long as it takes. Then it ends with what it has, "length",
    or, where that is nothing, with an error.
    """
    keys: tuple[int, ...] = ()
    """One per prompt token where content hashes replace ids (embedded rows); empty = the ids themselves."""
    media: tuple[MediaSpan, ...] = ()
    """Images, in the order of their rows, which do not overlap; the prompt has the placeholder's id there."""
    prompt_logprobs: int | None = None
    """Alternatives reported beside each token of the prompt; None = the prompt is not scored. A scored prompt
    is computed from its first token: no cached prefix is used for it, what it computes is cached as usual.
    """
    constraint: ConstraintSpec | None = None
    """What the answer may be. A minimum length does not keep it from being finished."""


@frozen
class TokenLogprob:
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(id, logprob), best first."""
    rank: int = 0
    """1 + how many tokens are likelier; 0 = not counted (tokens of an answer)."""


MOST_JOINED = 64
"""Tokens to which more are joined while they wait: copying them stays cheap."""


@frozen
class Tokens:
    """Newly decided tokens, in order."""

    request: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each id, or none at all."""

    def followed_by(self, event: EngineEvent) -> Tokens | None:
        """It and the event behind it as one; None when they cannot be, or are enough already."""
        if (
            not isinstance(event, Tokens)
            or event.request != self.request
            or len(self.ids) >= MOST_JOINED
            or bool(event.logprobs) != bool(self.logprobs)
        ):
            return None
        return Tokens(self.request, self.ids + event.ids, self.logprobs + event.logprobs)


@frozen
class PromptLogprobs:
    """The prompt's own tokens first, first + 1, ... as the model sees them, before any transform.

    Each token once and in order, all before the first `Tokens`. Token 0 has none: nothing comes before it.
    """

    request: str
    first: int
    tokens: tuple[TokenLogprob, ...]


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
    """prompt_tokens, completion_tokens, cached_tokens, drafted_tokens, accepted_tokens; and, where a cached
    prefix was looked for, cached_turn: 1 when it reaches the end of an earlier request's answer, else 0.
    """
    timings: Mapping[str, float]
    """queue_ms, prefill_ms, decode_ms, ttft_ms."""
    aside: tuple[str, ...] = ()
    """Parts that stepped aside for this request, each with its reason."""
    error: str | None = None
    late: bool = False
    """Its deadline passed."""


EngineEvent = Tokens | PromptLogprobs | Progress | Done


@frozen
class ChannelHealth:
    """How the engine behind a channel is."""

    status: Literal["loading", "ready", "restarting", "stopped"]
    detail: str = ""
    """Why, in a sentence, where there is something to say."""
    progress: float | None = None
    """Share of the weights that is loaded, 0..1; None where nothing loads."""
    restarts: int = 0
    """Times the engine was started again since the server began."""
    retry_in_s: float | None = None
    """Seconds until the next start, where the channel waits before it tries again."""


class GenerationChannel(Protocol):
    """The only way to the engine: in-process thread or supervised child behind one contract. Thread-safe."""

    def submit(self, request: GenerationRequest, sink: Callable[[EngineEvent], None]) -> None:
        """Queue a request. `sink` is called on a thread of the channel and must not block. Raises
        CapacityError when full, UnavailableError while nothing can be queued (loading, ending).
        """
        ...

    def cancel(self, request: str) -> None:
        """End a request within one step, in any phase; unknown ids are ignored (it may just have ended)."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Counters and gauges for /metrics: those of the engine, as far as they are known."""
        ...

    def health(self) -> ChannelHealth:
        """Whether requests are answered, and if not, why and how long."""
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
    raw: str = ""
    """The call as the model wrote it, with the space before it."""
    complete: bool = True
    """False: it broke off, or goes on as no call can. Its arguments are JSON all the same."""


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
    ending: TokenLogprob | None = None
    """The token that ended the text and is none of it, where log-probabilities were asked for."""


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
    | PromptLogprobs
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
