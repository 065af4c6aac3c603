"""The OpenAPI 3.1 document of the server, made from the models that read requests and from `shapes`."""

from __future__ import annotations

from functools import cache
from typing import Any

from attrs import frozen
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import luce_core
from luce_core.server import shapes
from luce_core.server.auth import OPEN_PATHS
from luce_core.server.chat import ChatRequest
from luce_core.server.completions import CompletionRequest
from luce_core.server.metrics import CONTENT_TYPE
from luce_core.server.tokens import DetokenizeRequest, TokenizeRequest

JSON = "application/json"
EVENTS = "text/event-stream"
REF = "#/components/schemas/{model}"

MEANINGS = {
    400: "The request is wrong or no HTTP; `param` names the field where one is.",
    401: "No valid API key came with it.",
    403: "The server is not called by the name in `Host`.",
    404: "There is no such route or model.",
    408: "Head or body did not arrive in time.",
    411: "A body must come with its length, or in chunks.",
    413: "The body is larger than the server takes.",
    415: "The body is not JSON by its content type.",
    429: "The queue is full.",
    431: "The header lines are larger than the server takes.",
    500: "The server failed; its log has the details.",
    503: "The engine loads, restarts or ends, or too many connections are open.",
    504: "The request passed its deadline before the answer began.",
}
"""Every error a documented operation can end with, beside 405 for a method that is not documented."""

READING = (400, 401, 403, 408, 431, 500, 503)
SENDING = (*READING, 411, 413, 415)
ANSWERING = (*SENDING, 404, 429, 504)


@frozen
class Operation:
    """One method of one route."""

    method: str
    path: str
    summary: str
    answer: Any = None
    """Shape of the JSON of a 200; None: text of type `media`, or JSON of any shape."""
    body: type[BaseModel] | None = None
    event: Any = None
    """Shape of the events, where the answer can be streamed."""
    errors: tuple[int, ...] = READING
    unwell: bool = False
    """503 has the shape of the answer, not that of an error."""
    media: str = JSON


OPERATIONS = (
    Operation("GET", "/", "State of the server", shapes.HealthAnswer, unwell=True),
    Operation("GET", "/health", "State of the server", shapes.HealthAnswer, unwell=True),
    Operation("GET", "/ready", "State of the server", shapes.HealthAnswer, unwell=True),
    Operation("GET", "/metrics", "Metrics in the text format of Prometheus", media=CONTENT_TYPE),
    Operation("GET", "/openapi.json", "This document"),
    Operation("GET", "/props", "What was composed, and how it answers by default", shapes.PropsAnswer),
    Operation("GET", "/v1/models", "The model that is loaded", shapes.ModelList),
    Operation(
        "GET",
        "/v1/models/{model}",
        "A model by its id, which may hold slashes",
        shapes.ModelCard,
        errors=(*READING, 404),
    ),
    Operation(
        "POST",
        "/v1/chat/completions",
        "Answer a conversation",
        shapes.ChatAnswer,
        ChatRequest,
        shapes.ChatChunk,
        ANSWERING,
    ),
    Operation(
        "POST",
        "/v1/completions",
        "Continue a text",
        shapes.TextAnswer,
        CompletionRequest,
        shapes.TextChunk,
        ANSWERING,
    ),
    Operation(
        "POST", "/tokenize", "Text to token ids", shapes.TokenizeAnswer, TokenizeRequest, errors=SENDING
    ),
    Operation(
        "POST", "/detokenize", "Token ids to text", shapes.DetokenizeAnswer, DetokenizeRequest, errors=SENDING
    ),
)

REFINED: dict[tuple[type[BaseModel], str], Any] = {
    (ChatRequest, "messages"): shapes.Messages,
    (ChatRequest, "stop"): shapes.Stops,
    (ChatRequest, "tools"): shapes.Tools,
    (ChatRequest, "tool_choice"): shapes.ToolChoice,
    (CompletionRequest, "prompt"): shapes.Prompts,
    (CompletionRequest, "stop"): shapes.Stops,
}
"""Fields whose shape is checked by code, so that their annotation says less than is true."""


async def openapi(request: Request) -> Response:
    """`GET /openapi.json`."""
    settings, face = request.app.state.settings, request.app.state.service.face
    guarded = bool(settings.api_keys or settings.api_key_file)
    return JSONResponse(document(guarded, face.images is not None))


