"""The contract of every chat format: what the family writes reads back, however the stream is cut, and
nothing a model may write is lost or raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

from attrs import frozen

from luce_core.contracts import (
    ChatContext,
    ChatEvent,
    ChatFormat,
    ChatTurn,
    ContentDelta,
    ReasoningDelta,
    ToolArgsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from luce_core.registry import resolve
from luce_core.testing.contract import Contract
from luce_core.testing.plugin import registry_of

Call = tuple[str, Mapping[str, Any]]

TOOLS: Mapping[str, Mapping[str, Any]] = {
    "write_file": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
        "required": ["path", "text"],
    },
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "number"}, "exact": {"type": "boolean"}},
    },
    "look-up": {
        "type": "object",
        "properties": {
            "where": {"type": "object"},
            "names": {"type": "array", "items": {"type": "string"}},
            "limit": {"type": ["integer", "null"]},
        },
    },
    "ping": {"type": "object", "properties": {}},
}
PIECES = (
    "a", "word", " ", "  ", "\n", "\n\n", "\t", '"', "'", "\\", "\\n", "<", ">", "</", "{", "}", "[", "]",
    ":", ",", "=", "é", "日本", "🙂", "\u2028", "5", "true", "null", "<p>text</p>", "call:x{",
    "<function", '{"name": "add"}',
)  # fmt: skip
WORDS = ("I", " see", ".", "\n", " 2 < 3", " and", " so", "\n\n", " é", " 🙂", " <b>", " {", "}", '"')


@frozen
class Read:
    """What a parser made of a text."""

    events: tuple[ChatEvent, ...]
    """Adjacent pieces joined."""
    pieces: tuple[ChatEvent, ...]
    """As they came."""
    over: bool

    def text(self, kind: type[ContentDelta] | type[ReasoningDelta]) -> str:
        """All content, or all thoughts."""
        return "".join(event.text for event in self.events if isinstance(event, kind))

    def calls(self) -> list[Call]:
        """Name and arguments of every call that is whole."""
        names = {event.index: event.name for event in self.events if isinstance(event, ToolCallStart)}
        whole = [event.index for event in self.events if isinstance(event, ToolCallEnd) and event.complete]
        return [(names[index], json.loads(self.arguments(index))) for index in whole]

    def arguments(self, index: int) -> str:
        """The text of a call's arguments."""
        deltas = (event for event in self.events if isinstance(event, ToolArgsDelta))
        return "".join(event.text for event in deltas if event.index == index)


def read(
    format: ChatFormat,
    pieces: Sequence[str],
    *,
    tools: Mapping[str, Mapping[str, Any]] = TOOLS,
    tail: str = "",
    cut: bool = False,
) -> Read:
    """Parse a text that comes in these pieces. Fails where the order of the events is not the contract's."""
    ids = iter(range(10**6))
    parser = format.parser(ChatTurn(tail, tools, lambda: f"call-{next(ids)}"))
    events: list[ChatEvent] = []
    for piece in pieces:
        if parser.over:
            break
        events += parser.push(piece)
    if not parser.over:
        events += parser.finish(cut)
    joined: list[ChatEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, ContentDelta | ReasoningDelta) and type(event) is type(last):
            joined[-1] = type(event)(last.text + event.text)
        elif isinstance(event, ToolArgsDelta) and isinstance(last, ToolArgsDelta):
            joined[-1] = ToolArgsDelta(event.index, last.text + event.text)
        else:
            joined.append(event)
    check_order(joined, tools)
    return Read(tuple(joined), tuple(events), parser.over)


def check_order(events: Sequence[ChatEvent], tools: Mapping[str, Any]) -> None:
    """Calls of declared tools, counted from 0, one after the other, each with one JSON object and one end."""
    running: int | None = None
    started = 0
    arguments = ""
    for event in events:
        if isinstance(event, ToolCallStart):
            assert running is None, f"call {event.index} starts within another: {events}"
            assert event.index == started, f"call {event.index} comes where {started} would: {events}"
            assert event.name in tools, f"{event.name!r} is none of {sorted(tools)}"
            running, arguments = event.index, ""
            started += 1
        elif isinstance(event, ToolArgsDelta | ToolCallEnd):
            assert event.index == running, f"{event} while call {running} runs: {events}"
            if isinstance(event, ToolArgsDelta):
                arguments += event.text
            else:
                assert isinstance(json.loads(arguments), dict), f"arguments are {arguments!r}"
                running = None
        else:
            assert running is None, f"{event} within a call: {events}"
            assert event.text, f"an empty piece of text: {events}"
    assert running is None, f"a call never ends: {events}"


