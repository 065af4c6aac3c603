"""One streamed answer as a client saw it: what came when, and how it ended. Pure; time is given."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from attrs import frozen

from luce_core.bench.sse import Event, EventParser

End = Literal["ok", "rejected", "status", "error", "cut", "garbage", "empty", "timeout", "no stream"]
"""How a request ended. ok: whole. rejected: 429. status: any other HTTP status. error: the stream said so.
cut: it broke off. garbage: no events of this API. empty: no token came. no stream: answered in one piece.
"""
TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")
"""Fields of a delta that carry tokens."""
SHOWN_CHARS = 120


@frozen
class Answer:
    """What became of one request. Times in seconds."""

    end: End
    reason: str = ""
    sent_s: float = 0.0
    ended_s: float = 0.0
    chunks_s: tuple[float, ...] = ()
    """When each chunk with text came."""
    prompt_tokens: int | None = None
    usage_tokens: int | None = None
    """What the server says it generated; None when it does not say."""

    @property
    def tokens(self) -> int:
        """Generated tokens: the server's own count, else one per chunk."""
        return len(self.chunks_s) if self.usage_tokens is None else self.usage_tokens

    @property
    def ttft_s(self) -> float | None:
        """From the request to the first chunk with text."""
        return self.chunks_s[0] - self.sent_s if self.chunks_s else None

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Between chunks with text."""
        return tuple(after - before for before, after in zip(self.chunks_s, self.chunks_s[1:], strict=False))

    @property
    def tokens_s(self) -> float | None:
        """Tokens per second after the first chunk; None where one chunk is all there is."""
        if len(self.chunks_s) < 2:
            return None
        spent = self.chunks_s[-1] - self.chunks_s[0]
        return (self.tokens - 1) / spent if spent > 0 and self.tokens > 1 else None


class Timeline:
    """Folds the bytes of one answer. `feed` until `over` or the stream ends, then `answer`."""

    def __init__(self, sent_s: float) -> None:
        self.sent_s = sent_s
        self.over = False
        self._parser = EventParser()
        self._chunks: list[float] = []
        self._usage: Mapping[str, Any] = {}
        self._finished = False
        self._problem: tuple[End, str] | None = None

    def feed(self, now_s: float, data: bytes) -> None:
        """Bytes that came at `now_s`."""
        try:
            events = self._parser.feed(data)
        except ValueError as error:
            self._fail("garbage", str(error))
            return
        for event in events:
            self._take(now_s, event)

    def answer(self, now_s: float) -> Answer:
        """The stream ended at `now_s`."""
        if not self.over:
            for event in self._parser.close():
                self._take(now_s, event)
        if self._problem is not None:
            end, reason = self._problem
        elif not self._finished:
            end, reason = "cut", f"the stream ended after {len(self._chunks)} chunks, without a finish"
        elif not self._chunks:
            end, reason = "empty", "the answer has no text"
        else:
            end, reason = "ok", ""
        return Answer(
            end=end,
            reason=reason,
            sent_s=self.sent_s,
            ended_s=now_s,
            chunks_s=tuple(self._chunks),
            prompt_tokens=_count(self._usage, "prompt_tokens"),
            usage_tokens=_count(self._usage, "completion_tokens"),
        )

    def _fail(self, end: End, reason: str) -> None:
        self._problem = self._problem or (end, reason)
        self.over = True

    def _take(self, now_s: float, event: Event) -> None:
        if self.over:
            return
        if event.data.strip() == "[DONE]":
            self._finished = self.over = True
            return
        try:
            body = json.loads(event.data)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            self._fail("garbage", f"an event that is no JSON object: {event.data[:SHOWN_CHARS]!r}")
        elif body.get("error") or event.name == "error":
            self._fail("error", error_message(body))
        else:
            self._chunk(now_s, body)

    def _chunk(self, now_s: float, body: Mapping[str, Any]) -> None:
        if isinstance(body.get("usage"), dict):
            self._usage = body["usage"]
        choices = body.get("choices") or ()
        if not isinstance(choices, list | tuple) or not all(isinstance(item, dict) for item in choices):
            self._fail("garbage", f"'choices' is {str(choices)[:SHOWN_CHARS]!r}, wanted a list of objects")
            return
        if any(_has_text(choice) for choice in choices):
            self._chunks.append(now_s)
        if any(choice.get("finish_reason") for choice in choices):
            self._finished = True


def _has_text(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    return bool(choice.get("text")) or (isinstance(delta, dict) and any(delta.get(name) for name in TEXTS))


def _count(usage: Mapping[str, Any], name: str) -> int | None:
    value = usage.get(name)
    return value if type(value) is int and value >= 0 else None


def error_message(body: Any) -> str:
    """What a server says went wrong, in whichever of the usual shapes."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[: 2 * SHOWN_CHARS]
