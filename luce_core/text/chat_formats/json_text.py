"""JSON read while it comes: what is a whole value, and a string's text before its end."""

from __future__ import annotations

import re
from collections.abc import Callable
from json.encoder import encode_basestring

from luce_core.text.chat_formats.calls import Calls, Malformed
from luce_core.text.chat_formats.schema import parse_json
from luce_core.text.chat_formats.source import SPACE, Reading, Source

MAX_DEPTH = 64
_BARE = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_CONTROL = re.compile(r"[\x00-\x1f]")


def expect(source: Source, literal: str) -> Reading[None]:
    """Read `literal`, behind any space. Raises Malformed."""
    yield from source.skip()
    if not (yield from source.starts(literal)):
        raise Malformed


def read_string(source: Source, emit: Callable[[str], None]) -> Reading[None]:
    """Behind the opening quote: the text as JSON escapes it, up to the closing quote. Raises Malformed at
    the end.

    Line breaks a model forgot to escape are escaped, escapes JSON does not know are taken literally, and
    half of a surrogate pair is U+FFFD.
    """

    def plain(text: str) -> None:
        emit(_CONTROL.sub(lambda found: encode_basestring(found.group())[1:-1], text))

    while True:
        found = yield from source.until(('"', "\\"), plain)
        if found == '"':
            return
        if not found:
            raise Malformed
        yield from _escape(source, emit)


def _escape(source: Source, emit: Callable[[str], None]) -> Reading[None]:
    kind = yield from source.see(1)
    if kind and kind in '"\\/bfnrt':
        emit("\\" + source.take(1))
        return
    if kind != "u":
        emit("\\\\")  # of no JSON escape: the backslash is a backslash, what follows is read as text
        return
    ahead = yield from source.see(5)
    if not _HEX.fullmatch(ahead[1:]):
        emit("\\\\")
        return
    code = int(ahead[1:], 16)
    if 0xD800 <= code < 0xDC00:
        pair = yield from source.see(11)
        if pair[5:7] == "\\u" and _HEX.fullmatch(pair[7:]) and 0xDC00 <= int(pair[7:], 16) < 0xE000:
            emit("\\" + source.take(11))
            return
    source.take(5)
    emit("\\ufffd" if 0xD800 <= code < 0xE000 else "\\" + ahead)


def read_value(source: Source, depth: int = 0) -> Reading[str]:
    """Read one value -> its text as JSON, whose numbers and words are not checked. Raises Malformed."""
    yield from source.skip()
    opened = yield from source.see(1)
    if opened == '"':
        return '"' + (yield from _quoted(source)) + '"'
    if opened and opened in "{[":
        source.take(1)
        if depth == MAX_DEPTH:
            raise Malformed
        return (yield from _nested(source, opened, depth))
    return (yield from read_word(source))


def read_word(source: Source) -> Reading[str]:
    """Read a number or a word -> its text; `True` is spelled `true`. Raises Malformed if none comes."""
    word = ""
    while (ahead := (yield from source.see(1))) and ahead in _BARE:
        word += source.take(1)
    if not word:
        raise Malformed
    return _PYTHON.get(word, word)


def _quoted(source: Source) -> Reading[str]:
    source.take(1)
    parts: list[str] = []
    yield from read_string(source, parts.append)
    return "".join(parts)


def _nested(source: Source, opened: str, depth: int) -> Reading[str]:
    closer = "}" if opened == "{" else "]"
    parts: list[str] = []
    yield from source.skip()
    if (yield from source.starts(closer)):
        return opened + closer
    while True:
        if opened == "{":
            yield from expect(source, '"')
            key: list[str] = []
            yield from read_string(source, key.append)
            yield from expect(source, ":")
            parts.append('"' + "".join(key) + '": ' + (yield from read_value(source, depth + 1)))
        else:
            parts.append((yield from read_value(source, depth + 1)))
        yield from source.skip()
        found = yield from source.starts(",", closer)
        if not found:
            raise Malformed
        if found == closer:
            return opened + ", ".join(parts) + closer


def read_key(source: Source) -> Reading[str]:
    """Read a key and its colon. Raises Malformed."""
    yield from expect(source, '"')
    parts: list[str] = []
    yield from read_string(source, parts.append)
    yield from expect(source, ":")
    return str(parse_key("".join(parts)))


def parse_key(escaped: str) -> str:
    """The text of a string as JSON escapes it. Raises Malformed."""
    try:
        return str(parse_json(f'"{escaped}"'))
    except ValueError:
        raise Malformed from None


def read_arguments(source: Source, calls: Calls) -> Reading[None]:
    """Read an object as the arguments of the call that is open. Raises Malformed."""
    yield from expect(source, "{")
    yield from source.skip()
    if (yield from source.starts("}")):
        return
    while True:
        key = yield from read_key(source)
        yield from source.skip()
        if (yield from source.see(1)) == '"' and calls.streams_quoted(key):
            source.take(1)
            calls.begin_string(key)
            yield from read_string(source, calls.escaped)
            calls.end_string()
        else:
            calls.json(key, (yield from read_value(source)))
        yield from source.skip()
        found = yield from source.starts(",", "}")
        if not found:
            raise Malformed
        if found == "}":
            return


def whole_arguments(text: str, calls: Calls) -> None:
    """An object whose text is known as the arguments of the open call. Raises Malformed."""
    held = Source()
    held.push(text)
    held.final = True
    for _ in read_arguments(held, calls):
        raise AssertionError("a reader waits for more although nothing more comes")
    if text.strip(SPACE) and not held.ended:
        for _ in held.skip():
            raise AssertionError("a reader waits for more although nothing more comes")
        if not held.ended:
            raise Malformed
