"""Token events folded into text events: the one place where ids become text for every API format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from luce_core.contracts import (
    ContentDelta,
    Done,
    EngineEvent,
    Failure,
    Finish,
    Heartbeat,
    Logprobs,
    Progress,
    PromptLogprobs,
    TextEvent,
    TokenLogprob,
    Tokens,
)
from luce_core.text.detokenizer import Detokenizer
from luce_core.text.stops import StopMatcher

if TYPE_CHECKING:
    from luce_core.text.tokenizer import Tokenizer


FAILED = 500
LATE = 504  # what a gateway says when whoever it asked did not answer in time


class TextFold:
    """Folds the events of one request. Pure: feeding equal tokens in any split gives the same text."""

    def __init__(
        self, tokenizer: Tokenizer, *, stops: Sequence[str] = (), eog: frozenset[int] = frozenset()
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops)
        self._eog = eog
        self._tokens = 0
        self._ending: TokenLogprob | None = None
        self.stopped: str | None = None
        """The stop string that was found. The caller then cancels the request; `Done` still comes."""

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
        if self.stopped is not None:
            return []
        events: list[TextEvent] = []
        for position, token in enumerate(event.ids):
            self._tokens += 1
            text = "" if token in self._eog else self._matcher.push(self._detokenizer.push([token]))
            if text:
                events.append(ContentDelta(text))
            if event.logprobs and token in self._eog:
                self._ending = event.logprobs[position]
            elif event.logprobs:
                events.append(Logprobs(event.logprobs[position : position + 1]))
            self.stopped = self._matcher.matched
            if self.stopped is not None:
                break
        return _joined(events)

    def _end(self, done: Done) -> list[TextEvent]:
        if done.reason == "error":
            status = LATE if done.late else FAILED
            return [Failure(done.error or "The engine failed without saying why.", status)]
        events: list[TextEvent] = []
        if self.stopped is None:
            tail = self._matcher.push(self._detokenizer.flush())
            self.stopped = self._matcher.matched
            tail += "" if self.stopped is not None else self._matcher.flush()
            if tail:
                events.append(ContentDelta(tail))
        usage = dict(done.usage)
        usage["completion_tokens"] = self._tokens  # tokens decided behind a stop string are not the answer
        reason = "stop" if self.stopped is not None else done.reason
        return [*events, Finish(reason, usage, done.timings, self.stopped, done.aside, self._ending)]


def _joined(events: list[TextEvent]) -> list[TextEvent]:
    """Adjacent deltas as one, unless logprobs stand between them."""
    joined: list[TextEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, ContentDelta) and isinstance(last, ContentDelta):
            joined[-1] = ContentDelta(last.text + event.text)
        else:
            joined.append(event)
    return joined
