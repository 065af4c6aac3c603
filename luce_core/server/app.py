"""The Starlette application: routes, errors, keys."""

from __future__ import annotations

import math
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import luce_core
from luce_core.errors import LuceError, RequestError
from luce_core.server.auth import ApiKeys, KeyRing
from luce_core.server.chat import chat_completions
from luce_core.server.completions import completions
from luce_core.server.errors import LastResort, envelope, error_response
from luce_core.server.headers import AllowedHosts, SecurityHeaders
from luce_core.server.metrics import CONTENT_TYPE
from luce_core.server.openapi import openapi
from luce_core.server.service import GenerationService
from luce_core.server.settings import ServerSettings
from luce_core.server.tokens import detokenize, tokenize


def build_app(service: GenerationService, settings: ServerSettings | None = None) -> Starlette:
    """An ASGI application over one service. Pure: it starts and owns nothing."""
    settings = settings or ServerSettings()
    app = Starlette(
        routes=[
            Route("/health", health, methods=["GET"]),
            Route("/ready", health, methods=["GET"]),
            Route("/metrics", metrics, methods=["GET"]),
            Route("/props", props, methods=["GET"]),
            Route("/", health, methods=["GET"]),
            Route("/openapi.json", openapi, methods=["GET"]),
            Route("/v1/models", list_models, methods=["GET"]),
            Route("/v1/models/{model:path}", get_model, methods=["GET"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
        ],
        middleware=_middleware(settings),
        exception_handlers={LuceError: _luce_error, HTTPException: _http_error},
    )
    app.router.redirect_slashes = False  # a redirect would trust the host the request names
    app.state.service = service
    app.state.settings = settings
    return app


def _middleware(settings: ServerSettings) -> list[Middleware]:
    """Outermost first."""
    keys = KeyRing(settings.api_keys, settings.api_key_file)
    found = [Middleware(SecurityHeaders, tls=settings.tls)]
    if not keys and not settings.tls:
        found.append(Middleware(AllowedHosts, names=settings.allowed_hosts))
    if settings.cors_origins:
        # Before the keys: a browser's preflight carries none, and errors must be readable by the page too.
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.cors_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["retry-after"],
            )
        )
    return [*found, Middleware(ApiKeys, keys=keys), Middleware(LastResort)]


async def health(request: Request) -> Response:
    """200 while requests are answered; 503 while the engine loads, restarts or is gone, and why."""
    service: GenerationService = request.app.state.service
    health = service.channel.health()
    stats = service.channel.stats()
    ready = health.status == "ready"
    body: dict[str, Any] = {
        "status": "ok" if ready else health.status,
        "running": int(stats["running"]),
        "waiting": int(stats["waiting"]),
        "restarts": health.restarts,
    }
    if health.detail:
        body["detail"] = health.detail
    if health.progress is not None:
        body["progress"] = round(health.progress, 4)
    if health.retry_in_s is not None:
        body["retry_in_s"] = round(health.retry_in_s, 1)
    headers = {} if ready else {"retry-after": str(max(1, math.ceil(health.retry_in_s or 1)))}
    return JSONResponse(body, 200 if ready else 503, headers=headers)


async def metrics(request: Request) -> Response:
    """`GET /metrics`, Prometheus text format."""
    service: GenerationService = request.app.state.service
    return Response(service.metrics.render(), media_type=CONTENT_TYPE)


async def props(request: Request) -> Response:
    """`GET /props`: what was composed and how it answers by default."""
    service: GenerationService = request.app.state.service
    face = service.face
    return JSONResponse(
        {
            "model_alias": face.id,
            "build_info": f"luce-core {luce_core.__version__}",
            "n_ctx": face.context,
            "modalities": {"vision": face.images is not None, "audio": False},
            "chat_template": face.template.source,
            "default_generation_settings": {
                "temperature": face.defaults.temperature,
                "top_k": face.defaults.top_k,
                "top_p": face.defaults.top_p,
                "min_p": face.defaults.min_p,
                "repetition_penalty": face.defaults.repetition,
                "max_tokens": face.max_tokens,
            },
            "parts": [dict(part) for part in face.parts],
            "model": dict(face.details),
        }
    )


def _card(service: GenerationService) -> dict[str, Any]:
    face = service.face
    return {
        "id": face.id,
        "object": "model",
        "created": face.created,
        "owned_by": "luce-core",
        "context_length": face.context,
        "max_model_len": face.context,
        "input_modalities": ["text", "image"] if face.images is not None else ["text"],
        "output_modalities": ["text"],
        "meta": dict(face.details),
    }


async def list_models(request: Request) -> Response:
    """`GET /v1/models`."""
    return JSONResponse({"object": "list", "data": [_card(request.app.state.service)]})


async def get_model(request: Request) -> Response:
    """`GET /v1/models/{id}`; ids may hold slashes."""
    service: GenerationService = request.app.state.service
    wanted = request.path_params["model"]
    if wanted != service.face.id:
        raise RequestError(
            f"Model {wanted!r} is not loaded; {service.face.id!r} is.",
            status=404,
            code="model_not_found",
            param="model",
        )
    return JSONResponse(_card(service))


async def _luce_error(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise AssertionError(f"registered for HTTPException, got {error!r}")
    where = f"{request.method} {request.url.path}"
    words = {404: f"There is no {where}.", 405: f"{where} is not allowed here."}
    body = envelope(words.get(error.status_code, str(error.detail)), error.status_code)
    return JSONResponse(body, error.status_code, headers=error.headers)
