"""OpenAI `/v1/chat/completions`: a pure adapter over text events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Annotated, Any

from pydantic import Field, field_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from luce_core.contracts import ContentDelta, Failure, Finish, Heartbeat, Logprobs, TokenLogprob
from luce_core.server import sse
from luce_core.server.choices import (
    LOWEST_LOGPROB,
    Answer,
    AnswerWriter,
    ChoiceEvents,
    collect,
    open_choices,
    unless_left,
    usage_of,
)
from luce_core.server.errors import envelope
from luce_core.server.sampling_fields import MAX_ALTERNATIVES, SamplingFields, read_fields
from luce_core.server.service import Generation, GenerationService


class ChatRequest(SamplingFields):
    """The body."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    enable_thinking: bool | None = None

    @field_validator("response_format")
    @classmethod
    def _text_only(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value and value.get("type", "text") != "text":
            raise ValueError(f"type {value.get('type')!r} is not supported yet; only 'text' is")
        return value

    def template_kwargs(self) -> Mapping[str, Any]:
        """Template variables beside messages and tools."""
        if self.enable_thinking is None:
            return self.chat_template_kwargs
        return {"enable_thinking": self.enable_thinking, **self.chat_template_kwargs}

    def wants_tools(self) -> list[dict[str, Any]] | None:
        """The tools the template may show."""
        return None if self.tool_choice == "none" else self.tools


async def parse(request: Request, service: GenerationService) -> tuple[ChatRequest, list[Generation]]:
    """Body → validated request and the generations it asks for, one per choice. Raises RequestError."""
    body = await read_fields(request, ChatRequest)
    prompt = await asyncio.to_thread(
        service.chat_prompt, body.messages, body.wants_tools(), body.template_kwargs()
    )
    service.check_room(prompt)
    limits = (body.max_completion_tokens, body.max_tokens, service.face.max_tokens)
    limit = next((limit for limit in limits if limit is not None), None)
    alternatives = (body.top_logprobs or 0) if body.logprobs else None
    params = body.sampling(service.face.defaults, alternatives, service.face.tokenizer)
    return body, body.generations(request, prompt, params, max_tokens=limit, api="chat")


async def chat_completions(request: Request) -> Response:
    """`POST /v1/chat/completions`."""
    service: GenerationService = request.app.state.service
    body, wanted = await parse(request, service)
    events = await open_choices(service, wanted)  # before any stream opens: a full queue is a 429
    writer = ChunkWriter("chatcmpl", service)
    if body.stream:
        return sse.sse_response(_stream(writer, events, len(wanted), body.wants_usage_chunk))
    return await unless_left(request, _whole(writer, events, len(wanted)))


class ChunkWriter(AnswerWriter):
    """The shapes of one answer, streamed or not."""

    def chunk(
        self, index: int, delta: Mapping[str, Any], finish: str | None = None, logprobs: Any = None
    ) -> bytes:
        """One streamed chunk with one choice."""
        found = {"content": logprobs} if logprobs else None
        choice = {"index": index, "delta": dict(delta), "logprobs": found, "finish_reason": finish}
        return sse.data({**self.head("chat.completion.chunk"), "choices": [choice]})

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """One choice of an answer that is not streamed."""
        logprobs = [self.entry(item) for item in answer.logprobs]
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(answer.text), "refusal": None},
            "logprobs": {"content": logprobs} if logprobs else None,
            "finish_reason": answer.ended.reason,
        }

    def entry(self, item: TokenLogprob) -> dict[str, Any]:
        """A token's log-probability in OpenAI's form."""
        return {
            **self._token(item.token, item.logprob),
            "top_logprobs": [self._token(*pair) for pair in item.top],
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self.tokenizer.token_bytes(token)
        text = raw.decode(errors="replace")
        return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(raw)}


async def _stream(
    writer: ChunkWriter, events: ChoiceEvents, count: int, include_usage: bool
) -> AsyncIterator[bytes]:
    pending: list[list[dict[str, Any]]] = [[] for _ in range(count)]
    finishes: dict[int, Finish] = {}
    async with aclosing(events):
        for index in range(count):
            yield writer.chunk(index, {"role": "assistant", "content": ""})
        async for index, event in events:
            if isinstance(event, ContentDelta):
                yield writer.chunk(index, {"content": event.text}, logprobs=pending[index])
                pending[index] = []
            elif isinstance(event, Logprobs):
                pending[index] += [writer.entry(item) for item in event.tokens]
            elif isinstance(event, Heartbeat):
                yield sse.comment(f"{event.phase} {event.done}/{event.total}")
            elif isinstance(event, Failure):
                yield sse.data(envelope(event.message, event.status))
                break
            elif isinstance(event, Finish):
                yield writer.chunk(index, {}, event.reason, logprobs=pending[index])
                finishes[index] = event
    if include_usage and len(finishes) == count:
        usage = usage_of([finishes[index] for index in range(count)], count)
        yield sse.data({**writer.head("chat.completion.chunk"), "choices": [], "usage": usage})
    yield sse.DONE


async def _whole(writer: ChunkWriter, events: ChoiceEvents, count: int) -> Response:
    answers = await collect(events, count)
    choices = [writer.choice(index, answer) for index, answer in enumerate(answers)]
    usage = usage_of([answer.ended for answer in answers], count)
    return JSONResponse({**writer.head("chat.completion"), "choices": choices, "usage": usage})