def check_covered(text: str, got: Read, silent: Sequence[str]) -> None:
    """All that was read stands in the text, in order, with nothing between but space and silent tags."""
    gap = r"(?:\s|" + "|".join(map(re.escape, sorted(silent, key=len, reverse=True))) + ")*"
    said = [
        event.raw if isinstance(event, ToolCallEnd) else event.text
        for event in got.pieces
        if isinstance(event, ContentDelta | ReasoningDelta | ToolCallEnd)
    ]
    pattern = gap + "".join(re.escape(one) + gap for one in said)
    assert re.fullmatch(pattern, text), f"{text!r} is not covered by {said}"


class ChatFormatContract(Contract):
    """One chat format, as its factory makes it."""

    hooks: str
    """The plugin's module of hooks."""
    name: str
    """The part's name in its `PartSpec`."""
    template: str
    """A template of the family, or as much of one as tells the factory which format to make."""
    tokens: tuple[str, ...] = ()
    """Tokens of the vocabulary the factory asks for."""
    unwritable: tuple[str, ...] = ()
    """What a string argument cannot hold, since the family's syntax ends it there."""
    silent: tuple[str, ...] = ("<think>", "</think>")
    """Tags that are neither content nor part of a call. The format may drop them, and space; nothing else."""
    open_tail: str = ""
    """End of a prompt that leaves a thought open; "" = the family's prompts never do."""

    def write_calls(self, calls: Sequence[Call]) -> str:
        """The calls as the family's template writes them. Arguments are JSON values."""
        raise NotImplementedError

    def write_thought(self, thought: str) -> str:
        """A thought as the model writes it where an answer begins, up to the content; "" for none."""
        raise NotImplementedError

    # --- what is written reads back

    def test_what_the_family_writes_reads_back(self) -> None:
        format = self._format()
        for calls, thought, content in self._answers(60):
            text = self.write_thought(thought) + content + self.write_calls(calls)
            got = read(format, [text])
            assert got.calls() == calls, text
            assert got.text(ReasoningDelta) == (thought if self.write_thought(thought) else ""), text
            assert got.text(ContentDelta) == (content.rstrip() if calls else content), text

    def test_a_thought_the_prompt_opened_goes_on(self) -> None:
        if not self.open_tail:
            return
        format = self._format()
        for calls, thought, content in self._answers(10):
            opening, closed = self.write_thought("x").split("x")
            got = read(format, [thought + closed + content + self.write_calls(calls)], tail=self.open_tail)
            assert (got.text(ReasoningDelta), got.calls()) == (thought, calls), (opening, thought)
        parser = format.parser(ChatTurn(self.open_tail, TOOLS))
        assert parser.thinking
        parser.push(closed + "x")
        assert not parser.thinking

    def test_a_long_string_streams_before_its_end(self) -> None:
        text = self.write_calls([("write_file", {"path": "a", "text": "x" * 400 + "END"})])
        parser = self._format().parser(ChatTurn("", TOOLS))
        events = parser.push(text[: text.index("END")])
        sent = "".join(event.text for event in events if isinstance(event, ToolArgsDelta))
        assert "x" * 300 in sent, f"{len(sent)} characters were sent: {sent[-40:]!r}"

    # --- however the stream is cut

    def test_any_cut_of_the_stream_gives_the_same_events(self) -> None:
        format = self._format()
        dice = Random(3)
        for text in self._texts(dice, 40):
            whole = read(format, [text])
            assert read(format, list(text)).events == whole.events, text
            for _ in range(6):
                assert read(format, list(_cut(dice, text))).events == whole.events, text

    def test_every_single_cut_gives_the_same_events(self) -> None:
        format = self._format()
        for calls, thought, content in self._answers(3):
            text = self.write_thought(thought) + content + self.write_calls(calls)
            whole = read(format, [text])
            for at in range(len(text)):
                assert read(format, [text[:at], text[at:]]).events == whole.events, (text[:at], text[at:])

    # --- what a model may write

    def test_no_text_raises_and_none_is_lost(self) -> None:
        format = self._format()
        dice = Random(7)
        for text in self._texts(dice, 250):
            for cut in (False, True):
                got = read(format, [text], cut=cut)
                if not got.over:
                    check_covered(text, got, self.silent)

    def test_a_call_cut_short_is_not_whole(self) -> None:
        format = self._format()
        text = self.write_calls([("write_file", {"path": "a", "text": "some text"})])
        for at in range(text.index("some text") + 4):
            assert read(format, [text[:at]], cut=True).calls() == [], text[:at]

    def test_without_tools_calls_are_text(self) -> None:
        format = self._format()
        for calls, _, content in self._answers(20):
            text = content + self.write_calls(calls)
            assert read(format, [text], tools={}).events == (ContentDelta(text),)

    def test_a_tool_nobody_declared_is_text(self) -> None:
        format = self._format()
        text = self.write_calls([("write_file", {"path": "a", "text": "b"})])
        assert read(format, [text], tools={"ping": {}}).events == (ContentDelta(text),)

    # --- what the tests are made of

    def _format(self) -> ChatFormat:
        part = registry_of(self.hooks).part("chat", self.name)
        factory = resolve(part.value.factory, f"Chat {self.name!r}")
        format: ChatFormat = factory(ChatContext(None, _Vocabulary(self.tokens), self.template))
        assert format is not None, f"{part.value.factory} does not know its own family"
        return format

    def _answers(self, count: int) -> Iterator[tuple[list[Call], str, str]]:
        """Calls, thought, content."""
        dice = Random(11)
        for _ in range(count):
            calls = [self._call(dice) for _ in range(dice.randrange(1, 4))]
            content = "".join(dice.choices(WORDS, k=dice.randrange(6))).strip("\n")
            yield calls, self._thought(dice), content if content.strip() else ""

    def _thought(self, dice: Random) -> str:
        return "Hm " + "".join(dice.choices(WORDS, k=dice.randrange(9))).rstrip() + "."

    def _call(self, dice: Random) -> Call:
        def string() -> str:
            parts = (*PIECES, *(tag[:-1] for tag in self.unwritable))
            while True:
                text = "".join(dice.choices(parts, k=dice.randrange(12)))
                if not any(tag in text for tag in self.unwritable):
                    return text

        def value(depth: int = 0) -> Any:
            plain = [None, True, False, 0, -7, 12345678901234567890, 1.5, -2e-9, string()]
            nested = [{string(): value(3) for _ in range(2)}, [value(3), value(3)]] if depth < 2 else []
            return dice.choice([*plain, *nested])

        arguments: dict[str, dict[str, Any]] = {
            "write_file": {"path": string(), "text": string()},
            "add": {
                "a": dice.randrange(-99, 99),
                "b": dice.choice([0.5, 3, -1e30]),
                "exact": dice.random() < 0.5,
            },
            "look-up": {
                "where": {f"k{index}": value() for index in range(dice.randrange(3))},
                "names": [string() for _ in range(dice.randrange(3))],
                "limit": dice.choice([None, 3]),
            },
            "ping": {},
        }
        name = dice.choice(list(arguments))
        kept = {key: item for key, item in arguments[name].items() if dice.random() < 0.9}
        return name, kept

    def _texts(self, dice: Random, count: int) -> Iterator[str]:
        """Answers as they should be and broken ones: cut off, with pieces lost, doubled, swapped."""
        tags = [*self._format().markers, *self.unwritable, *self.silent]
        for calls, thought, content in self._answers(count):
            text = self.write_thought(thought) + content + self.write_calls(calls)
            if dice.random() < 0.3:
                text = content + text + " and more"
            for _ in range(dice.randrange(4)):
                start = dice.randrange(len(text) + 1)
                end = min(len(text), start + dice.randrange(12))
                put = dice.choice(["", text[start:end] * 2, dice.choice(tags), dice.choice(PIECES)])
                text = text[:start] + put + text[end:]
            yield text[: dice.randrange(len(text) + 1)] if dice.random() < 0.3 else text


def _cut(dice: Random, text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        size = dice.randrange(1, 9)
        yield text[at : at + size]
        at += size


class _Vocabulary:
    """As much of a tokenizer as a factory may ask."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._ids = {text: index for index, text in enumerate(tokens)}

    def token_id(self, text: str) -> int | None:
        return self._ids.get(text)
