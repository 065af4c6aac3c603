"""OpenAI's legacy `/v1/completions`: raw text in, its continuation out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, TypeGuard

from attrs import frozen
from pydantic import Field, field_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from luce_core.contracts import Finish, Logprobs, PromptLogprobs, TextEvent
from luce_core.errors import RequestError
from luce_core.server import sse
from luce_core.server.answers import AnswerEvents
from luce_core.server.choices import (
    Answer,
    AnswerWriter,
    StreamedAnswers,
    collect,
    unless_left,
    usage_of,
)
from luce_core.server.legacy_logprobs import Echo, LegacyLogprobs
from luce_core.server.prompt_scores import SharedScores, prompt_scores
from luce_core.server.sampling_fields import MAX_ALTERNATIVES, SamplingFields, check_ids, read_fields
from luce_core.server.service import Generation, GenerationService
from luce_core.text import Tokenizer

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

    @property
    def scored(self) -> int | None:
        """Alternatives wanted with each token of the prompts; None = they are not scored."""
        echoed = self.logprobs if self.echo else None
        wanted = [most for most in (echoed, self.prompt_logprobs) if most is not None]
        return max(wanted, default=None)

    def check(self) -> None:
        """Raise RequestError where fields do not go together."""
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
    """What one body asks for. echoes: what each choice begins with."""

    body: CompletionRequest
    generations: Sequence[Generation]
    echoes: Sequence[Echo | None]


async def parse(request: Request, service: GenerationService) -> Wanted:
    """Body → validated request and its generations, `n` for each prompt in turn. Raises RequestError."""
    body = await read_fields(request, CompletionRequest)
    body.check()
    params = body.sampling(service.face.defaults, body.logprobs, service.face.tokenizer)
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    generations: list[Generation] = []
    echoes: list[Echo | None] = []
    for prompt in body.prompt:
        ids, text = await asyncio.to_thread(_read_prompt, service.face.tokenizer, prompt)
        service.check_room(ids, "prompt")
        generations += body.generations(
            request, ids, params, max_tokens=limit, api="completions", prompt_logprobs=body.scored
        )
        echo = Echo(ids, text, special=ids is prompt, scored=body.logprobs is not None)
        echoes += [echo if body.echo else None] * body.num_choices
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
    answers = service.open(wanted.generations)
    events: AnswerEvents = answers
    if wanted.body.scored is not None:
        events = SharedScores(answers, wanted.generations, wanted.body.num_choices)
    writer = CompletionWriter("cmpl", service)
    if wanted.body.stream:
        return sse.EventStream(events, CompletionStream(writer, wanted))
    return await unless_left(request, events, _whole(writer, events, wanted))


class CompletionWriter(AnswerWriter):
    """The shapes of one response, streamed or not."""

    def logprobs(self, wanted: Wanted) -> list[LegacyLogprobs]:
        """One for every choice."""
        most = wanted.body.logprobs or 0
        return [LegacyLogprobs(self.tokenizer, most, echo) for echo in wanted.echoes]

    def choice(self, index: int, text: str, finish: str | None, logprobs: LegacyLogprobs) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs.flush(),
            "finish_reason": finish,
        }

    def chunk(self, *choices: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {**self.head("text_completion"), "choices": list(choices), **more}

    def answer(
        self, index: int, answer: Answer, logprobs: LegacyLogprobs, scored: int | None
    ) -> dict[str, Any]:
        """One choice of a response that is not streamed. scored: alternatives in vLLM's list, if wanted."""
        text = logprobs.begin() + logprobs.take_prompt(answer.prompt) + "".join(answer.text)
        logprobs.take(answer.logprobs)
        logprobs.end(answer.ended.ending)
        choice = self.choice(index, text, answer.ended.reason, logprobs)
        if scored is not None:
            choice["prompt_logprobs"] = prompt_scores(self.tokenizer, answer.prompt, scored)
        return choice


class CompletionStream(StreamedAnswers):
    """A streamed response. An echoed prompt comes first, a choice's reason to end last and once."""

    def __init__(self, writer: CompletionWriter, wanted: Wanted) -> None:
        super().__init__(len(wanted.generations))
        self.writer = writer
        self.wanted = wanted
        self.logprobs = writer.logprobs(wanted)
        self.plain = wanted.body.logprobs is None
        self.text_data = [sse.TextData(partial(self._text, index)) for index in range(self.count)]

    def _choice(self, index: int, text: str, finish: str | None = None) -> dict[str, Any]:
        return self.writer.choice(index, text, finish, self.logprobs[index])

    def _text(self, index: int, text: str) -> dict[str, Any]:
        return self.writer.chunk({"index": index, "text": text, "logprobs": None, "finish_reason": None})

    def begin(self) -> bytes:
        begun = [(index, one.begin()) for index, one in enumerate(self.logprobs)]
        return b"".join(self.text(index, text) for index, text in begun if text)

    def text(self, index: int, text: str) -> bytes:
        if self.plain:
            return self.text_data[index](text)
        return sse.data(self.writer.chunk(self._choice(index, text)))

    def other(self, index: int, event: TextEvent) -> bytes:
        logprobs = self.logprobs[index]
        if isinstance(event, Logprobs):
            logprobs.take(event.tokens)
        elif isinstance(event, PromptLogprobs):
            return sse.data(self.writer.chunk(self._choice(index, logprobs.take_prompt(event.tokens))))
        return b""

    def finish(self, index: int, event: Finish) -> bytes:
        self.logprobs[index].end(event.ending)
        return sse.data(self.writer.chunk(self._choice(index, "", event.reason)))

    def failure(self, running: Sequence[int], error: Mapping[str, Any]) -> bytes:
        ends = [self._choice(index, "", "error") for index in running]
        return sse.data(self.writer.chunk(*ends, **error))

    def end(self) -> bytes:
        ended = self.ended
        if not self.wanted.body.wants_usage_chunk or ended is None:
            return sse.DONE
        return sse.data(self.writer.chunk(usage=usage_of(ended, self.wanted.body.num_choices))) + sse.DONE


async def _whole(writer: CompletionWriter, events: AnswerEvents, wanted: Wanted) -> Response:
    answers = await collect(events)
    choices = [
        writer.answer(index, answer, logprobs, wanted.body.prompt_logprobs)
        for index, (answer, logprobs) in enumerate(zip(answers, writer.logprobs(wanted), strict=True))
    ]
    usage = usage_of([answer.ended for answer in answers], wanted.body.num_choices)
    return JSONResponse({**writer.head("text_completion"), "choices": choices, "usage": usage})
