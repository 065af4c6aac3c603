"""OpenAI's legacy `/v1/completions`: raw text in, its continuation out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, TypeGuard

from attrs import Factory, define, frozen
from pydantic import Field, field_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from luce_core.contracts import ContentDelta, Failure, Finish, Heartbeat, Logprobs, TokenLogprob
from luce_core.errors import RequestError
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
from luce_core.server.sampling_fields import MAX_ALTERNATIVES, SamplingFields, check_ids, read_fields
from luce_core.server.service import Generation, GenerationService
from luce_core.text import Detokenizer, Tokenizer

DEFAULT_MAX_TOKENS = 16  # the legacy API's own
MAX_CHOICES = 128  # prompts times n

Prompt = str | list[int]


class CompletionRequest(SamplingFields):
    """The body."""

    prompt: list[Prompt]
    """A text, a list of texts, a list of ids or a list of lists of ids; validated to a list of prompts."""
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = None
    best_of: int | None = None
    suffix: str | None = None

    @field_validator("prompt", mode="plain")
    @classmethod
    def _some_prompts(cls, value: Any) -> list[Prompt]:
        prompts = [value] if isinstance(value, str) or _are_ids(value) else value
        if not isinstance(prompts, list) or not prompts:
            raise ValueError("a text, a list of texts, a list of token ids or a list of such lists")
        if not all(isinstance(one, str) for one in prompts) and not all(_are_ids(one) for one in prompts):
            raise ValueError("every prompt must be a text, or every one a list of one or more token ids")
        return prompts

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, value: str | None) -> str | None:
        if value:
            raise ValueError("text after the answer is not supported yet; leave it out")
        return value

    def check(self) -> None:
        """Raise RequestError where fields do not go together."""
        if self.echo and self.logprobs is not None:
            raise _refused("logprobs", "those of an echoed prompt are not supported yet; drop one of both")
        if self.best_of not in (None, self.num_choices):
            raise _refused("best_of", f"{self.best_of} is not supported; only the value of 'n' is")
        asked = len(self.prompt) * self.num_choices
        if asked > MAX_CHOICES:
            raise _refused("prompt", f"{asked} answers are asked for; at most {MAX_CHOICES} may be")


def _refused(field: str, reason: str) -> RequestError:
    return RequestError(f"Field {field!r}: {reason}.", param=field)


def _are_ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


@frozen
class Wanted:
    """What one body asks for. echoes: the text each choice begins with."""

    body: CompletionRequest
    generations: Sequence[Generation]
    echoes: Sequence[str]


async def parse(request: Request, service: GenerationService) -> Wanted:
    """Body → validated request and its generations, `n` for each prompt in turn. Raises RequestError."""
    body = await read_fields(request, CompletionRequest)
    body.check()
    params = body.sampling(service.face.defaults, body.logprobs, service.face.tokenizer)
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    generations: list[Generation] = []
    echoes: list[str] = []
    for prompt in body.prompt:
        ids, text = await asyncio.to_thread(_read_prompt, service.face.tokenizer, prompt)
        try:
            service.check_room(ids)
        except RequestError as error:
            error.param = "prompt"
            raise
        generations += body.generations(request, ids, params, max_tokens=limit, api="completions")
        echoes += [text if body.echo else ""] * body.num_choices
    return Wanted(body, generations, echoes)


def _read_prompt(tokenizer: Tokenizer, prompt: Prompt) -> tuple[list[int], str]:
    """Ids and text. A text spells no special tokens and begins as the file rules; ids are taken as is."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, special=False, add_eos=False), prompt
    check_ids(tokenizer, prompt, "prompt")
    return prompt, tokenizer.decode(prompt)


async def completions(request: Request) -> Response:
    """`POST /v1/completions`."""
    service: GenerationService = request.app.state.service
    wanted = await parse(request, service)
    events = await open_choices(service, wanted.generations)
    writer = CompletionWriter("cmpl", service)
    if wanted.body.stream:
        return sse.sse_response(_stream(writer, events, wanted))
    return await unless_left(request, _whole(writer, events, wanted))


