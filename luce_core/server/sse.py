"""Server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import StreamingResponse

DONE = b"data: [DONE]\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # the second keeps nginx from buffering


def data(payload: Any) -> bytes:
    """One `data:` event."""
    return b"data: " + json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def comment(text: str) -> bytes:
    """A comment: keeps the connection alive, parsed by nobody."""
    return f": {text}\n\n".encode()


def sse_response(events: AsyncIterator[bytes]) -> StreamingResponse:
    """A streaming answer; when the client leaves, the iterator is closed."""
    return StreamingResponse(events, media_type="text/event-stream", headers=HEADERS)
