"""`/tokenize` and `/detokenize`, named and shaped as llama-server has them."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import BaseModel, StrictInt, StrictStr
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from luce_core.server.sampling_fields import check_ids, read_body
from luce_core.server.service import GenerationService
from luce_core.text import Tokenizer


class TokenizeRequest(BaseModel):
    content: StrictStr
    add_special: bool = False
    """Add the beginning and ending tokens that the file's own rule adds."""
    parse_special: bool = False
    """Text may spell special tokens."""
    with_pieces: bool = False


class DetokenizeRequest(BaseModel):
    tokens: list[StrictInt]


async def tokenize(request: Request) -> Response:
    """`POST /tokenize`: text to ids."""
    service: GenerationService = request.app.state.service
    body = await read_body(request, TokenizeRequest)
    return JSONResponse(await asyncio.to_thread(_tokenized, service.face.tokenizer, body))


async def detokenize(request: Request) -> Response:
    """`POST /detokenize`: ids to text, special tokens shown."""
    service: GenerationService = request.app.state.service
    body = await read_body(request, DetokenizeRequest)
    tokenizer = service.face.tokenizer
    check_ids(tokenizer, body.tokens, "tokens")
    return JSONResponse({"content": await asyncio.to_thread(tokenizer.decode, body.tokens)})


def _tokenized(tokenizer: Tokenizer, body: TokenizeRequest) -> dict[str, Any]:
    rule = None if body.add_special else False
    ids = tokenizer.encode(body.content, special=body.parse_special, add_bos=rule, add_eos=rule)
    if not body.with_pieces:
        return {"tokens": ids}
    return {"tokens": [{"id": token, "piece": _piece(tokenizer, token)} for token in ids]}


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """A token's text, or its bytes where they are no whole characters."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
