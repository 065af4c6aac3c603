"""Where the images of a conversation come from: parts of messages to bytes, or to a URL to fetch."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

from attrs import field, frozen

from luce_core.errors import RequestError
from luce_core.text.messages import image_parts

DATA = "data:"
WEB = ("http://", "https://")
SHOWN = 60


@frozen
class Source:
    """One image. Either `data`, or an http(s) `url`."""

    where: str
    """Of the body: "messages[1].content[0]"."""
    data: bytes | None = field(default=None, repr=False)
    url: str = ""


def sources_of(messages: Sequence[Mapping[str, Any]]) -> list[Source]:
    """The images of a conversation, in order. Raises RequestError naming the part that is wrong."""
    return [_source(where, part) for where, part in image_parts(messages)]


def _source(where: str, part: Mapping[str, Any]) -> Source:
    """OpenAI's `image_url` and `input_image`, and Anthropic's `image` with a `source`."""
    given = next((part[name] for name in ("image_url", "source", "image", "url") if name in part), None)
    if isinstance(given, Mapping):
        if given.get("type") == "base64" or "data" in given:
            return Source(where, _base64(where, given.get("data")))
        given = given.get("url")
    if not isinstance(given, str):
        raise _bad(where, "names no image", "'image_url' with a data URL or an http(s) URL")
    if given[: len(DATA)].lower() == DATA:
        return Source(where, _data_url(where, given))
    if given.lower().startswith(WEB):
        return Source(where, url=given)
    shown = repr(given[:SHOWN]) + ("..." if len(given) > SHOWN else "")
    raise _bad(where, f"is at {shown}", "a data URL (data:image/png;base64,...) or an http(s) URL")


def _data_url(where: str, url: str) -> bytes:
    head, comma, rest = url[len(DATA) :].partition(",")
    if not comma:
        raise _bad(where, "has a data URL without a comma", "data:image/png;base64,...")
    if head.lower().split(";")[-1].strip() != "base64":
        raise _bad(where, f"has a data URL of {head[:SHOWN]!r}", "one in base64: data:image/png;base64,...")
    return _base64(where, rest)


def _base64(where: str, text: Any) -> bytes:
    if not isinstance(text, str):
        raise _bad(where, "has no base64 data", "a string")
    try:
        raw = unquote_to_bytes(text) if "%" in text else text.encode("ascii")
        return base64.b64decode(b"".join(raw.split()), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise _bad(where, f"has base64 data that is none ({error})", "an image file in base64") from None


def _bad(where: str, got: str, wanted: str) -> RequestError:
    return RequestError(f"'{where}' {got}; wanted {wanted}.", code="invalid_image", param=where)