@define
class LegacyLogprobs:
    """Collects a choice's tokens in the legacy form, whose offsets count characters of its text."""

    detokenizer: Detokenizer
    offset: int = 0
    pending: list[tuple[int, TokenLogprob]] = Factory(list)

    def take(self, items: Sequence[TokenLogprob]) -> None:
        for item in items:
            self.pending.append((self.offset, item))
            self.offset += len(self.detokenizer.push([item.token]))

    def flush(self, tokenizer: Tokenizer) -> dict[str, Any] | None:
        """What came since the last call; None when nothing did."""
        pending, self.pending = self.pending, []
        if not pending:
            return None
        items = [item for _, item in pending]
        return {
            "tokens": [_name(tokenizer, item.token) for item in items],
            "token_logprobs": [max(item.logprob, LOWEST_LOGPROB) for item in items],
            "top_logprobs": [_alternatives(tokenizer, item) for item in items],
            "text_offset": [offset for offset, _ in pending],
        }


def _name(tokenizer: Tokenizer, token: int) -> str:
    """A token's text; `bytes:` and its bytes where they are no whole characters, so that names stay apart."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _alternatives(tokenizer: Tokenizer, item: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens, and always the one that was chosen."""
    named: dict[str, float] = {}
    for token, logprob in (*item.top, (item.token, item.logprob)):
        named.setdefault(_name(tokenizer, token), max(logprob, LOWEST_LOGPROB))
    return named


class CompletionWriter(AnswerWriter):
    """The shapes of one response, streamed or not."""

    def logprobs(self) -> LegacyLogprobs:
        return LegacyLogprobs(Detokenizer(self.tokenizer))

    def choice(self, index: int, text: str, finish: str | None, logprobs: LegacyLogprobs) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs.flush(self.tokenizer),
            "finish_reason": finish,
        }

    def chunk(self, *choices: dict[str, Any], **more: Any) -> bytes:
        return sse.data({**self.head("text_completion"), "choices": choices, **more})

    def answer(self, index: int, echo: str, answer: Answer) -> dict[str, Any]:
        """One choice of a response that is not streamed."""
        logprobs = self.logprobs()
        logprobs.take(answer.logprobs)
        return self.choice(index, echo + "".join(answer.text), answer.ended.reason, logprobs)


async def _stream(writer: CompletionWriter, events: ChoiceEvents, wanted: Wanted) -> AsyncIterator[bytes]:
    count = len(wanted.generations)
    logprobs = [writer.logprobs() for _ in range(count)]
    finishes: dict[int, Finish] = {}
    async with aclosing(events):
        for index, echo in enumerate(wanted.echoes):
            if echo:
                yield writer.chunk(writer.choice(index, echo, None, logprobs[index]))
        async for index, event in events:
            if isinstance(event, ContentDelta):
                yield writer.chunk(writer.choice(index, event.text, None, logprobs[index]))
            elif isinstance(event, Logprobs):
                logprobs[index].take(event.tokens)
            elif isinstance(event, Heartbeat):
                yield sse.comment(f"{event.phase} {event.done}/{event.total}")
            elif isinstance(event, Failure):
                yield sse.data(envelope(event.message, event.status))
                break
            elif isinstance(event, Finish):
                yield writer.chunk(writer.choice(index, "", event.reason, logprobs[index]))
                finishes[index] = event
    if wanted.body.wants_usage_chunk and len(finishes) == count:
        ended = [finishes[index] for index in range(count)]
        yield writer.chunk(usage=usage_of(ended, wanted.body.num_choices))
    yield sse.DONE


async def _whole(writer: CompletionWriter, events: ChoiceEvents, wanted: Wanted) -> Response:
    answers = await collect(events, len(wanted.generations))
    choices = [
        writer.answer(index, echo, answer)
        for index, (echo, answer) in enumerate(zip(wanted.echoes, answers, strict=True))
    ]
    usage = usage_of([answer.ended for answer in answers], wanted.body.num_choices)
    return JSONResponse({**writer.head("text_completion"), "choices": choices, "usage": usage})
