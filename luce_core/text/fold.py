"""Token events folded into text events: the one place where ids become text for every API format."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal

from luce_core.contracts import (
    ChatEvent,
    ChatParser,
    ContentDelta,
    Done,
    EngineEvent,
    Failure,
    Finish,
    Heartbeat,
    Logprobs,
    Progress,
    PromptLogprobs,
    ReasoningDelta,
    TextEvent,
    TokenLogprob,
    Tokens,
    ToolArgsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from luce_core.text.detokenizer import Detokenizer
from luce_core.text.stops import StopMatcher

if TYPE_CHECKING:
    from luce_core.text.tokenizer import Tokenizer


FAILED = 500
TextReason = Literal["stop", "length", "tool_calls", "cancelled"]
LATE = 504  # what a gateway says when whoever it asked did not answer in time


class TextFold:
    """Folds the events of one request. Pure: feeding equal tokens in any split gives the same text.

    Ids become text, a chat parser tells thoughts and calls from content, and stop strings are looked for in
    the content alone.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        eog: frozenset[int] = frozenset(),
        parser: ChatParser | None = None,
        visible: Collection[int] = (),
        one_call: bool = False,
    ) -> None:
        """parser: None = all text is content. visible: special tokens it must see.

        one_call: the first call ends the answer.
        """
        self._detokenizer = Detokenizer(tokenizer, visible=visible)
        self._matcher = StopMatcher(stops)
        self._eog = eog
        self._parser = parser
        self._one_call = one_call
        self._tokens = 0
        self._thought = 0
        self._calls = 0
        self._whole = True
        self._ending: TokenLogprob | None = None
        self.over = False
        """The answer has ended by its text. The caller then cancels the request; `Done` still comes."""

    @property
    def stopped(self) -> str | None:
        """The stop string that was found."""
        return self._matcher.matched

    def feed(self, event: EngineEvent) -> list[TextEvent]:
        """The text events of one engine event."""
        if isinstance(event, Tokens):
            return self._take(event)
        if isinstance(event, Progress):
            return [Heartbeat(event.phase, event.done, event.total)]
        if isinstance(event, PromptLogprobs):
            return [event]
        return self._end(event)

    def _take(self, event: Tokens) -> list[TextEvent]:
        events: list[TextEvent] = []
        for position, token in enumerate(event.ids):
            if self.over:
                break
            self._tokens += 1
            if token not in self._eog:
                events += self._read(self._detokenizer.push([token]))
            if event.logprobs and token in self._eog:
                self._ending = event.logprobs[position]
            elif event.logprobs:
                events.append(Logprobs(event.logprobs[position : position + 1]))
        return _joined(events)

    def _read(self, text: str) -> list[TextEvent]:
        """What one token's text becomes."""
        parser = self._parser
        if parser is None:
            return self._shown([ContentDelta(text)])
        thinking = parser.thinking
        events = self._shown(parser.push(text))
        self._thought += thinking or parser.thinking
        self.over = self.over or parser.over
        return events

    def _shown(self, events: Sequence[ChatEvent]) -> list[TextEvent]:
        """Content up to a stop string, and whatever else comes before it."""
        shown: list[TextEvent] = []
        for event in events:
            if isinstance(event, ContentDelta):
                text = self._matcher.push(event.text)
                self.over = self.stopped is not None
            else:
                text = self._matcher.flush()  # no stop string reaches across a thought or a call
            if text:
                shown.append(ContentDelta(text))
            if self.over:
                break
            if not isinstance(event, ContentDelta):
                shown.append(event)
            if isinstance(event, ToolCallStart):
                self._calls += 1
            elif isinstance(event, ToolCallEnd):
                self._whole = self._whole and event.complete
                self.over = self._one_call
            if self.over:
                break
        return shown

    def _end(self, done: Done) -> list[TextEvent]:
        if done.reason == "error":
            status = LATE if done.late else FAILED
            return [Failure(done.error or "The engine failed without saying why.", status)]
        events: list[TextEvent] = []
        finished = self.over
        if not finished:
            tail = self._detokenizer.flush()
            parsed: list[ChatEvent] = [ContentDelta(tail)]
            if self._parser is not None:
                parsed = [*self._parser.push(tail), *self._parser.finish(cut=done.reason != "stop")]
            events = self._shown(parsed)
            if not self.over and (rest := self._matcher.flush()):
                events.append(ContentDelta(rest))
        usage = dict(done.usage)
        usage["completion_tokens"] = self._tokens  # tokens decided behind a stop string are not the answer
        usage["reasoning_tokens"] = self._thought
        reason: TextReason = "stop" if finished or self.stopped is not None else done.reason
        if reason == "stop" and self.stopped is None and self._calls and self._whole:
            reason = "tool_calls"
        return [*_joined(events), Finish(reason, usage, done.timings, self.stopped, done.aside, self._ending)]


def _joined(events: list[TextEvent]) -> list[TextEvent]:
    """Adjacent pieces of the same text as one, unless logprobs stand between them."""
    joined: list[TextEvent] = []
    for event in events:
        both = merged(joined[-1], event) if joined else None
        if both is None:
            joined.append(event)
        else:
            joined[-1] = both
    return joined


def merged(last: TextEvent, event: TextEvent) -> TextEvent | None:
    """Two adjacent pieces of the same text as one; None where they are not."""
    if isinstance(event, ContentDelta) and isinstance(last, ContentDelta):
        return ContentDelta(last.text + event.text)
    if isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
        return ReasoningDelta(last.text + event.text)
    if isinstance(event, ToolArgsDelta) and isinstance(last, ToolArgsDelta) and last.index == event.index:
        return ToolArgsDelta(event.index, last.text + event.text)
    return None
