"""Errors in the OpenAI envelope."""

from __future__ import annotations

import logging
from typing import Any

from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from luce_core.errors import CapacityError, LuceError, RequestError, UnavailableError

log = logging.getLogger("luce_core.server")

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    411: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
CODES = {
    400: "invalid_value",
    401: "invalid_api_key",
    403: "host_not_allowed",
    404: "unknown_url",
    405: "method_not_supported",
    408: "request_timeout",
    411: "length_required",
    413: "body_too_large",
    415: "unsupported_content_type",
    429: "queue_full",
    431: "headers_too_large",
    500: "internal_error",
    503: "unavailable",
    504: "deadline_exceeded",
}
"""What `code` says where the error itself says nothing closer."""
RETRY_AFTER_S = 1
MAX_PARAM_CHARS = 256
MAX_MESSAGE_CHARS = 4096  # messages quote what came; what came may be megabytes


def envelope(
    message: str, status: int, *, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """The body every OpenAI client parses."""
    return {
        "error": {
            "message": _short(message),
            "type": TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error"),
            "param": param,
            "code": code or CODES.get(status, "error"),
        }
    }


def _short(message: str) -> str:
    if len(message) <= MAX_MESSAGE_CHARS:
        return message
    half = MAX_MESSAGE_CHARS // 2
    return f"{message[:half]} [...] {message[-half:]}"


def error_response(error: Exception) -> JSONResponse:
    """The answer to a request that failed before its stream began."""
    if isinstance(error, RequestError):
        headers = {"www-authenticate": "Bearer"} if error.status == 401 else {}
        if error.status in (429, 503):
            headers["retry-after"] = str(RETRY_AFTER_S)
        body = envelope(str(error), error.status, code=error.code, param=error.param)
        return JSONResponse(body, error.status, headers=headers)
    if isinstance(error, CapacityError):
        body = envelope(str(error), 429)
        return JSONResponse(body, 429, headers={"retry-after": str(RETRY_AFTER_S)})
    if isinstance(error, UnavailableError):
        body = envelope(str(error), 503)
        return JSONResponse(body, 503, headers={"retry-after": str(error.retry_after_s)})
    if isinstance(error, LuceError):
        return JSONResponse(envelope(str(error), 500, code="engine_error"), 500)
    return JSONResponse(
        envelope(f"Internal error: {type(error).__name__}. The log has the details.", 500), 500
    )


class LastResort:
    """ASGI middleware: what nobody expected is logged and becomes a 500, inside of what adds headers.

    Once an answer has begun it can only be cut off: the error goes on to the server, which does that.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except ClientDisconnect:
            log.debug("%s %s: the client left before it was complete", scope["method"], scope["path"])
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            log.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
            await error_response(error)(scope, receive, send)


def from_validation(error: ValidationError) -> RequestError:
    """The first thing pydantic found wrong, naming the field."""
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"])[:MAX_PARAM_CHARS]
    more = error.error_count() - 1
    rest = f" ({more} more)" if more else ""
    return RequestError(
        f"Field {field!r}: {first['msg']}{rest}.", param=field or None, code=_validation_code(first["type"])
    )


def _validation_code(kind: str) -> str:
    """pydantic's kind of error in OpenAI's vocabulary."""
    if kind == "missing":
        return "missing_required_parameter"
    return "invalid_type" if kind.endswith(("_type", "_parsing", "_from_float")) else "invalid_value"
