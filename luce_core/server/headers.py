"""What every answer says to browsers, and under which names the server may be called."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from luce_core.errors import RequestError
from luce_core.server.errors import error_response

HEADERS = {
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
}
"""Set where a route does not say otherwise."""
STRICT_TRANSPORT = "max-age=31536000"  # a year, as is common
ANY_HOST = "*"
HOST = re.compile(r"(?:\[(?P<address>[^\[\]]*)\]|(?P<name>[^:\[\]]*))(?::[0-9]*)?")


class SecurityHeaders:
    """ASGI middleware, the outermost: adds `HEADERS` to every answer.

    tls: the server itself speaks TLS. Only then browsers are told to stay with it, and never for
    localhost, where other servers may speak without.
    """

    def __init__(self, app: ASGIApp, tls: bool) -> None:
        self.app = app
        self.tls = tls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                if self.tls and not _is_localhost(host_name(Headers(scope=scope).get("host", ""))):
                    headers.setdefault("strict-transport-security", STRICT_TRANSPORT)
            await send(message)

        await self.app(scope, receive, with_headers)


class AllowedHosts:
    """ASGI middleware: only requests that name this server.

    A page can make its own name point to this machine and then call it as if it were its own server (DNS
    rebinding). Its name is then in `Host`. No name is involved where the host is an address, and names of
    localhost mean this machine everywhere; others count when they are among `names`.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        self.app = app
        self.names = frozenset(name.lower().rstrip(".") for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wrong = None
        if scope["type"] == "http" and ANY_HOST not in self.names:
            given = Headers(scope=scope).getlist("host")  # HTTP/1.0 may have none, and no browser speaks it
            wrong = next((host for host in given if not self.allows(host)), None)
        if wrong is None:
            await self.app(scope, receive, send)
            return
        error = RequestError(
            f"This server is not called {wrong!r}. Use localhost or an address, or start it with "
            "--allowed-host for this name.",
            status=403,
        )
        await error_response(error)(scope, receive, send)

    def allows(self, host: str) -> bool:
        """Whether a `Host` header names this server."""
        name = host_name(host)
        return name in self.names or _is_localhost(name) or _is_address(name)


def host_name(host: str) -> str:
    """The name or address of a `Host` header, without port and brackets, in lower case; "" for nonsense."""
    found = HOST.fullmatch(host.strip().lower())
    return (found["address"] or found["name"] or "").rstrip(".") if found else ""


def _is_localhost(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost")  # RFC 6761: never asked of a name server


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
