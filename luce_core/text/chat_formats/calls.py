"""Calls while they are read: started, written as JSON piece by piece, ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from json.encoder import encode_basestring
from typing import Any, Protocol

from luce_core.contracts import ChatEvent, ChatTurn, ToolArgsDelta, ToolCallEnd, ToolCallStart
from luce_core.text.chat_formats.schema import (
    ANY,
    Types,
    argument_schema,
    from_text,
    from_value,
    parse_json,
)
from luce_core.text.chat_formats.source import Reading, Source

NAME_CHARS = 256
"""A name longer than this is none: text is not held for ever in the hope of its end."""
STRING: Types = frozenset({"string"})


class Malformed(Exception):
    """What is being read is no call, or none that can go on."""


class CallSyntax(Protocol):
    """How a family writes calls. Plain data."""

    @property
    def openers(self) -> tuple[str, ...]:
        """What a call begins with; the parser looks for these."""
        ...

    @property
    def at_start(self) -> bool:
        """Only where the answer, or what follows a thought or a call, begins."""
        ...

    def read(self, opener: str, source: Source, calls: Calls) -> Reading[None]:
        """Read one call, or a block of them, behind `opener`. Raises Malformed; the parser then goes back to
        the opener, or behind the last call that ended, or ends the call that has started.
        """
        ...


class Calls:
    """The calls of one answer, as events."""

    def __init__(self, turn: ChatTurn, emit: Callable[[ChatEvent], None], source: Source) -> None:
        self._turn = turn
        self._emit = emit
        self._source = source
        self._schema: Any = {}
        self._members = 0
        self._in_string = False
        self.count = 0
        """Those that have started."""
        self.open = False
        self.cut = False
        """The text ended from outside; see `ChatParser.finish`."""
        self.space = ""
        """What stands between the text before and the call."""

    # --- a call

    def knows(self, name: str) -> bool:
        """Whether a tool of this name is declared."""
        return name in self._turn.tools

    def begin(self, name: str) -> None:
        """A call of a declared tool. Raises Malformed for any other name."""
        schema = self._turn.tools.get(name)
        if schema is None:
            raise Malformed
        self._schema, self._members, self.open = schema, 0, True
        self._emit(ToolCallStart(self.count, self._turn.new_id(), name))
        self.count += 1

    def end(self, complete: bool = True) -> None:
        """The call ends; what is read from here on belongs to the next."""
        if self._in_string:
            self.end_string()
        self._write("}" if self._members else "{}")
        raw = self.space + self._source.kept()
        self._source.mark()
        self.space, self.open = "", False
        self._emit(ToolCallEnd(self.count - 1, raw, complete))

    def end_of_text(self) -> None:
        """The text ended where the call could: a call, if the model ended it. Raises Malformed."""
        if self.cut:
            raise Malformed

    # --- its arguments

    def types(self, key: str) -> Types:
        """What the tool says of an argument."""
        return argument_schema(self._schema, key)

    def value(self, key: str, value: Any) -> None:
        """A whole argument."""
        self._key(key)
        self._write(json.dumps(value, ensure_ascii=False))

    def begin_string(self, key: str) -> None:
        """An argument that comes in pieces."""
        self._key(key)
        self._write('"')
        self._in_string = True

    def text(self, text: str) -> None:
        """More of the string."""
        self._write(encode_basestring(text)[1:-1])

    def escaped(self, text: str) -> None:
        """More of the string, in JSON already."""
        self._write(text)

    def end_string(self) -> None:
        """The end of the string."""
        self._in_string = False
        self._write('"')

    def bare(self, key: str, source: Source, closers: tuple[str, ...]) -> Reading[str]:
        """Read an argument written as bare text -> the one of `closers` behind it, or raises Malformed."""
        if self.types(key) == STRING:
            self.begin_string(key)
            closer = yield from source.until(closers, self.text)
            if not closer:
                raise Malformed
            self.end_string()
            return closer
        parts: list[str] = []
        closer = yield from source.until(closers, parts.append)
        if not closer:
            raise Malformed
        self.value(key, from_text("".join(parts), self.types(key)))
        return closer

    def json(self, key: str, text: str) -> None:
        """A whole argument, as JSON text. Raises Malformed."""
        try:
            value = parse_json(text)
        except ValueError:
            raise Malformed from None
        self.value(key, from_value(value, self.types(key), text))

    def streams_quoted(self, key: str) -> bool:
        """Whether an argument the model wrote as a string can only be one."""
        types = self.types(key)
        return types == ANY or "string" in types

    def _key(self, key: str) -> None:
        self._write(("{" if not self._members else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._members += 1

    def _write(self, text: str) -> None:
        if text:
            self._emit(ToolArgsDelta(self.count - 1, text))


def name_until(source: Source, closers: tuple[str, ...]) -> Reading[tuple[str, str]]:
    """Read a name of one line up to one of `closers` -> (name, closer), or raises Malformed."""
    seen = ""
    while True:
        more = yield from source.see(len(seen) + 1)
        if len(more) == len(seen) or len(more) > NAME_CHARS:
            raise Malformed
        seen = more
        closer = max((one for one in closers if seen.endswith(one)), key=len, default="")
        if closer:
            break
    name = seen.removesuffix(closer).strip()
    if not name or "\n" in name:
        raise Malformed
    source.take(len(seen))
    return name, closer
