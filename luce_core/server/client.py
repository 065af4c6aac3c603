"""What a response may know of the connection it answers on, beyond what ASGI says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

EXTENSION = "luce_core.client"
"""Key in the scope's `extensions`. Servers other than ours do not set it, and everything works without."""

Write = Callable[[bytes], Awaitable[None]]


class Client:
    """The other side of one request. ASGI's `http.disconnect` comes as soon as it closes its sending side;
    `gone` is set only when it cannot be reached any more.
    """

    __slots__ = ("gone", "probe", "write")

    def __init__(self, write: Write) -> None:
        self.gone = asyncio.Event()
        self.write = write
        self.probe = b""
        """Once set: a piece of body that may be written at any time, to see whether the client is there."""

    def streams(self, probe: bytes) -> Write:
        """Say that this answer is a stream, so that its client may close its sending side and read on.

        Returns the short way to write pieces of the body: after the head, before the last piece.
        """
        self.probe = probe
        return self.write


def client_of(scope: Mapping[str, Any]) -> Client | None:
    """The client of a request; None on a server that does not say."""
    found = (scope.get("extensions") or {}).get(EXTENSION)
    return found if isinstance(found, Client) else None
