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
    Done,
    EngineEvent,
    GenerationChannel,
    GenerationRequest,
    Heartbeat,
    RequestRecord,
    SamplingParams,
    Start,
    TextEvent,
)
from luce_core.errors import ContextOverflow, RequestError
from luce_core.server.metrics import Metrics
from luce_core.text import ChatTemplate, Tokenizer, normalize_messages
from luce_core.text.fold import TextFold

log = logging.getLogger("luce_core.server")

HEARTBEAT_S = 5.0


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


class GenerationService:
    """Thread-safe where asyncio is: every method runs on the server's event loop."""

    def __init__(
        self,
        channel: GenerationChannel,
        face: ModelFace,
        observers: Sequence[Callable[[RequestRecord], None]] = (),
        heartbeat_s: float | None = HEARTBEAT_S,
    ) -> None:
        self.channel = channel
        self.heartbeat_s = heartbeat_s
        self.face = face
        self.metrics = Metrics(channel, face.id)
        self.observers = (*observers, self.metrics.observe)

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, kwargs: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """Render and tokenize a conversation. CPU-bound: call it off the loop. Raises RequestError."""
        face = self.face
        variables = {**face.template_kwargs, **kwargs}
        segments = face.template.render(normalize_messages(messages), tools=tools or None, kwargs=variables)
        ids = face.tokenizer.encode_segments(segments)
        bos = face.tokenizer.bos
        if face.tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        return tuple(ids)

    def check_room(self, prompt: Sequence[int]) -> None:
        """Raise the 400 that agents understand, before any stream opens."""
        if not prompt:
            raise RequestError("The prompt is empty. Send at least one token of text.", param="messages")
        if len(prompt) >= self.face.context:
            raise ContextOverflow(len(prompt), self.face.context)

    async def generate(self, wanted: Generation) -> AsyncIterator[TextEvent]:
        """The text events of one answer, `Start` first, `Finish` or `Failure` last. Closing it cancels the
        request.

        Raises RequestError or CapacityError before the first event, never after it.
        """
        self.check_room(wanted.prompt)
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[EngineEvent] = asyncio.Queue()
        eog = frozenset() if wanted.ignore_eos else self.face.tokenizer.eog
        room = self.face.context - len(wanted.prompt)
        request = GenerationRequest(
            request=secrets.token_hex(12),
            prompt=tuple(wanted.prompt),
            max_tokens=room if wanted.max_tokens is None else min(wanted.max_tokens, room),
            params=wanted.params,
            eog=eog,
            priority=wanted.priority,
        )
        fold = TextFold(self.face.tokenizer, stops=wanted.stops, eog=eog)

        def deliver(event: EngineEvent) -> None:
            queue.put_nowait(event)
            if isinstance(event, Done):
                record = RequestRecord(request.request, wanted.api, wanted.model, event, wanted.client)
                self._observe(record)

        def sink(event: EngineEvent) -> None:
            loop.call_soon_threadsafe(deliver, event)

        self.channel.submit(request, sink)
        done = False
        try:
            yield Start(request.request, len(wanted.prompt))
            while not done:
                try:
                    # Not wait_for: on Python 3.11 it can swallow a cancellation that comes with an event.
                    async with asyncio.timeout(self.heartbeat_s):
                        event = await queue.get()
                except TimeoutError:
                    yield Heartbeat("waiting")
                    continue
                done = isinstance(event, Done)
                stopped = fold.stopped
                for text in fold.feed(event):
                    yield text
                if fold.stopped is not None and stopped is None and not done:
                    self.channel.cancel(request.request)
        finally:
            if not done:
                self.channel.cancel(request.request)

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
