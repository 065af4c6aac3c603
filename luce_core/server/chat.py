"""OpenAI `/v1/chat/completions`: a pure adapter over text events."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from attrs import evolve
from pydantic import Field, field_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from luce_core.contracts import (
    Finish,
    Logprobs,
    ReasoningDelta,
    TextEvent,
    Thinking,
    TokenLogprob,
    ToolArgsDelta,
    ToolCallStart,
)
from luce_core.server import sse
from luce_core.server.answers import Answers
from luce_core.server.choices import (
    LOWEST_LOGPROB,
    Answer,
    AnswerWriter,
    StreamedAnswers,
    collect,
    unless_left,
    usage_of,
)
from luce_core.server.prompt_scores import prompt_scores
from luce_core.server.sampling_fields import MAX_ALTERNATIVES, Count, SamplingFields, read_fields
from luce_core.server.service import Generation, GenerationService

Effort = Literal["none", "minimal", "low", "medium", "high", "x-high", "xhigh", "max"]
"""What a request may ask of thinking, `luce_core.text.chat_formats.EFFORTS`."""


class ChatRequest(SamplingFields):
    """The body."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None

    @field_validator("response_format")
    @classmethod
    def _text_only(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value and value.get("type", "text") != "text":
            raise ValueError(f"type {value.get('type')!r} is not supported yet; only 'text' is")
        return value

    @field_validator("tool_choice")
    @classmethod
    def _free_choice(cls, value: Any) -> Any:
        if value not in (None, "auto", "none"):
            raise ValueError(
                f"{value!r:.80} is not supported yet: a model cannot be made to call a tool; only 'auto' and "
                "'none' are"
            )
        return value

    def thinking(self) -> Thinking:
        """What the body says about thinking."""
        return Thinking(self.enable_thinking, self.reasoning_effort)

    def wants_tools(self) -> list[dict[str, Any]] | None:
        """The tools the template may show."""
        return None if self.tool_choice == "none" else self.tools


async def parse(request: Request, service: GenerationService) -> tuple[ChatRequest, list[Generation]]:
    """Body → validated request and the generations it asks for, one per choice. Raises RequestError."""
    body = await read_fields(request, ChatRequest)
    media = await service.images_of(body.messages)
    prompt = await asyncio.to_thread(
        service.chat, body.messages, body.wants_tools(), body.chat_template_kwargs, body.thinking(), media
    )
    service.check_room(prompt.ids)
    limits = (body.max_completion_tokens, body.max_tokens, service.face.max_tokens)
    limit = next((limit for limit in limits if limit is not None), None)
    alternatives = (body.top_logprobs or 0) if body.logprobs else None
    params = body.sampling(service.face.defaults, alternatives, service.face.tokenizer)
    wanted = body.generations(
        request, prompt.ids, params, max_tokens=limit, api="chat", prompt_logprobs=body.prompt_logprobs
    )
    one_call = body.parallel_tool_calls is False
    return body, [
        evolve(one, turn=prompt.turn, media=prompt.media, keys=prompt.keys, one_call=one_call)
        for one in wanted
    ]


async def chat_completions(request: Request) -> Response:
    """`POST /v1/chat/completions`."""
    service: GenerationService = request.app.state.service
    body, wanted = await parse(request, service)
    events = service.open(wanted)  # before any stream opens: a full queue is a 429
    writer = ChunkWriter("chatcmpl", service)
    if body.stream:
        return sse.EventStream(events, ChatStream(writer, len(wanted), body.wants_usage_chunk))
    return await unless_left(request, events, _whole(writer, events, body.prompt_logprobs))


class ChunkWriter(AnswerWriter):
    """The shapes of one answer, streamed or not."""

    def chunk(
        self, index: int, delta: Mapping[str, Any], finish: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        """One streamed chunk with one choice."""
        return self.chunk_of([self.delta(index, delta, finish, logprobs)])

    def chunk_of(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        """A streamed chunk."""
        return {**self.head("chat.completion.chunk"), "choices": list(choices), **more}

    def delta(
        self, index: int, delta: Mapping[str, Any], finish: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        """A choice of a streamed chunk."""
        found = {"content": logprobs} if logprobs else None
        return {"index": index, "delta": dict(delta), "logprobs": found, "finish_reason": finish}

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """One choice of an answer that is not streamed."""
        logprobs = [self.entry(item) for item in answer.logprobs]
        return {
            "index": index,
            "message": self.message(answer),
            "logprobs": {"content": logprobs} if logprobs else None,
            "finish_reason": answer.ended.reason,
        }

    def message(self, answer: Answer) -> dict[str, Any]:
        """An answer as a message."""
        text = "".join(answer.text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = "".join(answer.reasoning)
        if answer.calls:
            message["content"] = text or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": "".join(call.arguments)},
                }
                for call in answer.calls.values()
            ]
        return message

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


class ChatStream(StreamedAnswers):
    """A streamed answer. A choice's role comes first, its reason to end last and once."""

    def __init__(self, writer: ChunkWriter, count: int, include_usage: bool) -> None:
        super().__init__(count)
        self.writer = writer
        self.include_usage = include_usage
        self.logprobs: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        self.text_data = [sse.TextData(partial(self._text, index)) for index in range(count)]

    def _text(self, index: int, text: str) -> dict[str, Any]:
        return self.writer.chunk(index, {"content": text})

    def begin(self) -> bytes:
        role = {"role": "assistant", "content": ""}
        return b"".join(sse.data(self.writer.chunk(index, role)) for index in range(self.count))

    def text(self, index: int, text: str) -> bytes:
        if not self.logprobs[index]:
            return self.text_data[index](text)
        return self._delta(index, {"content": text})

    def other(self, index: int, event: TextEvent) -> bytes:
        if isinstance(event, ReasoningDelta):
            return self._delta(index, {"reasoning_content": event.text})
        if isinstance(event, ToolCallStart):
            function = {"name": event.name, "arguments": ""}
            call = {"index": event.index, "id": event.id, "type": "function", "function": function}
            return self._delta(index, {"tool_calls": [call]})
        if isinstance(event, ToolArgsDelta):
            call = {"index": event.index, "function": {"arguments": event.text}}
            return self._delta(index, {"tool_calls": [call]})
        if isinstance(event, Logprobs):
            self.logprobs[index] += [self.writer.entry(item) for item in event.tokens]
        return b""

    def _delta(self, index: int, delta: Mapping[str, Any]) -> bytes:
        logprobs, self.logprobs[index] = self.logprobs[index], []
        return sse.data(self.writer.chunk(index, delta, logprobs=logprobs))

    def finish(self, index: int, event: Finish) -> bytes:
        return sse.data(self.writer.chunk(index, {}, event.reason, self.logprobs[index]))

    def failure(self, running: Sequence[int], error: Mapping[str, Any]) -> bytes:
        ends = [self.writer.delta(index, {}, "error", self.logprobs[index]) for index in running]
        return sse.data(self.writer.chunk_of(ends, **error))

    def end(self) -> bytes:
        ended = self.ended
        if not self.include_usage or ended is None:
            return sse.DONE
        return sse.data(self.writer.chunk_of([], usage=usage_of(ended, self.count))) + sse.DONE


async def _whole(writer: ChunkWriter, events: Answers, scored: int | None) -> Response:
    answers = await collect(events)
    choices = [writer.choice(index, answer) for index, answer in enumerate(answers)]
    usage = usage_of([answer.ended for answer in answers], len(answers))
    body = {**writer.head("chat.completion"), "choices": choices, "usage": usage}
    if scored is not None:
        body["prompt_logprobs"] = prompt_scores(writer.tokenizer, answers[0].prompt, scored)
    return JSONResponse(body)
