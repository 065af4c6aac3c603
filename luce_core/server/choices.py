"""Several answers to one request: opened together, told apart by index, closed together; and what they
add up to.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import Any, cast

from attrs import Factory, define
from starlette.requests import Request
from starlette.responses import Response

from luce_core.contracts import ContentDelta, Failure, Finish, Logprobs, Start, TextEvent, TokenLogprob
from luce_core.errors import EngineError
from luce_core.server.service import Generation, GenerationService, now

LOWEST_LOGPROB = -9999.0  # JSON has no infinity
CLIENT_LEFT = 499  # seen by logs only

ChoiceEvents = AsyncGenerator[tuple[int, TextEvent], None]


async def open_choices(service: GenerationService, wanted: Sequence[Generation]) -> ChoiceEvents:
    """Submit every generation, then return their events, each with the index of its choice.

    Raises RequestError or CapacityError as `GenerationService.generate` does, and then cancels those it had
    submitted: a full queue can still become a 429. Closing the iterator cancels all.
    """
    streams: list[AsyncGenerator[TextEvent, None]] = []
    try:
        for one in wanted:
            stream = cast("AsyncGenerator[TextEvent, None]", service.generate(one))
            streams.append(stream)
            first = await anext(stream)
            if not isinstance(first, Start):
                raise AssertionError(f"a generation began with {first!r}")
    except BaseException:
        await _close((), streams)
        raise
    return _alone(streams[0]) if len(streams) == 1 else _merged(streams)


async def _alone(stream: AsyncGenerator[TextEvent, None]) -> ChoiceEvents:
    async with aclosing(stream):
        async for event in stream:
            yield 0, event


async def _merged(streams: Sequence[AsyncGenerator[TextEvent, None]]) -> ChoiceEvents:
    """The events of all streams as they come; those of one stream keep their order."""
    waiting = {_next(stream): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                event = task.result()
                if event is not None:
                    waiting[_next(streams[index])] = index
                    yield index, event
    finally:
        # Shielded: a server that cancels a second time must not leave generations running.
        await asyncio.shield(asyncio.ensure_future(_close(tuple(waiting), streams)))


def _next(stream: AsyncGenerator[TextEvent, None]) -> asyncio.Task[TextEvent | None]:
    async def step() -> TextEvent | None:
        return await anext(stream, None)

    return asyncio.create_task(step())


async def _close(
    tasks: Sequence[asyncio.Task[TextEvent | None]], streams: Sequence[AsyncGenerator[TextEvent, None]]
) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)  # a stream cannot be closed while it runs
    for stream in streams:
        await stream.aclose()


@define
class Answer:
    """One finished choice."""

    text: list[str] = Factory(list)
    logprobs: list[TokenLogprob] = Factory(list)
    finish: Finish | None = None

    @property
    def ended(self) -> Finish:
        if self.finish is None:
            raise EngineError("The engine ended this request without a result.")
        return self.finish


async def collect(events: ChoiceEvents, count: int) -> list[Answer]:
    """All of `count` choices, complete. Raises EngineError when one of them fails."""
    answers = [Answer() for _ in range(count)]
    async with aclosing(events):
        async for index, event in events:
            answer = answers[index]
            if isinstance(event, ContentDelta):
                answer.text.append(event.text)
            elif isinstance(event, Logprobs):
                answer.logprobs += event.tokens
            elif isinstance(event, Failure):
                raise EngineError(event.message)
            elif isinstance(event, Finish):
                answer.finish = event
    return answers


async def unless_left(request: Request, work: Awaitable[Response]) -> Response:
    """The response `work` makes, or none, with `work` cancelled, when the client closes first.

    The body must have been read: what still comes over the connection is its end.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else Response(status_code=CLIENT_LEFT)
    finally:
        working.cancel()
        leaving.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


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

    def added(name: str) -> int:
        return sum(finish.usage.get(name, 0) for finish in finishes)

    groups = [finishes[start : start + per_prompt] for start in range(0, len(finishes), per_prompt)]
    prompt = sum(group[0].usage["prompt_tokens"] for group in groups)
    cached = sum(min(finish.usage["cached_tokens"] for finish in group) for group in groups)
    completion = added("completion_tokens")
    decode_ms = max(finish.timings["decode_ms"] for finish in finishes)  # they run together
    decoded = sum(max(finish.usage["completion_tokens"] - 1, 0) for finish in finishes)
    extra: dict[str, Any] = {
        "prefill_ms": round(max(finish.timings["prefill_ms"] for finish in finishes), 3),
        "decode_ms": round(decode_ms, 3),
        "cached_prefix_tokens": cached,
        "prefilled_tokens": prompt - cached,
    }
    if decoded > 0 and decode_ms > 0:
        extra["decode_tokens_per_sec"] = round(decoded / decode_ms * 1e3, 2)
    if drafted := added("drafted_tokens"):
        extra["accept_rate"] = round(added("accepted_tokens") / drafted, 4)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "timings": extra,
    }