@cache
def document(guarded: bool, images: bool = False) -> dict[str, Any]:
    """The document. guarded: keys are asked for. images: messages may have some."""
    schemas, refs = _schemas()
    if not images:
        _without_images(schemas)
    paths: dict[str, dict[str, Any]] = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, refs, guarded)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "luce-core",
            "version": luce_core.__version__,
            "description": "Local LLM inference in the formats of OpenAI's API. Unknown fields are ignored.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {f"Error{status}": _error(status) for status in MEANINGS},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _without_images(schemas: dict[str, Any]) -> None:
    """A server that reads no images answers them with a 400, so they are none of its shapes."""
    gone = {kind.__name__ for kind in (shapes.ImagePart, shapes.ImageUrl)}
    for name in gone:
        del schemas[name]
    refs = [{"$ref": REF.format(model=name)} for name in gone]
    queue: list[Any] = [schemas]
    while queue:
        item = queue.pop()
        if isinstance(item, dict):
            if isinstance(item.get("anyOf"), list):
                item["anyOf"] = [one for one in item["anyOf"] if one not in refs]
            queue += item.values()
        elif isinstance(item, list):
            queue += item


def _operation(one: Operation, refs: dict[Any, dict[str, Any]], guarded: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "summary": one.summary,
        "operationId": _identifier(one),
        "responses": {"200": {"description": "The answer.", "content": _content(one, refs)}},
    }
    for status in sorted(one.errors):
        found["responses"][str(status)] = {"$ref": f"#/components/responses/Error{status}"}
    if one.unwell:
        found["responses"]["503"] = {"description": MEANINGS[503], "content": _content(one, refs)}
    if guarded and one.path not in OPEN_PATHS:
        found["security"] = [{"bearer": []}, {"header": []}]
    if "{model}" in one.path:
        some = {"type": "string", "minLength": 1}
        found["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": some}]
    if one.body is not None:
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": refs[one.body]}}}
    return found


def _identifier(one: Operation) -> str:
    words = one.path.replace("/v1", "").replace("{model}", "one").replace(".json", "").strip("/")
    return f"{one.method.lower()}_{words.replace('/', '_') or 'root'}"


def _content(one: Operation, refs: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    if one.answer is None:
        return {one.media: {"schema": {"type": "object" if one.media == JSON else "string"}}}
    found: dict[str, Any] = {JSON: {"schema": refs[one.answer]}}
    if one.event is not None:
        found[EVENTS] = {"schema": _event(refs[one.event])}
    return found


def _event(chunk: dict[str, Any]) -> dict[str, Any]:
    """One event of a stream, as is the custom where the version (3.1) has no word for them."""
    whole = {"type": "string", "contentMediaType": JSON, "contentSchema": chunk}
    data = {"anyOf": [{"const": "[DONE]"}, whole], "description": "A chunk, or what ends the stream."}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _error(status: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "description": MEANINGS[status],
        "content": {JSON: {"schema": {"$ref": REF.format(model=shapes.ErrorAnswer.__name__)}}},
    }
    if status in (429, 503):
        seconds = {"type": "integer", "minimum": 1}
        found["headers"] = {"Retry-After": {"description": "Seconds.", "required": True, "schema": seconds}}
    return found


class _Plain(GenerateJsonSchema):
    """Without a title for every field."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _schemas() -> tuple[dict[str, Any], dict[Any, dict[str, Any]]]:
    """The component schemas, and for each type the reference (or whole schema) that stands for it."""
    types: list[Any] = [shapes.ErrorAnswer]
    for one in OPERATIONS:
        types += [kind for kind in (one.body, one.answer, one.event) if kind is not None]
    inputs = [(kind, "validation", TypeAdapter(kind)) for kind in dict.fromkeys([*types, *REFINED.values()])]
    found, rest = TypeAdapter.json_schemas(inputs, ref_template=REF, schema_generator=_Plain)  # type: ignore[arg-type]
    schemas = rest["$defs"]
    refs = {kind: schema for (kind, _), schema in found.items()}
    for (model, field), kind in REFINED.items():
        properties = schemas[model.__name__]["properties"]
        optional = {"default": None} if "default" in properties[field] else {}
        properties[field] = {**refs[kind], **optional}
    return schemas, refs
