"""Calls as JSON objects with a name and arguments: between tags (Hermes, Qwen3), or bare (Llama 3)."""

from __future__ import annotations

from attrs import frozen

from luce_core.text.chat_formats.calls import NAME_CHARS, Calls, Malformed
from luce_core.text.chat_formats.json_text import (
    expect,
    parse_key,
    read_arguments,
    read_key,
    read_string,
    read_value,
    whole_arguments,
)
from luce_core.text.chat_formats.schema import parse_json
from luce_core.text.chat_formats.source import Reading, Source

ARGUMENTS = ("arguments", "parameters")


@frozen
class TaggedJson:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. A missing closing tag is forgiven."""

    opener: str = "<tool_call>"
    closer: str = "</tool_call>"
    at_start: bool = False

    @property
    def openers(self) -> tuple[str, ...]:
        return (self.opener,)

    def read(self, opener: str, source: Source, calls: Calls) -> Reading[None]:
        """One call."""
        yield from expect(source, "{")
        yield from read_call(source, calls)
        yield from source.skip()
        if not (yield from source.starts(self.closer)) and source.ended:
            calls.end_of_text()
        calls.end()


@frozen
class BareJson:
    """An answer that is one such object, or several with `;` between them, perhaps behind a tag."""

    tag: str = "<|python_tag|>"
    at_start: bool = True

    @property
    def openers(self) -> tuple[str, ...]:
        return (self.tag, "{")

    def read(self, opener: str, source: Source, calls: Calls) -> Reading[None]:
        """The calls."""
        if opener != "{":
            yield from expect(source, "{")
        while True:
            yield from read_call(source, calls)
            calls.end()
            yield from source.skip()
            yield from source.starts(";")
            yield from source.skip()
            if (yield from source.see(1)) != "{":
                return
            source.take(1)


def read_call(source: Source, calls: Calls) -> Reading[None]:
    """Behind the opening brace of a call: through its closing one. The call has begun and not ended.

    The arguments stream where the name comes before them. `{"function": {...}}` around both is accepted.
    Raises Malformed.
    """
    held = ""
    yield from source.skip()
    while True:
        key = yield from read_key(source)
        yield from source.skip()
        if key == "name" and not calls.open:
            calls.begin((yield from _name(source)))
            if held:
                whole_arguments(held, calls)
        elif key in ARGUMENTS and calls.open and not held:
            held = yield from _arguments(source, calls)
        elif key in ARGUMENTS and not held:
            held = yield from _object_text(source)
        elif key == "function" and not calls.open and (yield from source.see(1)) == "{":
            source.take(1)
            yield from read_call(source, calls)
        else:
            yield from read_value(source)  # an id, a type
        yield from source.skip()
        found = yield from source.starts(",", "}")
        if not found or (found == "}" and not calls.open):
            raise Malformed
        if found == "}":
            return


def _name(source: Source) -> Reading[str]:
    if not (yield from source.starts('"')):
        raise Malformed
    parts: list[str] = []

    def keep(text: str) -> None:
        parts.append(text)

    yield from read_string(source, keep)
    if sum(map(len, parts)) > NAME_CHARS:
        raise Malformed
    return parse_key("".join(parts))


def _arguments(source: Source, calls: Calls) -> Reading[str]:
    """Arguments of the open call, as an object or as a string that holds one; returns what is not empty."""
    if (yield from source.see(1)) == "{":
        yield from read_arguments(source, calls)
    else:
        whole_arguments((yield from _object_text(source)), calls)
    return "{}"


def _object_text(source: Source) -> Reading[str]:
    """The text of an object, out of a string where it stands in one; "{}" for null. Raises Malformed."""
    text = yield from read_value(source)
    if text.startswith('"'):
        text = parse_key(text[1:-1]).strip() or "{}"
    if text == "null":
        text = "{}"
    try:
        known = parse_json(text)
    except ValueError:
        raise Malformed from None
    if not isinstance(known, dict):
        raise Malformed
    return text
