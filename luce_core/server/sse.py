"""Server-sent events: how a streamed answer is written, and what happens when its client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from json.encoder import encode_basestring
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from luce_core.contracts import Failure, TextEvent
from luce_core.server.answers import AnswerEvents
from luce_core.server.client import Client, client_of

log = logging.getLogger("luce_core.server")

DONE = b"data: [DONE]\n\n"
PROBE = b": still there?\n\n"  # a comment, written to see whether the other side answers with a reset
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # the second keeps nginx from buffering

Write = Callable[[bytes], Awaitable[None]]


def data(payload: Any) -> bytes:
    """One `data:` event."""
    return b"data: " + json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def comment(text: str) -> bytes:
    """A comment: keeps the connection alive, parsed by nobody."""
    return f": {text}\n\n".encode()


class TextData:
    """Writes events that differ in one string only: everything around it is encoded once."""

    HOLE = "\x00"  # json escapes it, so nothing else in the payload can look like it

    __slots__ = ("_head", "_tail")

    def __init__(self, make: Callable[[str], Any]) -> None:
        """make: the payload that holds a given text."""
        head, found, tail = data(make(self.HOLE)).partition(json.dumps(self.HOLE).encode())
        if not found or json.dumps(self.HOLE).encode() in tail:
            raise AssertionError(f"the payload does not hold its text exactly once: {make('text')!r}")
        self._head, self._tail = head, tail

    def __call__(self, text: str) -> bytes:
        return self._head + encode_basestring(text).encode() + self._tail


class StreamFold(Protocol):
    """A streamed answer as bytes. Pure: events in, bytes out, so that it can be tested without a server."""

    over: bool
    """Nothing more is to be read: an answer failed."""

    def begin(self) -> bytes:
        """What comes before the first event."""
        ...

    def feed(self, index: int, event: TextEvent) -> bytes:
        """What an event of choice `index` becomes; maybe nothing."""
        ...

    def end(self) -> bytes:
        """What closes the stream."""
        ...


class EventStream(Response):
    """Writes `answers` through `fold`, as one write for everything that waits. When the client leaves, or
    the server ends this response, the answers are closed.
    """

    media_type = "text/event-stream"

    def __init__(self, answers: AnswerEvents, fold: StreamFold) -> None:
        self.answers = answers
        self.fold = fold
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = client_of(scope)
        gone = asyncio.ensure_future(_gone(client, receive))
        writing = asyncio.ensure_future(self._write(client, send))
        try:
            await asyncio.wait({gone, writing}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            self.answers.close()
            gone.cancel()
            writing.cancel()

    async def _write(self, client: Client | None, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        write = _plain(send) if client is None else client.streams(PROBE)
        await write(self.fold.begin())
        while not self.fold.over:
            chunk = await self._next()
            if chunk is None:
                break
            if chunk:
                await write(chunk)
        self.answers.close()
        await send({"type": "http.response.body", "body": self.fold.end(), "more_body": False})

    async def _next(self) -> bytes | None:
        """What everything that waits becomes; None at the end."""
        try:
            events = await anext(self.answers, None)
            if events is None:
                return None
            return b"".join([self.fold.feed(index, event) for index, event in events])
        except Exception as error:  # the request boundary: the status is sent, only the stream can say so
            log.exception("a stream failed")
            return self.fold.feed(
                0, Failure(f"Internal error: {type(error).__name__}. The log has the details.")
            )


def _plain(send: Send) -> Write:
    async def write(chunk: bytes) -> None:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})

    return write


async def _gone(client: Client | None, receive: Receive) -> None:
    """Return when the client cannot be reached any more. The body must have been read."""
    if client is not None:
        await client.gone.wait()
        return
    while (await receive())["type"] != "http.disconnect":
        pass
