"""How Gemma 4 writes thoughts and calls: channels, and calls in a syntax of its own."""

from __future__ import annotations

from json.encoder import encode_basestring

from attrs import frozen

from luce_core.contracts import ChatContext
from luce_core.text.chat_formats import (
    Calls,
    Malformed,
    Reading,
    Source,
    TagFormat,
    Thought,
    auto,
    name_until,
    shows,
)
from luce_core.text.chat_formats.json_text import MAX_DEPTH, expect, parse_key, read_string, read_word

OPEN = "<|tool_call>"
CLOSE = "<tool_call|>"
QUOTE = '<|"|>'


@frozen
class GemmaCalls:
    """`<|tool_call>call:NAME{key:<|"|>text<|"|>,other:3}<tool_call|>`: keys bare, strings between marks of
    their own without escapes, else as JSON. Strings and keys in plain quotes are understood too.
    """

    openers: tuple[str, ...] = (OPEN,)
    at_start: bool = False

    def read(self, opener: str, source: Source, calls: Calls) -> Reading[None]:
        """One call."""
        yield from expect(source, "call:")
        name, _ = yield from name_until(source, ("{",))
        calls.begin(name)
        yield from _arguments(source, calls)
        yield from source.skip()
        if not (yield from source.starts(CLOSE)) and source.ended:
            calls.end_of_text()
        calls.end()


def _arguments(source: Source, calls: Calls) -> Reading[None]:
    yield from source.skip()
    if (yield from source.starts("}")):
        return
    while True:
        key = yield from _key(source)
        quote = yield from source.starts(QUOTE, '"')
        if quote and calls.streams_quoted(key):
            calls.begin_string(key)
            if quote == '"':
                yield from read_string(source, calls.escaped)
            elif not (yield from source.until((QUOTE,), calls.text)):
                raise Malformed
            calls.end_string()
        elif quote:
            calls.json(key, (yield from _string(source, quote)))
        else:
            calls.json(key, (yield from _value(source)))
        if (yield from _more(source, "}")):
            return


def _more(source: Source, closer: str) -> Reading[str]:
    """Read a comma or the closer -> the closer, if it was that."""
    yield from source.skip()
    found = yield from source.starts(",", closer)
    if not found:
        raise Malformed
    return "" if found == "," else found


def _key(source: Source) -> Reading[str]:
    yield from source.skip()
    quote = yield from source.starts(QUOTE, '"')
    if quote:
        key = parse_key((yield from _string(source, quote))[1:-1])
        yield from expect(source, ":")
    else:
        key, _ = yield from name_until(source, (":",))
    yield from source.skip()
    return key


def _string(source: Source, quote: str) -> Reading[str]:
    """Behind the opening quote: a string as JSON."""
    parts: list[str] = []
    if quote == '"':
        yield from read_string(source, parts.append)
        return '"' + "".join(parts) + '"'
    if not (yield from source.until((QUOTE,), parts.append)):
        raise Malformed
    return encode_basestring("".join(parts))


def _value(source: Source, depth: int = 0) -> Reading[str]:
    """A value as JSON."""
    yield from source.skip()
    quote = yield from source.starts(QUOTE, '"')
    if quote:
        return (yield from _string(source, quote))
    opened = yield from source.starts("{", "[")
    if not opened:
        return (yield from read_word(source))
    if depth == MAX_DEPTH:
        raise Malformed
    closer = "}" if opened == "{" else "]"
    parts: list[str] = []
    yield from source.skip()
    if (yield from source.starts(closer)):
        return opened + closer
    while True:
        name = encode_basestring((yield from _key(source))) + ": " if opened == "{" else ""
        parts.append(name + (yield from _value(source, depth + 1)))
        if (yield from _more(source, closer)):
            return opened + ", ".join(parts) + closer


FORMAT = TagFormat(
    "gemma",
    Thought("<|channel>", "<channel|>", label="thought", anywhere=True),
    (GemmaCalls(),),
    more_markers=(CLOSE, QUOTE),
)


def make_format(context: ChatContext) -> TagFormat:
    """Gemma 4's own; Gemma 3 has no syntax for calls, so what its template says counts."""
    return FORMAT if shows(context, OPEN) else auto(context)
