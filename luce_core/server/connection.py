"""HTTP/1.1 connections with limits: what a client may take of time and memory, and when it counts as gone.

A subclass of uvicorn's httptools protocol. What it changes:

* Requests behind the running one stay unparsed bytes, few of them, until it is answered.
* Heads, bodies, idling and unread answers each have a time; heads have a size.
* A client that closes its sending side is answered. ASGI's `http.disconnect` says so at once, so that an
  answer which is not streamed can be given up; a stream goes on until the client cannot be reached
  (`luce_core.server.client`). Under TLS there is no such half: a close there ends both directions.
* An answer given before the body was read closes the connection, but not before the client could see it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Mapping, MutableMapping
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
from attrs import frozen
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from luce_core.server.client import EXTENSION, Client
from luce_core.server.errors import envelope
from luce_core.server.headers import HEADERS
from luce_core.server.settings import BODY_LIMIT_BYTES
from luce_core.server.sockets import tune

log = logging.getLogger("luce_core.server")

HEAD_BYTES = 64 << 10  # a request line with its headers; what most servers take
HEAD_PIECE = 4 << 10
"""A head is parsed in pieces of so much, so that one packet full of tiny requests makes few of them."""
BODY_PIECE = 64 << 10
AHEAD_BYTES = 64 << 10  # unparsed, behind the running request; then reading pauses
BODY_BYTES_PER_S = 16 << 10
"""A body gets a second more for so much of it: a slow line is no attack."""
BODIES = 4  # of the largest size, held at a time by a server
LINGER_BYTES = 1 << 20  # still read and dropped after an answer to an unread body ...
LINGER_S = 2.0  # ... for so long: closing at once would reset the connection and could lose the answer
LINGERING = 256  # connections that may do so at a time
PROBES_S = (0.05, 0.1, 0.2, 0.4, 1.0)
"""Pauses before looking whether a client that closed its sending side is still there; the last repeats."""


@frozen
class Limits:
    """What one client may take. Seconds; 0 = no limit."""

    connections: int = 0
    """Open at a time; one more is told 503 and closed."""
    read_s: float = 30.0
    """For a head, and for a body beside the second it gets for each 16 KiB."""
    idle_s: float = 75.0
    """Between requests. Longer than most clients keep a connection, so that closing is up to them."""
    bodies_bytes: int = BODIES * BODY_LIMIT_BYTES
    """Of all requests that are not answered yet, together; a request that would exceed it is told 503."""
    write_s: float = 30.0
    """For taking anything at all of an answer that is ready."""


class Connection(HttpToolsProtocol):
    """One connection. Everything runs on the event loop."""

    def __init__(self, *args: Any, limits: Limits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limits = limits
        self.timeout_keep_alive: Any = limits.idle_s or _FOREVER_S
        self._running: RequestResponseCycle | None = None
        self._peer: Client | None = None
        self._ahead = bytearray()
        self._head_bytes = 0
        self._in_head = False
        self._framing = False
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._read_closed = False
        self._lingering = False
        self._dropped = 0
        self._charged = 0

    # --- the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        tune(transport.get_extra_info("socket"), self.limits.write_s)
        if self.limits.connections and len(self.connections) > self.limits.connections:
            self._refuse(503, f"{self.limits.connections} connections are open; no more may be. Retry later.")
            return
        self._expect_within(self.limits.read_s)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._write_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        self._ahead.clear()
        self._charge(-self._charged)
        self._stop_lingering()
        self._unset_keepalive_if_required()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        if self._peer is not None:
            self._peer.gone.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            self._dropped += len(data)
            if self._dropped > LINGER_BYTES:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        if self._ahead:
            self._hold(data)
        else:
            self._feed(memoryview(data))

    def eof_received(self) -> bool:  # type: ignore[override]
        """False closes the connection."""
        running = self._running
        if self.scheme == "https" or self._lingering or running is None or self._awaits_body():
            return False
        if running.response_complete and not self._ahead:
            return False
        self._read_closed = True
        running.message_event.set()  # whoever waits in `receive` is told
        self._probe(0)
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.limits.write_s and self._write_timer is None:
            self._write_timer = self.loop.call_later(self.limits.write_s, self._unread)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # --- reading

    def _feed(self, data: memoryview) -> None:
        at = 0
        while at < len(data) and not self._lingering and not self.transport.is_closing():
            if self._busy():
                self._hold(data[at:])
                break
            piece = data[at : at + (BODY_PIECE if self._awaits_body() else HEAD_PIECE)]
            at += len(piece)
            self._head_bytes += len(piece)
            self._parse(piece)
            if self._in_head and self._head_bytes > HEAD_BYTES:
                self._refuse(431, f"The request's head has more than {HEAD_BYTES} bytes. Send fewer headers.")
        if self._deadline is None and not self._busy() and not self._awaits_body():
            self._expect_within(self.limits.read_s)  # something came that began no request: a blank line

    def _parse(self, piece: memoryview) -> None:
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay(piece[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(400, "The request is not valid HTTP/1.1.")

    def _stay(self, behind: memoryview) -> None:
        """Some clients offer HTTP/2 with every request; they are answered over HTTP/1.1. The parser has
        taken the request for one without a body; another one is told how long the body is and goes on.
        """
        framing = [pair for pair in self.headers if pair[0] in (b"content-length", b"transfer-encoding")]
        if framing:
            self.cycle.more_body = True
            self.parser = httptools.HttpRequestParser(self)
            self._framing = True
            head = b"".join([b"%b: %b\r\n" % pair for pair in framing])
            self._parse(memoryview(b"POST / HTTP/1.1\r\n" + head + b"\r\n"))
            self._framing = False
            self._expect_within(self.limits.read_s)
        if behind and not self._lingering:
            self._parse(behind)

    def _hold(self, data: bytes | memoryview) -> None:
        """Keep what comes behind the running request."""
        self._ahead += data
        if len(self._ahead) >= AHEAD_BYTES:
            self.flow.pause_reading()

    def _busy(self) -> bool:
        """A request was read to its end and is not answered yet."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return bool(self.pipeline)
        return bool(self.pipeline) or not cycle.more_body

    def _awaits_body(self) -> bool:
        """A request is being answered whose body has not come to its end."""
        cycle = self.cycle
        return cycle is not None and not self.pipeline and cycle.more_body and not cycle.response_complete

    def on_message_begin(self) -> None:
        if self._framing:
            return
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._expect_within(self.limits.read_s)

    def on_url(self, url: bytes) -> None:
        if not self._framing:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._framing:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._framing:
            return
        self._in_head = False
        super().on_headers_complete()
        self._expect_within(self.limits.read_s)

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if not self._charge(len(body)):
            most = self.limits.bodies_bytes
            self._give_up(503, f"Requests have {most} bytes together; no more may be. Retry later.")
        if self._deadline is not None:
            self._deadline += len(body) / BODY_BYTES_PER_S

    def _charge(self, num_bytes: int) -> bool:
        """Count bytes of a body that are held now; a negative number gives back. False: too many."""
        self._charged += num_bytes
        state: Any = self.server_state
        state.luce_bodies = getattr(state, "luce_bodies", 0) + num_bytes
        return not self.limits.bodies_bytes or bool(state.luce_bodies <= self.limits.bodies_bytes)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._deadline = None

    # --- answering

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.more_body:  # it may have waited behind another
            self._expect_within(self.limits.read_s)
        super()._start_asgi_task(cycle, partial(self._answer, cycle, app))

    async def _answer(
        self, cycle: RequestResponseCycle, app: Any, scope: MutableMapping[str, Any], receive: Any, send: Any
    ) -> None:
        self._peer = Client(partial(self._write_piece, cycle))
        scope["extensions"] = {EXTENSION: self._peer}
        whole = plain = False

        async def receive_until_closed() -> Any:
            nonlocal whole
            if whole and self._read_closed:
                return {"type": "http.disconnect"}
            message = await receive()
            if whole and self._read_closed:
                return {"type": "http.disconnect"}
            whole = whole or (message["type"] == "http.request" and not message.get("more_body", False))
            return message

        async def send_head_first(message: Any) -> None:
            nonlocal plain
            starts = message["type"] == "http.response.start"
            early = starts and self._awaits_body()
            if starts:
                self._charge(-self._charged)
                plain = scope["http_version"] == "1.0" and not _has_length(message)
                if plain:  # no chunks there: the end of the body is that of the connection
                    cycle.chunked_encoding = False
            elif plain:
                await self._write_piece(cycle, message.get("body", b""))
                message = {**message, "body": b""}
            if early:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)
            if early:
                cycle.keep_alive = True  # closed by `on_response_complete`, which lingers

        await app(scope, receive_until_closed, send_head_first)

    async def _write_piece(self, cycle: RequestResponseCycle, piece: bytes) -> None:
        """A piece of a body without a length, straight to the transport."""
        if self.flow.write_paused and not cycle.disconnected:
            await self.flow.drain()
        if not cycle.disconnected:
            self._write(cycle, piece)

    def _write(self, cycle: RequestResponseCycle, piece: bytes) -> None:
        if piece:  # an empty chunk would end the body
            self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if cycle.chunked_encoding else piece)

    def on_response_complete(self) -> None:
        unread = self._running is self.cycle and self.cycle.more_body
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if unread:
            self._linger()
        elif self._busy():
            return
        elif self._ahead:
            self._unset_keepalive_if_required()
            self.loop.call_soon(self._feed_ahead)
        elif self._read_closed:
            self.transport.close()

    def _feed_ahead(self) -> None:
        data, self._ahead = bytes(self._ahead), bytearray()
        if self.transport.is_closing():
            return
        self._feed(memoryview(data))
        if self._read_closed and not self._busy():  # half a request, and the rest will not come
            self.transport.close()

    # --- time

    def _expect_within(self, seconds: float) -> None:
        """Something must be complete by then. One lazy timer: moving the time later costs nothing."""
        if not seconds:
            self._deadline = None
            return
        self._deadline = self.loop.time() + seconds
        if self._timer is None:
            self._timer = self.loop.call_at(self._deadline, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._deadline is None or self.transport.is_closing() or (self._busy() and not self._lingering):
            return
        if self.loop.time() < self._deadline:
            self._timer = self.loop.call_at(self._deadline, self._look)
        elif self._lingering or not (self._in_head or self._awaits_body()):
            self.transport.abort()
        else:
            self._too_slow()

    def _too_slow(self) -> None:
        what = "head" if self._in_head else "body"
        self._give_up(408, f"The request's {what} was not complete in time. Send it faster.")

    def _give_up(self, status: int, message: str) -> None:
        """End a request that has not come to its end."""
        cycle = self.cycle
        begun = False
        if self._awaits_body():
            begun = cycle.response_started
            cycle.disconnected = True
            cycle.message_event.set()
        if begun:
            self.transport.abort()
        else:
            self._refuse(status, message)

    def _unread(self) -> None:
        log.info("a client took nothing of its answer for %g s and was cut off", self.limits.write_s)
        self.transport.abort()

    # --- the end

    def _refuse(self, status: int, message: str) -> None:
        """An answer without a request, and the end of the connection."""
        self._charge(-self._charged)
        body = json.dumps(envelope(message, status)).encode()
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
        fields = {
            **HEADERS,
            "content-type": "application/json",
            "content-length": len(body),
            "connection": "close",
            **({"retry-after": 1} if status == 503 else {}),
        }
        lines = [f"{name}: {value}\r\n".encode() for name, value in fields.items()]
        lines += [b"%b: %b\r\n" % header for header in self.server_state.default_headers]
        self.transport.write(b"".join([head.encode(), *lines, b"\r\n", body]))
        self._linger()

    def _linger(self) -> None:
        """Close, after the client had time to read the answer although it is still sending."""
        self._unset_keepalive_if_required()
        lingering = _lingering(self.server_state)
        if not self.transport.can_write_eof() or len(lingering) >= LINGERING:
            self.transport.close()
            return
        lingering.add(self)
        self._lingering = True
        self.transport.write_eof()
        self.flow.resume_reading()
        self._deadline = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._expect_within(LINGER_S)

    def _stop_lingering(self) -> None:
        if self._lingering:
            _lingering(self.server_state).discard(self)

    def _probe(self, count: int) -> None:
        """Look, after a half close, whether it was a whole one: the other side then answers with a reset."""
        running, peer = self._running, self._peer
        if self.transport.is_closing() or running is None or running.response_complete:
            return
        if count and self._socket_error():
            self.transport.abort()
            return
        if count == 0 and running.response_started and not self.flow.write_paused and peer is not None:
            self._write(running, peer.probe)
        self._probe_timer = self.loop.call_later(
            PROBES_S[min(count, len(PROBES_S) - 1)], self._probe, count + 1
        )

    def _socket_error(self) -> bool:
        sock = self.transport.get_extra_info("socket")
        return sock is None or sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0


_FOREVER_S = 10.0**7


def _has_length(message: Mapping[str, Any]) -> bool:
    return any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))


def _lingering(state: Any) -> set[Connection]:
    """Those of one server that wait for their client to read; kept where the server keeps its connections."""
    found: set[Connection] | None = getattr(state, "luce_lingering", None)
    if found is None:
        found = state.luce_lingering = set()
    return found


def http_options(limits: Limits) -> dict[str, Any]:
    """What uvicorn's `Config` needs for such connections."""
    return {"http": partial(Connection, limits=limits), "ws": "none", "timeout_keep_alive": limits.idle_s}
