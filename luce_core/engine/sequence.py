"""One request inside the engine: what it asked for, how far it is, and where its events go."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from luce_core.contracts import (
    Constraint,
    Done,
    EngineEvent,
    FinishReason,
    GenerationRequest,
    PromptLogprobs,
    SeqId,
    SeqView,
    TokenLogprob,
    Tokens,
)
from luce_core.engine.media import SequenceMedia


class Sequence:
    """Mutable state of one request. Engine thread only; `length` tokens have state, `anchor` is the newest
    token.
    """

    __slots__ = (
        "accepted",
        "admitted_s",
        "arrived_s",
        "aside",
        "cached",
        "cached_turn",
        "constraint",
        "context",
        "deadline_s",
        "drafted",
        "emitted",
        "finished",
        "first_s",
        "handle",
        "id",
        "keys",
        "late",
        "media",
        "nodes",
        "pinned",
        "prompt",
        "request",
        "retained",
        "scored",
        "sink",
        "tokens",
    )

    def __init__(
        self,
        seq: SeqId,
        request: GenerationRequest,
        sink: Callable[[EngineEvent], None],
        context: int,
        axes: int = 1,
    ) -> None:
        """axes: of a position, for a prompt with images."""
        self.id = seq
        self.request = request
        self.sink = sink
        self.context = context
        self.tokens = list(request.prompt)
        self.keys = list(request.keys or request.prompt)
        self.prompt = len(request.prompt)
        self.media = SequenceMedia(request.media, self.prompt, axes) if request.media else None
        self.constraint: Constraint | None = None
        """From the first admission on, where the request has one."""
        self.handle: SeqId | None = None
        self.cached = 0
        """Tokens of the prompt that were cached when it was first admitted."""
        self.cached_turn: bool | None = None
        """Whether they reach the end of an earlier answer; None while nobody has looked."""
        self.scored = 0
        """Rows of the prompt whose next token has been scored."""
        self.retained: int | None = None
        """What keeps its state while it waits after a preemption."""
        self.deadline_s = math.inf
        self.late = False
        self.nodes = 0
        self.pinned = False
        """Its checkpoint at the end of the prompt is taken."""
        self.emitted = 0
        self.drafted = 0
        self.accepted = 0
        self.aside: tuple[str, ...] = ()
        self.finished = False
        self.arrived_s = time.monotonic()
        self.admitted_s = 0.0
        self.first_s = 0.0

    @property
    def last_index(self) -> int:
        """No row may stand at or beyond this index: its pick would be one token too many."""
        return min(self.prompt + self.request.max_tokens, self.context) - 1

    @property
    def scoring(self) -> bool:
        """Tokens of the prompt are still to be scored, for which their rows must be computed."""
        return self.request.prompt_logprobs is not None and self.scored < self.prompt - 1

    @property
    def findable(self) -> list[int]:
        """Keys for a prefix hit, which never covers the last: state of rows to be scored is not restored."""
        return self.keys[: self.scored + 1] if self.scoring else self.keys

    @property
    def ending(self) -> frozenset[int]:
        """Ids that end the text."""
        return self.request.eog | frozenset(self.request.params.stop_ids)

    def unscored(self, length: int, count: int) -> range:
        """Which of `count` rows behind `length` are to be scored."""
        if not self.scoring:
            return range(0)
        return range(max(0, self.scored - length), min(count, self.prompt - 1 - length))

    def score(self, first: int, entries: tuple[TokenLogprob, ...]) -> None:
        """Send what the rows from `first` on said of their next tokens. Each row once: the rest is a bug."""
        if first != self.scored:
            raise AssertionError(f"scores of row {first} came where row {self.scored} was next")
        self.scored += len(entries)
        self.sink(PromptLogprobs(self.request.request, first + 1, entries))

    def view(self, length: int, served: int) -> SeqView:
        """The sequence for the scheduler; served: rows of its tenant. After a preemption everything but the
        newest token is prompt again.
        """
        return SeqView(
            seq=self.id,
            length=length,
            prompt=len(self.tokens) - 1,
            arrived_s=self.arrived_s,
            constrained=self.request.constraint is not None,
            barrier=self.last_index,
            nodes=self.nodes,
            priority=self.request.priority,
            tenant=self.request.tenant,
            served=served,
        )

    def emit(self, ids: list[int], logprobs: list[TokenLogprob]) -> FinishReason | None:
        """Take newly decided tokens, send them, and say whether the text ends with them."""
        params, eog = self.request.params, self.request.eog
        taken: list[int] = []
        reason: FinishReason | None = None
        for token in ids:
            self.emitted += 1
            taken.append(token)
            if (token in eog or token in params.stop_ids) and self.emitted > params.min_tokens:
                reason = "stop"
                break
            if self.emitted >= self.request.max_tokens or self.prompt + self.emitted >= self.context:
                reason = "length"
                break
        if reason is None and self.constraint is not None and self.constraint.is_finished:
            reason = "stop"
        self.tokens += taken
        self.keys += taken
        if self.first_s == 0.0:
            self.first_s = time.monotonic()
        self.sink(Tokens(self.request.request, tuple(taken), tuple(logprobs[: len(taken)])))
        return reason

    def finish(self, reason: FinishReason, error: str | None = None) -> Done:
        """Send the one `Done`; a second call is a bug."""
        if self.finished:
            raise AssertionError(f"request {self.request.request!r} finished twice (now {reason!r})")
        self.finished = True
        now = time.monotonic()
        admitted = self.admitted_s or now
        first = self.first_s or now
        done = Done(
            request=self.request.request,
            reason=reason,
            usage={
                "prompt_tokens": self.prompt,
                "completion_tokens": self.emitted,
                "cached_tokens": self.cached,
                "drafted_tokens": self.drafted,
                "accepted_tokens": self.accepted,
                **({} if self.cached_turn is None else {"cached_turn": int(self.cached_turn)}),
            },
            timings={
                "queue_ms": (admitted - self.arrived_s) * 1e3,
                "prefill_ms": (first - admitted) * 1e3,
                "decode_ms": (now - first) * 1e3,
                "ttft_ms": (first - self.arrived_s) * 1e3,
            },
            aside=self.aside,
            error=error,
            late=self.late,
        )
        self.sink(done)
        return done
