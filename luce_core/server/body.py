"""Request bodies: bounded, JSON, an object."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request

from luce_core.errors import RequestError


async def read_json(request: Request, limit_bytes: int) -> dict[str, Any]:
    """The body as a JSON object. Raises RequestError: 413 too large, 415 another type, 400 not an object."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise RequestError(f"Content type {kind!r} is not supported; send 'application/json'.", status=415)
    limit = f"Request bodies may have {limit_bytes} bytes; --body-limit raises it."
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise RequestError(f"The body has {declared} bytes. {limit}", status=413)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit_bytes:
            raise RequestError(f"The body is too large. {limit}", status=413)
        parts.append(part)
    try:
        body = json.loads(b"".join(parts), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise RequestError(f"The body must be a JSON object, not {type(body).__name__}.")
    return body


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
