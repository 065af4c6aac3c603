"""A small HTTP client for measuring: one connection per request, times taken next to the socket."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import h11
from attrs import frozen

import luce_core
from luce_core.bench.timeline import Answer, End, Timeline, error_message
from luce_core.errors import UsageError

READ_BYTES = 65536
BODY_BYTES = 2**20
"""Of an answer that is no stream, what is kept."""
CONNECT_S = 10.0
SETTLE_S = 1.0
"""How long a server may take to end a stream it said is over."""


class Unreachable(Exception):
    """No connection could be made: there is no server, or none any more."""


class Broken(Exception):
    """A connection broke, or what came over it is no HTTP."""


@frozen
class Target:
    """A server, and the key it wants."""

    secure: bool
    host: str
    port: int
    path: str
    """Ends in /v1."""
    key: str | None = None
    timeout_s: float = 300.0
    """Longest silence."""

    @property
    def url(self) -> str:
        """As it is shown."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.secure else ''}://{host}:{self.port}{self.path}"


def parse_url(text: str, *, key: str | None = None, timeout_s: float = 300.0) -> Target:
    """UsageError says what is wrong with it. Without a path, /v1 is meant."""

    def wrong(reason: str) -> UsageError:
        return UsageError(f"--url {text!r}: {reason}. Wanted http://HOST:PORT or http://HOST:PORT/v1.")

    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise wrong(str(error)) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise wrong("this is no address of a web server")
    if parts.username is not None or parts.password is not None:
        raise wrong("a key does not belong into the address; give it with --api-key")
    if parts.query or parts.fragment:
        raise wrong("it must end with its path")
    path = parts.path.rstrip("/")
    if path and not path.endswith("/v1"):
        raise wrong(f"its path is {path!r}, and the OpenAI API lies under one that ends in '/v1'")
    secure = parts.scheme == "https"
    return Target(secure, parts.hostname, port or (443 if secure else 80), path or "/v1", key, timeout_s)


@frozen
class Reply:
    """An answer in one piece."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def message(self) -> str:
        """What it says went wrong."""
        try:
            return error_message(json.loads(self.body))
        except ValueError:
            return error_message(self.body.decode("utf-8", "replace"))


class Connection:
    """One request over one connection. Bytes come as they arrive."""

    def __init__(self, target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._target = target
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT)

    async def send(self, method: str, path: str, body: Any = None) -> None:
        """The request, in one write."""
        target = self._target
        data = b"" if body is None else json.dumps(body).encode()
        default = 443 if target.secure else 80
        host = f"[{target.host}]" if ":" in target.host else target.host
        headers = [
            ("Host", host if target.port == default else f"{host}:{target.port}"),
            ("User-Agent", f"luce-core/{luce_core.__version__} bench"),
            ("Accept", "*/*"),
            ("Connection", "close"),
        ]
        if body is not None:
            headers += [("Content-Type", "application/json"), ("Content-Length", str(len(data)))]
        if target.key is not None:
            headers.append(("Authorization", f"Bearer {target.key}"))
        request = h11.Request(method=method, target=target.path + path, headers=headers)
        parts = (request, h11.Data(data=data), h11.EndOfMessage())
        self._writer.write(b"".join(self._http.send(part) or b"" for part in parts))
        try:
            await self._writer.drain()
        except OSError as error:
            raise Broken(f"the connection broke while the request was sent: {_words(error)}") from error

    async def head(self) -> h11.Response:
        """Status and headers."""
        while True:
            event = await self._event()
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise Broken(f"no answer, but {type(event).__name__}")

    async def data(self) -> AsyncIterator[bytes]:
        """The body, piece by piece. Broken where it ends before it is whole."""
        while True:
            event = await self._event()
            if not isinstance(event, h11.Data):
                return  # the end of the message, or what comes behind it
            yield bytes(event.data)

    async def settle(self) -> None:
        """Read what is left behind the last event, so that the server does not see a client that ran away."""
        with suppress(Broken, TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                async for _ in self.data():
                    pass

    async def _event(self) -> Any:
        while True:
            try:
                event = self._http.next_event()
                if event is not h11.NEED_DATA:
                    return event
                async with asyncio.timeout(self._target.timeout_s):
                    data = await self._reader.read(READ_BYTES)
                if not data and self._http.their_state is h11.SEND_RESPONSE:
                    raise Broken("the server closed the connection without an answer")
                self._http.receive_data(data)
            except h11.RemoteProtocolError as error:
                raise Broken(str(error)) from error
            except TimeoutError:  # an OSError too, so it comes first
                raise
            except OSError as error:
                raise Broken(_words(error)) from error


def _words(error: OSError) -> str:
    """What the system says; asyncio puts addresses in its place."""
    if error.errno is not None and error.errno in errno.errorcode and not isinstance(error, ssl.SSLError):
        return os.strerror(error.errno).lower()
    return (error.strerror or str(error) or type(error).__name__).lower()


@asynccontextmanager
async def connect(target: Target) -> AsyncIterator[Connection]:
    """Unreachable when there is nobody."""
    context = ssl.create_default_context() if target.secure else None
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(target.host, target.port, ssl=context)
    except TimeoutError:
        raise Unreachable(f"no answer within {CONNECT_S:.0f} s") from None
    except OSError as error:  # ssl.SSLError and socket.gaierror too
        raise Unreachable(_words(error)) from error
    try:
        yield Connection(target, reader, writer)
    finally:
        writer.transport.abort()  # nothing is left to say, and a server that is gone must not hold us up


async def fetch(target: Target, method: str, path: str, body: Any = None) -> Reply:
    """An answer in one piece. Raises Unreachable, Broken, TimeoutError."""
    async with connect(target) as connection:
        await connection.send(method, path, body)
        head = await connection.head()
        return await _whole(connection, head)


async def _whole(connection: Connection, head: h11.Response) -> Reply:
    body = bytearray()
    async for piece in connection.data():
        body += piece[: BODY_BYTES - len(body)]
    headers = {name.decode().lower(): value.decode("latin-1") for name, value in head.headers}
    return Reply(head.status_code, headers, bytes(body))


async def generate(
    target: Target, path: str, body: Any, clock: Callable[[], float] = time.perf_counter
) -> Answer:
    """One streamed answer. Everything that goes wrong behind the connection is an answer too.

    The clock starts when the request is written: a client that keeps connections open pays no more. Raises
    Unreachable.
    """
    async with connect(target) as connection:
        line = Timeline(clock())
        try:
            await connection.send("POST", path, body)
            head = await connection.head()
            if head.status_code != 200:
                reply = await _whole(connection, head)
                end: End = "rejected" if reply.status == 429 else "status"
                reason = f"HTTP {reply.status}: {reply.message}"
                return Answer(end, reason, line.sent_s, clock())
            kind = dict(head.headers).get(b"content-type", b"").decode("latin-1")
            if not kind.startswith("text/event-stream"):
                return Answer("no stream", f"content-type {kind!r}", line.sent_s, clock())
            async for piece in connection.data():
                line.feed(clock(), piece)
                if line.over:
                    break
            answer = line.answer(clock())
            await connection.settle()
            return answer
        except Broken as error:
            seen = line.answer(clock())
            return (
                seen
                if seen.end != "cut"
                else Answer("cut", str(error), seen.sent_s, seen.ended_s, seen.chunks_s)
            )
        except TimeoutError:
            reason = f"no byte for {target.timeout_s:g} s"
            return Answer("timeout", reason, line.sent_s, clock())
