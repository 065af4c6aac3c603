"""Steps of every ordinary kind before the first request, where the first of a kind takes much longer than
the next: kernels are compiled and loaded, workspaces grow, graphs are captured.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from luce_core.contracts import Done, EngineEvent, GenerationRequest, SamplingParams, Tokens
from luce_core.engine.staged import LEAST_BLOCKS
from luce_core.engine.staged_prefill import ROW_BUCKETS
from luce_core.errors import EngineError

if TYPE_CHECKING:
    from luce_core.engine.engine import LuceEngine

log = logging.getLogger("luce_core.engine")

MOST_TOGETHER = 32
"""Sequences of a step that are tried: each number up to FEW, then multiples of it, and as many as may run."""
FEW = 8
TWICE = 2
"""A bucket's first step computes, its second captures."""
SHORT = 24
"""Tokens of a prompt beside others."""
KINDS = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.95, seed=0))
BEHIND = (16, 128)
"""Rows of a chunk behind long texts: so few that how they are computed depends on the text; more are enough
for a device by themselves.
"""


@frozen
class Trial:
    """Made-up requests that run together."""

    prompts: Sequence[int]
    """Lengths."""
    tokens: int
    """Of each answer, after which it is cancelled where there are drafters: they propose as much as they may
    of an answer that goes on.
    """
    kinds: Sequence[SamplingParams] = KINDS
    """One after the other."""
    ends: bool = False
    """Whether answers come to their end, where trees of candidates become smaller step by step."""
    columns: int = 1
    """Of block tables, at least. How a step is computed goes by the size of its tables, and what it reads by
    what is used of them: so this is the step of a long text, without the text.
    """


def warm(engine: LuceEngine, progress: Callable[[int, int], None] | None = None) -> None:
    """Answer made-up requests, then forget them: nothing stays cached, nothing is counted.

    Before the engine serves anyone, on the thread that calls. Raises EngineError with the engine's own words
    when one fails: a user's would too. progress: trials done, of how many.
    """
    if not engine.executor.compiles:
        return
    start, trials = time.monotonic(), [*_behind_long_texts(engine), *_trials(engine)]
    for done, one in enumerate(trials):
        if progress is not None:
            progress(done, len(trials))
        engine.programs.least_blocks = one.columns
        engine.keeps_checkpoints = done + 1 == len(trials)  # a copy may take as long as all else: once
        try:
            for params in one.kinds:
                _answer(engine, one, params)
        finally:
            engine.programs.least_blocks, engine.keeps_checkpoints = 1, True
    engine.start_over()
    log.info("tried %d kinds of steps in %.1f s", len(trials), time.monotonic() - start)


def _trials(engine: LuceEngine) -> Iterator[Trial]:
    tokens = _tokens(engine)
    longest = engine.context - tokens - engine.nodes - 1
    if longest < 1:
        return
    yield Trial([min(engine.row_budget + SHORT, longest)], tokens)  # a whole chunk, and what is left
    for rows in ROW_BUCKETS:  # all of a prompt but its last token; sizes between wait for their second prompt
        if rows < min(engine.row_budget, longest) and rows & (rows - 1) == 0:
            yield Trial([rows + 1], tokens)
    most = min(engine.slots, MOST_TOGETHER)
    for rows in range(FEW, SHORT + 1, FEW) if most > 1 else ():  # of two together: not filled up to a bucket
        yield Trial([min(rows // 2 + 1, longest)] * 2, 1, KINDS[:1])
    for count in sorted({*range(1, min(FEW, most)), *range(FEW, most + 1, FEW), most}):
        yield Trial([min(SHORT + place, longest) for place in range(count)], tokens)
        if count > 1 and (count & (count - 1) == 0 or count == most):
            yield Trial([min(engine.row_budget // count, longest)] * count, tokens)  # large tiles, of several
    if engine.nodes:
        yield Trial([min(SHORT, longest)], engine.nodes + TWICE, ends=True)


def _behind_long_texts(engine: LuceEngine) -> Iterator[Trial]:
    """A few rows, and the first of an answer, twice for each size a block table can have: with drafters once
    alone and once with a whole tree, and smaller ones in the largest. First of all, so that ordinary steps
    are the ones that were used last.
    """
    most = -(-engine.context // engine.block_tokens)
    columns = LEAST_BLOCKS
    while columns < most:
        columns *= 2
        for rows in BEHIND:
            if rows < min(engine.row_budget, engine.context - engine.nodes - 2):
                yield Trial([rows + 1], 1, KINDS[:1], ends=rows == BEHIND[0], columns=columns)
    if engine.nodes and columns > LEAST_BLOCKS and SHORT + engine.nodes + TWICE < engine.context:
        yield Trial([SHORT], engine.nodes + TWICE, KINDS[:1], ends=True, columns=columns)


def _tokens(engine: LuceEngine) -> int:
    """Of an answer: some one by one, some as many at once as there may be."""
    return TWICE + TWICE * max(1, engine.executor.steps_ahead)


def _answer(engine: LuceEngine, trial: Trial, params: SamplingParams) -> None:
    failed: list[str] = []
    come: Counter[str] = Counter()
    more = 0 if trial.ends else engine.nodes

    def sink(event: EngineEvent) -> None:
        if isinstance(event, Done) and event.error:
            failed.append(event.error)
        if isinstance(event, Tokens):
            come[event.request] += len(event.ids)
            if more and come[event.request] >= trial.tokens:
                engine.cancel(event.request)

    for number, length in enumerate(trial.prompts):
        # Tokens of its own, so that nothing of a prompt is cached and all run at the same time.
        prompt = tuple((7919 * (place + 1) + 104729 * number) % engine.spec.vocab for place in range(length))
        engine.submit(GenerationRequest(f"warm-up {number}", prompt, trial.tokens + more, params), sink)
    while engine.step():
        pass
    engine.blocks.clear()
    if failed:
        raise EngineError(
            f"A made-up request of {max(trial.prompts)} tokens failed while warming up: {failed[0]} Start "
            "with --no-warmup to serve all the same."
        )
