"""Request bodies: bounded, JSON, an object."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json
from starlette.requests import Request

from luce_core.errors import RequestError


async def read_json(request: Request, limit_bytes: int) -> dict[str, Any]:
    """The body as a JSON object. Raises RequestError: 411 without a length, 413 too large, 415 another type,
    400 not an object.
    """
    _check_type(request)
    headers = request.headers
    limit = f"Request bodies may have {limit_bytes} bytes; --body-limit raises it."
    declared = headers.get("content-length", "")
    if not declared and "transfer-encoding" not in headers:
        raise RequestError(
            "The request has no body. Send a JSON object, with its Content-Length.", status=411
        )
    if declared.isdigit() and int(declared) > limit_bytes:
        raise RequestError(f"The body has {declared} bytes. {limit}", status=413)
    raw = bytearray()
    try:
        async for part in request.stream():
            raw += part
            if len(raw) > limit_bytes:
                raise RequestError(f"The body is too large. {limit}", status=413)
        body = parse_json(raw)
    finally:
        raw.clear()  # an error keeps the frame it came from, and with it megabytes until they are collected
    if not isinstance(body, dict):
        raise RequestError(f"The body must be a JSON object, not {type(body).__name__}.", code="invalid_json")
    return body


def parse_json(raw: bytes | bytearray) -> Any:
    """JSON as RFC 8259 has it: UTF-8, no NaN, no half of a surrogate pair, at most 200 levels deep.

    Of equal keys the last wins. Raises RequestError (400).
    """
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"The body is not valid JSON: {error}.", code="invalid_json") from None


def _check_type(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not kind and "origin" not in request.headers:
        return  # a program that says nothing means JSON
    # A web page must say so: what it may send elsewhere unasked has another type, or none.
    if kind != "application/json" and not kind.endswith("+json"):
        raise RequestError(f"Content type {kind!r} is not supported; send 'application/json'.", status=415)
