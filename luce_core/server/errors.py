"""Errors in the OpenAI envelope."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from luce_core.errors import CapacityError, LuceError, RequestError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}
RETRY_AFTER_S = 1


def envelope(
    message: str, status: int, *, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """The body every OpenAI client parses."""
    return {
        "error": {"message": message, "type": TYPES.get(status, "server_error"), "param": param, "code": code}
    }


def error_response(error: Exception) -> JSONResponse:
    """The answer to a request that failed before its stream began."""
    if isinstance(error, RequestError):
        headers = {"www-authenticate": "Bearer"} if error.status == 401 else {}
        body = envelope(str(error), error.status, code=error.code, param=error.param)
        return JSONResponse(body, error.status, headers=headers)
    if isinstance(error, CapacityError):
        body = envelope(str(error), 429, code="queue_full")
        return JSONResponse(body, 429, headers={"retry-after": str(RETRY_AFTER_S)})
    if isinstance(error, LuceError):
        return JSONResponse(envelope(str(error), 500), 500)
    return JSONResponse(
        envelope(f"Internal error: {type(error).__name__}. The log has the details.", 500), 500
    )


def from_validation(error: ValidationError) -> RequestError:
    """The first thing pydantic found wrong, naming the field."""
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    more = error.error_count() - 1
    rest = f" ({more} more)" if more else ""
    return RequestError(f"Field {field!r}: {first['msg']}{rest}.", param=field or None)
