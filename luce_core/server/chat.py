"""OpenAI `/v1/chat/completions`: a pure adapter over text events."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Annotated, Any, Literal

from attrs import evolve
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from luce_core.contracts import (
    ContentDelta,
    Failure,
    Finish,
    Heartbeat,
    Logprobs,
    SamplingParams,
    Start,
    TextEvent,
    TokenLogprob,
)
from luce_core.errors import EngineError, RequestError
from luce_core.server import sse
from luce_core.server.body import read_json
from luce_core.server.errors import envelope, from_validation
from luce_core.server.service import Generation, GenerationService, now, seeded
from luce_core.server.settings import ServerSettings
from luce_core.text import Tokenizer

Probability = Annotated[float, Field(ge=0.0, le=1.0)]


class StreamOptions(BaseModel):
    include_usage: bool = False


class ChatRequest(BaseModel):
    """The body. Unknown fields are ignored: clients add new ones every week."""

    model_config = ConfigDict(extra="ignore", strict=False)

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Probability | None = None
    typical_p: Probability | None = None
    seed: int | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    logit_bias: dict[int, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    n: Literal[1] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = Field(default_factory=list)
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    enable_thinking: bool | None = None
    priority: int = 0

    @field_validator("stop")
    @classmethod
    def _some_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > 16 or any(not stop or len(stop) > 1024 for stop in stops):
            raise ValueError("at most 16 stop strings of 1 to 1024 characters")
        return value

    @field_validator("response_format")
    @classmethod
    def _text_only(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value and value.get("type", "text") != "text":
            raise ValueError(f"type {value.get('type')!r} is not supported yet; only 'text' is")
        return value

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """The request's choices over the model's defaults."""
        chosen: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "min_p": self.min_p,
            "typical_p": self.typical_p,
            "repetition": self.repetition_penalty,
            "frequency": self.frequency_penalty,
            "presence": self.presence_penalty,
            "logit_bias": self.logit_bias,
        }
        params = evolve(defaults, **{name: value for name, value in chosen.items() if value is not None})
        return seeded(
            evolve(
                params,
                logprobs=1 + (self.top_logprobs or 0) if self.logprobs else 0,
                min_tokens=self.min_tokens,
                stop_ids=tuple(self.stop_token_ids),
            ),
            self.seed,
        )

    def template_kwargs(self) -> Mapping[str, Any]:
        """Template variables beside messages and tools."""
        if self.enable_thinking is None:
            return self.chat_template_kwargs
        return {"enable_thinking": self.enable_thinking, **self.chat_template_kwargs}

    def wants_tools(self) -> list[dict[str, Any]] | None:
        """The tools the template may show."""
        return None if self.tool_choice == "none" else self.tools


async def parse(request: Request, service: GenerationService) -> tuple[ChatRequest, Generation]:
    """Body → validated request and the generation it asks for. Raises RequestError."""
    settings: ServerSettings = request.app.state.settings
    raw = await read_json(request, settings.body_limit_bytes)
    try:
        body = ChatRequest.model_validate(raw)
    except ValidationError as error:
        raise from_validation(error) from None
    if settings.strict_model and body.model != service.face.id:
        raise RequestError(
            f"Model {body.model!r} is not loaded; {service.face.id!r} is.",
            status=404,
            code="model_not_found",
            param="model",
        )
    vocab = service.face.tokenizer.vocab_size
    bad = next((token for token in (body.logit_bias or {}) if not 0 <= token < vocab), None)
    if bad is not None:
        raise RequestError(f"Field 'logit_bias': token {bad} is outside 0..{vocab - 1}.", param="logit_bias")
    prompt = await asyncio.to_thread(
        service.chat_prompt, body.messages, body.wants_tools(), body.template_kwargs()
    )
    service.check_room(prompt)
    limits = (body.max_completion_tokens, body.max_tokens, service.face.max_tokens)
    limit = next((limit for limit in limits if limit is not None), None)
    return body, Generation(
        prompt=prompt,
        params=body.sampling(service.face.defaults),
        max_tokens=limit,
        stops=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        ignore_eos=body.ignore_eos,
        api="chat",
        model=body.model or service.face.id,
        client=request.client.host if request.client else "",
        priority=body.priority,
    )


async def chat_completions(request: Request) -> Response:
    """`POST /v1/chat/completions`."""
    service: GenerationService = request.app.state.service
    body, wanted = await parse(request, service)
    events = service.generate(wanted)
    first = await anext(events)  # a full queue must become a 429 while that is still possible
    writer = ChunkWriter(service.face.id, service.face.tokenizer)
    if body.stream:
        usage = bool(body.stream_options and body.stream_options.include_usage)
        return sse.sse_response(_stream(writer, first, events, usage))
    return JSONResponse(await _collect(writer, events))


class ChunkWriter:
    """The shapes of one answer, streamed or not."""

    def __init__(self, model: str, tokenizer: Tokenizer) -> None:
        self.id = f"chatcmpl-{secrets.token_hex(12)}"
        self.model = model
        self.created = now()
        self.tokenizer = tokenizer

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def chunk(self, delta: Mapping[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
        """One streamed chunk with one choice."""
        choice = {"index": 0, "delta": dict(delta), "logprobs": logprobs, "finish_reason": finish}
        return sse.data({**self.head("chat.completion.chunk"), "choices": [choice]})

    def entry(self, item: TokenLogprob) -> dict[str, Any]:
        """A token's log-probability in OpenAI's form."""
        return {
            **self._token(item.token, item.logprob),
            "top_logprobs": [self._token(*pair) for pair in item.top],
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self.tokenizer.token_bytes(token)
        text = raw.decode(errors="replace")
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(raw)}


def usage_of(finish: Finish) -> dict[str, Any]:
    """OpenAI's usage, with this server's timings."""
    usage, timings = finish.usage, finish.timings
    decode_ms = timings["decode_ms"]
    decoded = usage["completion_tokens"] - 1
    extra: dict[str, Any] = {
        "prefill_ms": round(timings["prefill_ms"], 3),
        "decode_ms": round(decode_ms, 3),
        "cached_prefix_tokens": usage["cached_tokens"],
        "prefilled_tokens": usage["prompt_tokens"] - usage["cached_tokens"],
    }
    if decoded > 0 and decode_ms > 0:
        extra["decode_tokens_per_sec"] = round(decoded / decode_ms * 1e3, 2)
    if usage.get("drafted_tokens"):
        extra["accept_rate"] = round(usage["accepted_tokens"] / usage["drafted_tokens"], 4)
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "total_tokens": usage["prompt_tokens"] + usage["completion_tokens"],
        "prompt_tokens_details": {"cached_tokens": usage["cached_tokens"]},
        "timings": extra,
    }


async def _stream(
    writer: ChunkWriter, first: TextEvent, events: AsyncIterator[TextEvent], include_usage: bool
) -> AsyncIterator[bytes]:
    if not isinstance(first, Start):
        raise AssertionError(f"a generation began with {first!r}")
    async with aclosing(events):  # type: ignore[type-var]
        yield writer.chunk({"role": "assistant", "content": ""})
        pending: list[dict[str, Any]] = []
        async for event in events:
            if isinstance(event, ContentDelta):
                yield writer.chunk(
                    {"content": event.text}, logprobs={"content": pending} if pending else None
                )
                pending = []
            elif isinstance(event, Logprobs):
                pending += [writer.entry(item) for item in event.tokens]
            elif isinstance(event, Heartbeat):
                yield sse.comment(f"{event.phase} {event.done}/{event.total}")
            elif isinstance(event, Failure):
                yield sse.data(envelope(event.message, event.status))
            elif isinstance(event, Finish):
                yield writer.chunk({}, event.reason, logprobs={"content": pending} if pending else None)
                if include_usage:
                    yield sse.data(
                        {**writer.head("chat.completion.chunk"), "choices": [], "usage": usage_of(event)}
                    )
    yield sse.DONE


async def _collect(writer: ChunkWriter, events: AsyncIterator[TextEvent]) -> dict[str, Any]:
    text: list[str] = []
    logprobs: list[dict[str, Any]] = []
    async with aclosing(events):  # type: ignore[type-var]
        async for event in events:
            if isinstance(event, ContentDelta):
                text.append(event.text)
            elif isinstance(event, Logprobs):
                logprobs += [writer.entry(item) for item in event.tokens]
            elif isinstance(event, Failure):
                raise EngineError(event.message)
            elif isinstance(event, Finish):
                choice = {
                    "index": 0,
                    "message": {"role": "assistant", "content": "".join(text), "refusal": None},
                    "logprobs": {"content": logprobs} if logprobs else None,
                    "finish_reason": event.reason,
                }
                return {**writer.head("chat.completion"), "choices": [choice], "usage": usage_of(event)}
    raise EngineError("The engine ended this request without a result.")
