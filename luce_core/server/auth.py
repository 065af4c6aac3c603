"""API keys: checked before the body is read, compared in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from luce_core.errors import RequestError
from luce_core.server.errors import error_response

OPEN_PATHS = frozenset({"/health", "/ready"})


class ApiKeys:
    """ASGI middleware. No keys: everything is open."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self.keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self.keys or scope["path"] in OPEN_PATHS or self._allowed(scope):
            await self.app(scope, receive, send)
            return
        error = RequestError(
            "No valid API key. Send one as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
            status=401,
            code="invalid_api_key",
        )
        await error_response(error)(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        raw = given.encode("latin-1")  # how header bytes were decoded
        # Every key is compared, so that timing tells nothing about which one was near.
        equal = [hmac.compare_digest(raw, key) for key in self.keys]
        return any(equal)
