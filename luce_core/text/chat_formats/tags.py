"""The parser every family shares: thoughts between tags, content, calls in the family's syntax."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import Factory, frozen

from luce_core.contracts import (
    ChatEvent,
    ChatTurn,
    ContentDelta,
    ReasoningDelta,
    Segment,
    Thinking,
)
from luce_core.text.chat_formats.calls import Calls, CallSyntax, Malformed
from luce_core.text.chat_formats.source import SPACE, Reading, Source

EFFORTS = ("none", "minimal", "low", "medium", "high", "x-high", "xhigh", "max")
"""What a request may ask for; "none" turns thinking off."""

Renderer = Callable[
    [Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None, Mapping[str, Any]], Sequence[Segment]
]
"""Messages, tools, template arguments -> the prompt."""


@frozen
class Thought:
    """How a family marks its thoughts."""

    open: str = "<think>"
    close: str = "</think>"
    label: str = ""
    """What may stand behind the opening tag and is no thought."""
    trim: str = "\n"
    """Characters that belong to the tags: around the thought and before the content behind it."""
    anywhere: bool = False
    """Tags are no text anywhere in an answer; else only where it, or what follows a call, begins."""


@frozen
class TagFormat:
    """A chat format made of tags. Most families are one of these, given as data."""

    name: str
    thought: Thought | None = Factory(Thought)
    calls: tuple[CallSyntax, ...] = ()
    """Tried in order where several begin alike."""
    ends: tuple[str, ...] = ()
    """Text at which a turn is over, where a model spells its end as text."""
    more_markers: tuple[str, ...] = ()
    switch: str = "enable_thinking"
    """Variable of the template that says whether to think; `off` and `on` are its values."""
    off: Any = False
    on: Any = True
    efforts: Mapping[str, str] | None = None
    """What each effort is called in the template; None = as it is. One that is missing is not handed on."""
    renderer: Renderer | None = None
    """Makes the prompts where a template cannot."""

    @property
    def renders(self) -> bool:
        return self.renderer is not None

    @property
    def markers(self) -> tuple[str, ...]:
        """Every tag, since any may be a token of its own."""
        thought = (self.thought.open, self.thought.close) if self.thought else ()
        openers = [opener for syntax in self.calls for opener in syntax.openers]
        return tuple(dict.fromkeys([*thought, *openers, *self.ends, *self.more_markers]))

    def parser(self, turn: ChatTurn) -> TagParser:
        return TagParser(self, turn)

    def template_kwargs(self, thinking: Thinking) -> Mapping[str, Any]:
        """The switch; an effort other than none turns it on."""
        kwargs: dict[str, Any] = {}
        effort = thinking.effort
        enabled = thinking.enabled
        if effort is not None:
            enabled = effort != "none" if enabled is None else enabled
            named = effort if self.efforts is None else self.efforts.get(effort)
            if named is not None and effort != "none":
                kwargs["reasoning_effort"] = named
        if enabled is not None:
            kwargs[self.switch] = self.on if enabled else self.off
        return kwargs

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> Sequence[Segment] | None:
        """What the renderer makes; without one, None: the template renders."""
        return self.renderer(messages, tools, kwargs) if self.renderer else None


class TagParser:
    """Reads one answer of a `TagFormat`."""

    def __init__(self, format: TagFormat, turn: ChatTurn) -> None:
        thought = format.thought
        self._format = format
        self._source = Source()
        self._events: list[ChatEvent] = []
        self._calls = Calls(turn, self._emit, self._source)
        self._syntaxes = format.calls if turn.tools else ()
        self._space = ""  # read, and said only when something follows that is no tag
        self._said = False  # content since the last call
        openers = [(one, syntax.at_start) for syntax in self._syntaxes for one in syntax.openers]
        tags = (thought.open, thought.close) if thought else ()
        anywhere = [one for one, at_start in openers if not at_start]
        anywhere += tags if thought and thought.anywhere else ()
        self._anywhere = tuple(dict.fromkeys([*anywhere, *format.ends]))
        self._leading = tuple(dict.fromkeys([*self._anywhere, *tags, *(one for one, _ in openers)]))
        opened = thought is not None and turn.tail.rstrip().endswith(thought.open + thought.label)
        self.thinking = opened
        self.over = False
        self._running = self._answer(opened)

    def push(self, text: str) -> list[ChatEvent]:
        self._source.push(text)
        return self._run()

    def finish(self, cut: bool = False) -> list[ChatEvent]:
        self._source.final = True
        self._calls.cut = cut
        return self._run()

    def _run(self) -> list[ChatEvent]:
        next(self._running, None)
        events, self._events = self._events, []
        return events

    def _emit(self, event: ChatEvent) -> None:
        self._events.append(event)

    # --- the answer

    def _answer(self, opened: bool) -> Reading[None]:
        if opened:
            yield from self._think()
        while not self.over:
            found = yield from self._lead()
            if not found:
                found = yield from self._source.until(self._anywhere, self._say)
            if not found:
                break
            yield from self._tag(found)
        if self._said or not self._calls.count:
            self._flush()

    def _lead(self) -> Reading[str]:
        """Where the answer begins, or goes on behind a tag: tags that are text elsewhere count."""
        if self._said:
            return ""
        self._space += yield from self._source.skip()
        return (yield from self._source.starts(*self._leading))

    def _tag(self, found: str) -> Reading[None]:
        thought = self._format.thought
        if found in self._format.ends:
            self._drop()
            self.over = True
        elif thought and found == thought.open:
            self._drop()
            self._said = False
            yield from self._think()
        elif thought and found == thought.close:  # there is nothing to close
            if self._said:
                self._flush()
            else:
                self._drop()
                yield from self._source.skip(thought.trim)
        else:
            yield from self._call(found)

    def _think(self) -> Reading[None]:
        thought = self._format.thought
        if thought is None:
            raise AssertionError("a thought without tags for it")
        self.thinking = True
        yield from self._source.starts(thought.label)
        yield from self._source.skip(thought.trim)
        held = ""

        def think(text: str) -> None:
            nonlocal held
            text = held + text
            kept = text.rstrip(thought.trim) if thought.trim else text
            held = text[len(kept) :]
            if kept:
                self._emit(ReasoningDelta(kept))

        yield from self._source.until((thought.close,), think)
        self.thinking = False
        yield from self._source.skip(thought.trim)

    def _call(self, opener: str) -> Reading[None]:
        source, calls = self._source, self._calls
        self._space, calls.space = "", self._space
        before = calls.count
        for syntax in self._syntaxes:
            if opener not in syntax.openers:
                continue
            source.mark(opener)
            try:
                yield from syntax.read(opener, source, calls)
            except Malformed:
                if calls.open:
                    calls.end(complete=False)
                source.rewind()
            if calls.count > before:
                source.kept()
                self._said = False
                return
            source.take(len(opener))
        self._space, calls.space = calls.space, ""
        self._say(opener)

    # --- content

    def _say(self, text: str) -> None:
        text = self._space + text
        kept = text.rstrip(SPACE)
        self._space = text[len(kept) :]
        if kept:
            self._said = True
            self._emit(ContentDelta(kept))

    def _drop(self) -> None:
        self._space = ""

    def _flush(self) -> None:
        if self._space:
            self._emit(ContentDelta(self._space))
            self._space = ""
