"""Steps of every ordinary kind before the first request, where the first of a kind takes much longer than
the next: kernels are compiled and loaded, workspaces grow, graphs are captured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from luce_core.contracts import Done, EngineEvent, GenerationRequest, SamplingParams
from luce_core.engine.staged_prefill import ROW_BUCKETS
from luce_core.errors import EngineError

if TYPE_CHECKING:
    from luce_core.engine.engine import LuceEngine

log = logging.getLogger("luce_core.engine")

MOST_TOGETHER = 32
"""Sequences of a step that are tried; each number up to FEW, then powers of two."""
FEW = 8
TWICE = 2
"""A bucket's first step computes, its second captures."""
SHORT = 24
"""Tokens of a prompt beside others."""
KINDS = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.95, seed=0))


def warm(engine: LuceEngine, progress: Callable[[int, int], None] | None = None) -> None:
    """Answer made-up requests, then forget them: nothing stays cached, nothing is counted.

    Before the engine serves anyone, on the thread that calls. Raises EngineError with the engine's own words
    when one fails: a user's would too. progress: rounds done, of how many.
    """
    if not engine.executor.compiles:
        return
    start, rounds = time.monotonic(), list(_rounds(engine))
    for done, prompts in enumerate(rounds):
        if progress is not None:
            progress(done, len(rounds))
        for params in KINDS:
            _answer(engine, prompts, params)
    engine.start_over()
    log.info("tried %d kinds of steps in %.1f s", len(rounds) * len(KINDS), time.monotonic() - start)


def _rounds(engine: LuceEngine) -> Iterator[Sequence[int]]:
    """Lengths of the prompts that run together."""
    longest = engine.context - _tokens(engine) - 1
    if longest < 1:
        return
    yield [min(engine.row_budget + SHORT, longest)]  # a whole chunk, and what is left
    for rows in ROW_BUCKETS:  # all of a prompt but its last token; sizes between wait for their second prompt
        if rows < min(engine.row_budget, longest) and rows & (rows - 1) == 0:
            yield [rows + 1]
    count = 1
    while count <= min(engine.slots, MOST_TOGETHER):
        yield [min(SHORT + place, longest) for place in range(count)]
        if count > 1 and count & (count - 1) == 0:
            yield [min(engine.row_budget // count, longest)] * count  # large tiles, of several
        count = count + 1 if count < FEW else 2 * count


def _tokens(engine: LuceEngine) -> int:
    """Of an answer: some one by one, some as many at once as there may be."""
    return TWICE + TWICE * max(1, engine.executor.steps_ahead)


def _answer(engine: LuceEngine, prompts: Sequence[int], params: SamplingParams) -> None:
    failed: list[str] = []

    def sink(event: EngineEvent) -> None:
        if isinstance(event, Done) and event.error:
            failed.append(event.error)

    for number, length in enumerate(prompts):
        # Tokens of its own, so that nothing of a prompt is cached and all run at the same time.
        prompt = tuple((7919 * (place + 1) + 104729 * number) % engine.spec.vocab for place in range(length))
        engine.submit(GenerationRequest(f"warm-up {number}", prompt, _tokens(engine), params), sink)
    while engine.step():
        pass
    engine.blocks.clear()
    if failed:
        raise EngineError(
            f"A made-up request of {max(prompts)} tokens failed while warming up: {failed[0]} Start with "
            "--no-warmup to serve all the same."
        )
