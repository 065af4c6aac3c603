"""One test through the steps of an engine: the same requests a server would send it, on this thread."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from luce_core.bench.cases import Case, Prompt
from luce_core.bench.energy import Energy, Meter
from luce_core.contracts import Done, EngineEvent, GenerationRequest, SamplingParams, Tokens
from luce_core.errors import CapacityError, EngineError

if TYPE_CHECKING:
    from luce_core.engine.engine import LuceEngine

GREEDY = SamplingParams(temperature=0.0)

Clock = Callable[[], float]


@frozen
class Sample:
    """What one repetition measured."""

    tokens: int
    seconds: float
    drafted: int = 0
    accepted: int = 0
    energy: Energy | None = None
    """Of what was timed; None where nothing counts it."""

    @property
    def tokens_s(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Watch:
    """What became of one request so far. Called on the engine's thread, which is ours."""

    def __init__(self) -> None:
        self.tokens = 0
        self.done: Done | None = None

    def __call__(self, event: EngineEvent) -> None:
        if isinstance(event, Tokens):
            self.tokens += len(event.ids)
        elif isinstance(event, Done):
            self.done = event

    def usage(self, name: str) -> int:
        """A figure of the finished request."""
        assert self.done is not None, "usage is known at the end"
        return self.done.usage[name]


class Measure:
    """Runs tests on one engine. Nothing else may use the engine meanwhile."""

    def __init__(
        self, engine: LuceEngine, clock: Clock = time.perf_counter, meter: Meter | None = None
    ) -> None:
        self.engine = engine
        self.clock = clock
        self.meter = meter
        self._ids = itertools.count()

    def prepare(self, prompts: Sequence[Prompt]) -> None:
        """Bring the contexts into the prefix cache; those that are there already cost one row."""
        for prompt in prompts:
            if prompt.context:
                watch = self._submit(prompt.context, 1)
                self._finish([watch], "the context of a test")

    def sample(self, case: Case, prompts: Sequence[Prompt]) -> Sample:
        """One repetition, behind contexts that `prepare` computed.

        Raises EngineError when a request fails, CapacityError when the cache does not hold the test.
        """
        self.prepare(prompts)
        before = self.engine.counters["preempted"]
        made = self._prompt(case, prompts) if case.kind == "pp" else self._generate(case, prompts)
        if self.engine.counters["preempted"] != before:
            raise _too_small(case, "sequences had to make way for each other")
        return made

    def _prompt(self, case: Case, prompts: Sequence[Prompt]) -> Sample:
        """From the requests to the first token of the last of them."""
        begin = self._begin()
        watches = [self._submit(prompt.context + prompt.rest, 1) for prompt in prompts]
        while not all(watch.done for watch in watches) and self.engine.step():
            pass
        seconds, energy = self._end(begin)
        self._finish(watches, case.label)
        cached = _check_cached(case, watches, case.depth)
        asked = sum(len(prompt.context) + len(prompt.rest) for prompt in prompts)
        return _sample(asked - cached, seconds, watches, energy)

    def _generate(self, case: Case, prompts: Sequence[Prompt]) -> Sample:
        """From where every sequence decodes to where the first one ends."""
        watches = [self._submit(prompt.context, case.tokens + 1) for prompt in prompts]
        while not (all(watch.tokens for watch in watches) or any(watch.done for watch in watches)):
            if not self.engine.step():
                break
        together = all(watch.tokens for watch in watches)
        had = sum(watch.tokens for watch in watches)
        begin = self._begin()
        while not any(watch.done for watch in watches) and self.engine.step():
            pass
        seconds, energy = self._end(begin)
        tokens = sum(watch.tokens for watch in watches) - had
        for number in self._running:
            self.engine.cancel(number)
        self._finish(watches, case.label)
        if not together:
            raise _too_small(case, "a sequence ended before all of them ran")
        if not tokens:
            raise EngineError(f"Test {case.label!r} measured nothing: its first step was its last. Raise -n.")
        _check_cached(case, watches, max(1, case.depth) - 1)
        return _sample(tokens, seconds, watches, energy)

    def _begin(self) -> float:
        """The counter is read outside what is timed."""
        if self.meter is not None:
            self.meter.start()
        return self.clock()

    def _end(self, begin: float) -> tuple[float, Energy | None]:
        seconds = self.clock() - begin
        return seconds, self.meter.stop() if self.meter is not None else None

    # --- the engine

    def _submit(self, prompt: tuple[int, ...], max_tokens: int) -> Watch:
        """No `eog`: nothing but the length ends an answer."""
        watch = Watch()
        request = GenerationRequest(f"bench-{next(self._ids)}", prompt, max_tokens, GREEDY)
        self.engine.submit(request, watch)
        return watch

    @property
    def _running(self) -> list[str]:
        return [seq.request.request for seq in (*self.engine.running.values(), *self.engine.waiting.values())]

    def _finish(self, watches: Sequence[Watch], what: str) -> None:
        """Step until nothing is left. EngineError for the first request that did not end well."""
        while self.engine.step():
            pass
        self.engine.blocks.check_integrity()
        for watch in watches:
            if watch.done is None or watch.done.error:
                why = watch.done.error if watch.done else "the engine lost it"
                raise EngineError(f"A request of {what!r} failed. {why}")


def _check_cached(case: Case, watches: Sequence[Watch], wanted: int) -> int:
    """Cached tokens of all sequences; a test behind a context that was computed again is another test."""
    cached = [watch.usage("cached_tokens") for watch in watches]
    if min(cached) < wanted:
        raise _too_small(case, f"{min(cached)} of {wanted} context tokens were still cached when it began")
    return sum(cached)


def _too_small(case: Case, what: str) -> CapacityError:
    return CapacityError(
        f"Test {case.label!r} does not fit the cache: {what}. Lower -b or -d, or raise --cache-bytes."
    )


def _sample(tokens: int, seconds: float, watches: Sequence[Watch], energy: Energy | None) -> Sample:
    drafted, accepted = (
        sum(watch.usage(name) for watch in watches) for name in ("drafted_tokens", "accepted_tokens")
    )
    return Sample(tokens, seconds, drafted, accepted, energy)
