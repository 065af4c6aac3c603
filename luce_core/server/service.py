"""Between API formats and the engine: prompts in, text events out. Every format uses this and nothing
below it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from attrs import Factory, evolve, frozen

from luce_core.contracts import (
    ChatFormat,
    ChatTurn,
    Done,
    GenerationChannel,
    GenerationRequest,
    Media,
    MediaSpan,
    RequestRecord,
    SamplingParams,
    Start,
    TextEvent,
    Thinking,
)
from luce_core.errors import ContextOverflow, RequestError
from luce_core.media import ImageReader, place
from luce_core.server.answers import Answers, Choice
from luce_core.server.mailbox import Mailbox
from luce_core.server.metrics import Metrics
from luce_core.text import ChatTemplate, Tokenizer, normalize_messages
from luce_core.text.chat_formats import PLAIN
from luce_core.text.fold import TextFold
from luce_core.text.messages import image_parts
from luce_core.text.tools import function_tools, schemas_of

log = logging.getLogger("luce_core.server")

HEARTBEAT_S = 5.0
TAIL_SEGMENTS, TAIL_CHARS = 4, 200  # of a prompt: enough for the tags an answer begins behind


@frozen
class ModelFace:
    """What clients see of the model."""

    id: str
    context: int
    tokenizer: Tokenizer
    template: ChatTemplate
    created: int
    defaults: SamplingParams = Factory(SamplingParams)
    max_tokens: int | None = None
    """Length of an answer when the request names none; None = up to the context."""
    chat: ChatFormat = PLAIN
    """How thoughts and calls are written."""
    images: ImageReader | None = None
    """None: messages may have no images."""
    template_kwargs: Mapping[str, Any] = Factory(dict)
    """Template variables where the request names none, e.g. `enable_thinking`."""
    details: Mapping[str, Any] = Factory(dict)
    parts: tuple[Mapping[str, str], ...] = ()
    """What the plan composed: kind, name, plugin, and how closely it answers."""


@frozen
class Generation:
    """One answer to be made."""

    prompt: tuple[int, ...]
    params: SamplingParams
    max_tokens: int | None = None
    """None: up to the end of the context."""
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    api: str = "chat"
    model: str = ""
    client: str = ""
    priority: int = 0
    tenant: str = ""
    """Whose key it came with; "" = nobody is told apart."""
    deadline_s: float | None = None
    """Seconds it may take from here; None = any."""
    prompt_logprobs: int | None = None
    """Alternatives reported with each token of the prompt; None = it is not scored."""
    media: tuple[MediaSpan, ...] = ()
    keys: tuple[int, ...] = ()
    """Of the prompt in the prefix cache, where it has images."""
    turn: ChatTurn | None = None
    """Of a conversation; None = the answer is plain text."""
    one_call: bool = False
    """The first tool call ends the answer."""


@frozen
class ChatPrompt:
    """A conversation as the model gets it."""

    ids: tuple[int, ...]
    turn: ChatTurn
    media: tuple[MediaSpan, ...] = ()
    keys: tuple[int, ...] = ()
    """One per id where there are images."""


class GenerationService:
    """Thread-safe where asyncio is: every method runs on the server's event loop."""

    def __init__(
        self,
        channel: GenerationChannel,
        face: ModelFace,
        observers: Sequence[Callable[[RequestRecord], None]] = (),
        heartbeat_s: float | None = HEARTBEAT_S,
        max_answers: int | None = None,
    ) -> None:
        """max_answers: of one request, where the channel could never hold more; None = nothing is known."""
        self.channel = channel
        self.max_answers = max_answers
        self.heartbeat_s = heartbeat_s
        self.face = face
        self.metrics = Metrics(channel, face.id)
        self.observers = (*observers, self.metrics.observe)
        self._mail: Mailbox | None = None
        self._noted = False

    async def images_of(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Media, ...]:
        """The images of a conversation, fetched and decoded off the loop. Raises RequestError."""
        images = self.face.images
        if images is None or not image_parts(messages):
            return ()  # where images cannot be, `chat` says so
        return await asyncio.get_running_loop().run_in_executor(images.threads, images.read, messages)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        thinking: Thinking | None = None,
        media: Sequence[Media] = (),
    ) -> ChatPrompt:
        """Render and tokenize a conversation. CPU-bound: call it off the loop. Raises RequestError.

        media: what `images_of` made of it.
        """
        face = self.face
        functions = function_tools(tools or ())
        wish = face.chat.template_kwargs(thinking or Thinking())
        variables = {**face.template_kwargs, **wish, **(kwargs or {})}
        seen = face.images is not None
        normal, shown = normalize_messages(messages, images=seen), functions or None
        segments = face.chat.render(normal, shown, variables)
        if segments is None:
            self._note_tools(shown)
            segments = face.template.render(normal, tools=shown, kwargs=variables)
        ids = face.tokenizer.encode_segments(segments)
        bos = face.tokenizer.bos
        if face.tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        tail = "".join(segment.text for segment in segments[-TAIL_SEGMENTS:])[-TAIL_CHARS:]
        turn = ChatTurn(tail, schemas_of(functions))
        if face.images is None:
            return ChatPrompt(tuple(ids), turn)
        placed = place(ids, face.images.placeholder, media)
        return ChatPrompt(placed.ids, turn, placed.media, placed.keys)

    def _note_tools(self, tools: Sequence[Any] | None) -> None:
        """Say once that the model never sees the tools of requests, where it does not."""
        if tools and not self._noted and "tools" not in self.face.template.accepts:
            self._noted = True
            log.warning(
                "A request has tools, which the chat template of %r does not show to the model. Give another "
                "template with --chat-template-file for tool calls.",
                self.face.id,
            )

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, kwargs: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """The ids of `chat` alone."""
        return self.chat(messages, tools, kwargs).ids

    def check_room(self, prompt: Sequence[int], field: str = "messages") -> None:
        """Raise the 400 that agents understand, before any stream opens. field: of the body."""
        if not prompt:
            raise RequestError("The prompt is empty. Send at least one token of text.", param=field)
        if len(prompt) >= self.face.context:
            raise ContextOverflow(len(prompt), self.face.context, field)

    def open(self, wanted: Sequence[Generation]) -> Answers:
        """Submit every generation and return their events, each with the index of its choice. The caller
        closes it.

        Raises RequestError or CapacityError, and then cancels those it had submitted: a full queue can
        still become a 429.
        """
        if self.max_answers is not None and len(wanted) > self.max_answers:
            raise RequestError(
                f"The request asks for {len(wanted)} answers; the queue has places for {self.max_answers}. "
                "Ask for fewer at a time, or raise --queue-limit."
            )
        for one in wanted:
            self.check_room(one.prompt)
        answers = Answers(self.channel, self._finished, self.heartbeat_s)
        mail = self._mailbox()
        try:
            for one in wanted:
                eog = frozenset() if one.ignore_eos else self.face.tokenizer.eog
                fold = self._fold(one, eog)
                answers.submit(one, self._request(one, eog), fold, mail)
        except BaseException:
            answers.close()
            raise
        return answers

    async def generate(self, wanted: Generation) -> AsyncIterator[TextEvent]:
        """The text events of one answer, `Start` first, `Finish` or `Failure` last. Closing it cancels the
        request.

        Raises RequestError or CapacityError before the first event, never after it.
        """
        answers = self.open((wanted,))
        try:
            yield Start(answers.choices[0].request.request, len(wanted.prompt))
            async for events in answers:
                for _, event in events:
                    yield event
        finally:
            answers.close()

    def _request(self, wanted: Generation, eog: frozenset[int]) -> GenerationRequest:
        room = self.face.context - len(wanted.prompt)
        return GenerationRequest(
            request=secrets.token_hex(12),
            prompt=tuple(wanted.prompt),
            max_tokens=room if wanted.max_tokens is None else min(wanted.max_tokens, room),
            params=wanted.params,
            eog=eog,
            priority=wanted.priority,
            tenant=wanted.tenant,
            deadline_s=wanted.deadline_s,
            media=wanted.media,
            keys=wanted.keys,
            prompt_logprobs=wanted.prompt_logprobs,
        )

    def _fold(self, wanted: Generation, eog: frozenset[int]) -> TextFold:
        tokenizer, format = self.face.tokenizer, self.face.chat
        if wanted.turn is None:
            return TextFold(tokenizer, stops=wanted.stops, eog=eog)
        ids = [token for text in format.markers if (token := tokenizer.token_id(text)) is not None]
        return TextFold(
            tokenizer,
            stops=wanted.stops,
            eog=eog,
            parser=format.parser(wanted.turn),
            visible=ids,
            one_call=wanted.one_call,
        )

    def _mailbox(self) -> Mailbox:
        """That of the running loop; a service may outlive a loop."""
        loop = asyncio.get_running_loop()
        if self._mail is None or self._mail.loop is not loop:
            self._mail = Mailbox(loop)
        return self._mail

    def _finished(self, choice: Choice, done: Done) -> None:
        wanted = choice.wanted
        self._observe(RequestRecord(choice.request.request, wanted.api, wanted.model, done, wanted.client))

    def _observe(self, record: RequestRecord) -> None:
        for observer in self.observers:
            try:
                observer(record)
            except Exception:
                log.exception("an observer of finished requests failed")


def seeded(params: SamplingParams, seed: int | None) -> SamplingParams:
    """`params` with the request's seed, or with one drawn at random."""
    return evolve(params, seed=secrets.randbits(63) if seed is None else seed & (1 << 64) - 1)


def now() -> int:
    """Unix seconds."""
    return int(time.time())
