"""Calls as JSON objects with a name and arguments: between tags (Hermes, Qwen3), or bare (Llama 3)."""

from __future__ import annotations

from attrs import frozen

from luce_core.text.chat_formats.calls import Calls, Malformed
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
            yield from expect(source, "{")  # what is no call is read again, as text


def read_call(source: Source, calls: Calls) -> Reading[None]:
    """Behind the opening brace of a call: through its closing one. The call has begun and not ended.

    The arguments stream where the name comes before them. `{"function": {...}}` around both is accepted.
    Raises Malformed.
    """
    name = held = ""
    yield from source.skip()
    while True:
        key = yield from read_key(source)
        yield from source.skip()
        if key == "name" and not name:
            name = yield from _name(source, calls)
        elif key in ARGUMENTS and name and not calls.open and (yield from source.see(1)) == "{":
            calls.begin(name)
            yield from read_arguments(source, calls)
        elif key in ARGUMENTS and not held:
            held = yield from _object_text(source)
        elif key == "function" and not calls.open and (yield from source.see(1)) == "{":
            source.take(1)
            yield from read_call(source, calls)
        else:
            yield from read_value(source)  # an id, a type
        if name and held and not calls.open:
            calls.begin(name)
            whole_arguments(held, calls)
        yield from source.skip()
        found = yield from source.starts(",", "}")
        if not found:
            raise Malformed
        if found == "}":
            if not calls.open:
                calls.begin(name)
            return


def _name(source: Source, calls: Calls) -> Reading[str]:
    """Read the name of a declared tool. Raises Malformed."""
    if not (yield from source.starts('"')):
        raise Malformed
    parts: list[str] = []
    yield from read_string(source, parts.append)
    name = parse_key("".join(parts))
    if not calls.knows(name):
        raise Malformed
    return name


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
