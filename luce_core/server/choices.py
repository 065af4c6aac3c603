"""Several answers to one request: what they have in common in every format, and what they add up to."""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from attrs import Factory, define
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from luce_core.contracts import (
    ContentDelta,
    Failure,
    Finish,
    Heartbeat,
    Logprobs,
    PromptLogprobs,
    ReasoningDelta,
    TextEvent,
    TokenLogprob,
    ToolArgsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from luce_core.errors import EngineError, LuceError, RequestError
from luce_core.server import sse
from luce_core.server.answers import AnswerEvents
from luce_core.server.errors import envelope
from luce_core.server.service import GenerationService, now
from luce_core.server.timings import prompt_tokens, timings_of

LOWEST_LOGPROB = -9999.0  # JSON has no infinity
CLIENT_LEFT = 499  # seen by logs, and by clients that closed their sending side only
LEFT = "The connection was closed on the client's side, which cancels an answer that is not streamed."


@define
class Call:
    """A tool call while it is collected."""

    id: str
    name: str
    arguments: list[str] = Factory(list)


@define
class Answer:
    """One finished choice."""

    text: list[str] = Factory(list)
    reasoning: list[str] = Factory(list)
    calls: dict[int, Call] = Factory(dict)
    """By their index; one that broke off is text."""
    logprobs: list[TokenLogprob] = Factory(list)
    prompt: list[TokenLogprob] = Factory(list)
    """Of the prompt's tokens but the first, where it was scored."""
    finish: Finish | None = None

    @property
    def ended(self) -> Finish:
        if self.finish is None:
            raise EngineError("The engine ended this request without a result.")
        return self.finish


async def collect(events: AnswerEvents) -> list[Answer]:
    """All choices, complete. Raises EngineError when one of them fails."""
    answers = [Answer() for _ in events.choices]
    async for batch in events:
        for index, event in batch:
            answer = answers[index]
            if isinstance(event, Failure):
                raise failed(event)
            _keep(answer, event)
    return answers


def _keep(answer: Answer, event: TextEvent) -> None:
    """Add what an event says to an answer that is not streamed."""
    if isinstance(event, ContentDelta):
        answer.text.append(event.text)
    elif isinstance(event, ReasoningDelta):
        answer.reasoning.append(event.text)
    elif isinstance(event, ToolCallStart):
        answer.calls[event.index] = Call(event.id, event.name)
    elif isinstance(event, ToolArgsDelta):
        answer.calls[event.index].arguments.append(event.text)
    elif isinstance(event, ToolCallEnd) and not event.complete:
        del answer.calls[event.index]
        answer.text.append(event.raw)
    elif isinstance(event, Logprobs):
        answer.logprobs += event.tokens
    elif isinstance(event, PromptLogprobs):
        answer.prompt += event.tokens
    elif isinstance(event, Finish):
        answer.finish = event


async def unless_left(request: Request, events: AnswerEvents, work: Awaitable[Response]) -> Response:
    """The response `work` makes of `events`, which are closed in any case. None, and `work` cancelled, when
    the client closes first, be it only its sending side.

    The body must have been read: what still comes over the connection is its end.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else JSONResponse(envelope(LEFT, CLIENT_LEFT), CLIENT_LEFT)
    finally:
        events.close()
        working.cancel()
        leaving.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def failed(event: Failure) -> LuceError:
    """The exception that becomes the same answer as `event` does in a stream."""
    if event.status == 500:
        return EngineError(event.message)
    return RequestError(event.message, status=event.status)


class StreamedAnswers(ABC):
    """The part of a `StreamFold` that every format shares: which choices have ended, and how.

    Every choice ends exactly once: with its own reason, or with "error" when the request fails.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.finishes: dict[int, Finish] = {}
        self.over = False

    def feed(self, index: int, event: TextEvent) -> bytes:
        """What an event of choice `index` becomes; maybe nothing."""
        if self.over or index in self.finishes:
            return b""
        if isinstance(event, ContentDelta):
            return self.text(index, event.text)
        if isinstance(event, Heartbeat):
            return sse.comment(f"{event.phase} {event.done}/{event.total}")
        if isinstance(event, Finish):
            self.finishes[index] = event
            return self.finish(index, event)
        if isinstance(event, Failure):
            self.over = True
            running = [choice for choice in range(self.count) if choice not in self.finishes]
            return self.failure(running, envelope(event.message, event.status))
        return self.other(index, event)

    @property
    def ended(self) -> list[Finish] | None:
        """How the choices ended, in order; None when not all did."""
        if len(self.finishes) < self.count:
            return None
        return [self.finishes[index] for index in range(self.count)]

    @abstractmethod
    def text(self, index: int, text: str) -> bytes:
        """More text of a choice."""

    @abstractmethod
    def finish(self, index: int, event: Finish) -> bytes:
        """The end of a choice."""

    @abstractmethod
    def failure(self, running: Sequence[int], error: Mapping[str, Any]) -> bytes:
        """The end of all choices that still run. error: the envelope."""

    @abstractmethod
    def other(self, index: int, event: TextEvent) -> bytes:
        """Events only some formats have."""


class AnswerWriter:
    """What every object of one response repeats."""

    def __init__(self, prefix: str, service: GenerationService) -> None:
        self.id = f"{prefix}-{secrets.token_hex(12)}"
        self.model = service.face.id
        self.created = now()
        self.tokenizer = service.face.tokenizer

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage_of(finishes: Sequence[Finish], per_prompt: int = 1) -> dict[str, Any]:
    """OpenAI's usage, with this server's timings. finishes: in the order of the choices, `per_prompt` of
    them for each prompt, which is counted once; of its cached tokens, those that every choice found.
    """
    prompt, cached = prompt_tokens(finishes, per_prompt)
    completion = sum(finish.usage["completion_tokens"] for finish in finishes)
    reasoning = sum(finish.usage.get("reasoning_tokens", 0) for finish in finishes)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
        "timings": timings_of(finishes, per_prompt).fields(),
    }
