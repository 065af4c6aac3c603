"""What both OpenAI completion formats share: fields that choose tokens, and the `n` answers they ask for."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import Annotated, Any, TypeVar, cast

from attrs import Factory, define, evolve
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from starlette.requests import Request
from starlette.responses import Response

from luce_core.contracts import (
    ContentDelta,
    Failure,
    Finish,
    Logprobs,
    SamplingParams,
    Start,
    TextEvent,
    TokenLogprob,
)
from luce_core.errors import EngineError, RequestError
from luce_core.server.body import read_json
from luce_core.server.errors import from_validation
from luce_core.server.service import Generation, GenerationService, now, seeded
from luce_core.server.settings import ServerSettings
from luce_core.text import Tokenizer

MAX_N = 16
MAX_ALTERNATIVES = 20
LOWEST_LOGPROB = -9999.0  # JSON has no infinity
CLIENT_LEFT = 499  # seen by logs only
SEED_MASK = (1 << 64) - 1

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
ChoiceEvents = AsyncGenerator[tuple[int, TextEvent], None]


class StreamOptions(BaseModel):
    include_usage: bool = False


class SamplingFields(BaseModel):
    """The base of both bodies. Unknown fields are ignored: clients add new ones every week."""

    model_config = ConfigDict(extra="ignore", strict=False)

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
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
    top_n_sigma: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    xtc_probability: Probability | None = None
    xtc_threshold: Probability | None = None
    dry_multiplier: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    dry_base: Annotated[float, Field(ge=1.0, le=100.0)] | None = None
    dry_allowed_length: Annotated[int, Field(ge=1)] | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=-1)] | None = None
    dry_sequence_breakers: Annotated[list[str], Field(max_length=32)] = Field(default=["\n", ":", '"', "*"])
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = Field(default_factory=list)
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    priority: int = 0

    @field_validator("stop")
    @classmethod
    def _some_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > 16 or any(not stop or len(stop) > 1024 for stop in stops):
            raise ValueError("at most 16 stop strings of 1 to 1024 characters")
        return value

    @property
    def num_choices(self) -> int:
        """Answers per prompt."""
        return self.n or 1

    @property
    def wants_usage_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(
        self, defaults: SamplingParams, alternatives: int | None, tokenizer: Tokenizer
    ) -> SamplingParams:
        """The request's choices over the model's defaults. alternatives: per token; None = no logprobs."""
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
            "top_n_sigma": self.top_n_sigma,
            "xtc_probability": self.xtc_probability,
            "xtc_threshold": self.xtc_threshold,
            "dry_multiplier": self.dry_multiplier,
            "dry_base": self.dry_base,
            "dry_allowed_length": self.dry_allowed_length,
            "dry_range": None if self.dry_penalty_last_n is None else max(self.dry_penalty_last_n, 0),
        }
        params = evolve(defaults, **{name: value for name, value in chosen.items() if value is not None})
        if params.dry_multiplier > 0.0:
            breakers = (tokenizer.tokens_with(text) for text in self.dry_sequence_breakers if text)
            params = evolve(params, dry_breakers=frozenset().union(*breakers))
        return seeded(
            evolve(
                params,
                logprobs=0 if alternatives is None else 1 + alternatives,
                min_tokens=self.min_tokens,
                stop_ids=tuple(self.stop_token_ids),
            ),
            self.seed,
        )

    def generations(
        self,
        request: Request,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        max_tokens: int | None,
        api: str,
    ) -> list[Generation]:
        """The `n` answers to one prompt; choice i draws with the request's seed + i."""
        service: GenerationService = request.app.state.service
        first = Generation(
            prompt=tuple(prompt),
            params=params,
            max_tokens=max_tokens,
            stops=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            ignore_eos=self.ignore_eos,
            api=api,
            model=self.model or service.face.id,
            client=request.client.host if request.client else "",
            priority=self.priority,
        )
        return [
            evolve(first, params=evolve(params, seed=(params.seed + choice) & SEED_MASK))
            for choice in range(self.num_choices)
        ]


Body = TypeVar("Body", bound=BaseModel)
Fields = TypeVar("Fields", bound=SamplingFields)


async def read_body(request: Request, kind: type[Body]) -> Body:
    """The request's JSON as `kind`. Raises RequestError naming the wrong field."""
    settings: ServerSettings = request.app.state.settings
    raw = await read_json(request, settings.body_limit_bytes)
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise from_validation(error) from None


async def read_fields(request: Request, kind: type[Fields]) -> Fields:
    """`read_body`, checked against the model that is loaded."""
    service: GenerationService = request.app.state.service
    body = await read_body(request, kind)
    if request.app.state.settings.strict_model and body.model != service.face.id:
        raise RequestError(
            f"Model {body.model!r} is not loaded; {service.face.id!r} is.",
            status=404,
            code="model_not_found",
            param="model",
        )
    check_ids(service.face.tokenizer, body.logit_bias or {}, "logit_bias")
    check_ids(service.face.tokenizer, body.stop_token_ids, "stop_token_ids")
    return body


def check_ids(tokenizer: Tokenizer, ids: Any, field: str) -> None:
    """Raise RequestError naming `field` when one of `ids` is not in the vocabulary."""
    size = tokenizer.vocab_size
    bad = next((token for token in ids if not 0 <= token < size), None)
    if bad is not None:
        raise RequestError(f"Field {field!r}: token {bad} is outside 0..{size - 1}.", param=field)


# --- several answers at once


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


# --- the shapes


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
