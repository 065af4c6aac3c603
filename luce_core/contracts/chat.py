"""How a family writes thoughts and tool calls: a `chat` part. Runs in the server, beside the engine.

A part's factory takes a `ChatContext` and returns a `ChatFormat`, or None where the file's template and
vocabulary show that it is not the format of this file; then the next one named is asked.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from attrs import Factory, frozen

from luce_core.contracts.events import ContentDelta, ReasoningDelta, ToolArgsDelta, ToolCallEnd, ToolCallStart

ChatEvent = ContentDelta | ReasoningDelta | ToolCallStart | ToolArgsDelta | ToolCallEnd


def new_call_id() -> str:
    """An id no other call has."""
    return f"call_{secrets.token_hex(12)}"


@frozen
class Segment:
    """A stretch of prompt text; only a trusted one may spell special tokens."""

    text: str
    trusted: bool


@frozen
class ChatTurn:
    """What is known before an answer begins."""

    tail: str = ""
    """The end of the rendered prompt: whether it left a thought open is read from it, not from flags."""
    tools: Mapping[str, Mapping[str, Any]] = Factory(dict)
    """Name -> JSON schema of its arguments. Without tools, what looks like a call is text."""
    new_id: Callable[[], str] = new_call_id


@frozen
class Thinking:
    """What a request says about thinking. None: nothing."""

    enabled: bool | None = None
    effort: str | None = None
    """One of `luce_core.text.chat_formats.EFFORTS`."""


class ChatParser(Protocol):
    """Text of one answer to events. One thread. Any split of the text gives the same events, adjacent deltas
    joined. Raises nothing, whatever the text: what is no call, or no whole one, is content.
    """

    thinking: bool
    """Whether what comes next belongs to a thought."""
    over: bool
    """The text said that the turn ends; nothing more is to be pushed."""

    def push(self, text: str) -> list[ChatEvent]:
        """What is certain after more text. A call starts when its name is closed and is a declared tool's.

        Its arguments may then come in pieces, which together are one JSON object.
        """
        ...

    def finish(self, cut: bool = False) -> list[ChatEvent]:
        """The rest. Every call that has started ends. cut: something else than the model ended the text."""
        ...


class ChatFormat(Protocol):
    """The format of one loaded file. Thread-safe: it keeps nothing between requests."""

    @property
    def name(self) -> str: ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens the parser must see, by their text; all others stay hidden."""
        ...

    @property
    def renders(self) -> bool:
        """Whether `render` makes the prompts, in place of a template."""
        ...

    def parser(self, turn: ChatTurn) -> ChatParser:
        """A parser for one answer."""
        ...

    def template_kwargs(self, thinking: Thinking) -> Mapping[str, Any]:
        """What the wish is called in the family's template."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> Sequence[Segment] | None:
        """The prompt of normalised messages, for families without a template; None = the template renders.

        Raises RequestError for messages the family cannot say.
        """
        ...
