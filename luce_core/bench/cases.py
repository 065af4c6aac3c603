"""The tests of one run: prompt processing (pp) and token generation (tg), at depths and batch sizes. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Literal

from attrs import frozen

from luce_core.contracts import BackendPlan, StateSizes
from luce_core.errors import UsageError
from luce_core.plan_memory import SPARE_BLOCKS, prompt_bound, roofline

Kind = Literal["pp", "tg"]


@frozen
class Case:
    """One test.

    pp: a prompt of `tokens` behind a cached context of `depth`, until its first token is there.
    tg: `tokens` decoded behind a context of `depth`, all `batch` sequences at the same time.
    """

    kind: Kind
    tokens: int
    depth: int
    batch: int

    @property
    def label(self) -> str:
        """As tables name it: pp512 @ d4096 × 2."""
        depth = f" @ d{self.depth}" if self.depth else ""
        return f"{self.kind}{self.tokens}{depth}" + (f" × {self.batch}" if self.batch > 1 else "")

    @property
    def context(self) -> int:
        """Tokens one sequence comes to hold, its first answer token (which is not measured) included."""
        return (self.depth or int(self.kind == "tg")) + self.tokens + 1


def make_cases(
    prompts: Iterable[int], answers: Iterable[int], depths: Iterable[int], batches: Iterable[int]
) -> list[Case]:
    """Every combination once, in the order given, pp first; 0 tokens ask for no test."""
    made = [
        Case(kind, tokens, depth, batch)
        for batch in batches
        for depth in depths
        for kind, sizes in _kinds(list(prompts), list(answers))
        for tokens in sizes
        if tokens
    ]
    if not made:
        raise UsageError("No test is left: -p and -n are both 0. Give one of them a length.")
    return list(dict.fromkeys(made))


def _kinds(prompts: list[int], answers: list[int]) -> tuple[tuple[Kind, list[int]], ...]:
    return (("pp", prompts), ("tg", answers))


def check_cases(cases: Sequence[Case], plan: BackendPlan) -> None:
    """UsageError for the first test the plan has no room for. Before anything is loaded."""
    context, most = plan.number("context"), plan.number("engine.max_sequences")
    for case in cases:
        if case.context > context:
            raise UsageError(
                f"Test {case.label!r} comes to {case.context} tokens a sequence; the context is {context}. "
                "Lower -d, -p or -n, or raise --ctx-size."
            )
        if case.batch > most:
            raise UsageError(
                f"Test {case.label!r} runs {case.batch} sequences; --max-sequences is {most}. Raise it, or "
                "lower -b."
            )
        needed, room = _blocks(case, plan)
        if needed > room:
            raise UsageError(
                f"Test {case.label!r} needs {needed} cache blocks; the plan has {room}. Lower -b, -d or "
                "--ctx-size, or raise --cache-bytes or --memory-limit."
            )


def _blocks(case: Case, plan: BackendPlan) -> tuple[int, int]:
    """(needed, there) in the smallest group without a window."""
    sizes = plan.values["state.sizes"]
    assert isinstance(sizes, StateSizes), sizes
    layouts = {**{model.name: model.spec.layout for model in plan.models}, **plan.layouts}
    counts = [
        sizes.num_blocks[f"{name}/{group.name}"]
        for name, layout in layouts.items()
        for group in layout.groups
        if group.window is None
    ]
    one = -(-(case.context + sizes.max_held_rows) // sizes.block_tokens) + SPARE_BLOCKS
    return case.batch * one, min(counts, default=case.batch * one)


def bound_of(plan: BackendPlan, case: Case) -> float | None:
    """Tokens/s that the device allows in this test; None where the plan knows no figure of the device.

    Decoding: memory bandwidth. The weights are read once for all sequences of a step, the state of each by
    itself, at the test's mean depth. Prompts: arithmetic, of the products of weights alone.
    """
    if case.kind == "pp":
        return prompt_bound(plan).tokens_s or None
    line = roofline(plan, case.depth + case.tokens // 2)
    if line.bandwidth_bytes_s <= 0:
        return None
    step_bytes = line.weight_bytes + case.batch * line.state_bytes
    return case.batch * line.bandwidth_bytes_s / max(1, step_bytes)


# --- what is fed


@frozen
class Prompt:
    """What one sequence is given: a context that may be cached, and what is measured behind it."""

    context: tuple[int, ...]
    rest: tuple[int, ...] = ()


class Prompts:
    """Random token ids; the same for the same seed.

    A context depends on its depth and sequence alone, so it is computed once; what is measured is new each
    time, so that nothing of it is cached.
    """

    def __init__(self, vocab: int, seed: int) -> None:
        self.vocab = vocab
        self.seed = seed
        self._fresh = random.Random(f"{seed}")

    def of(self, case: Case) -> list[Prompt]:
        """One per sequence."""
        if case.kind == "tg":  # the newest token of a context has no state yet, so there must be one
            return [Prompt(self._context(max(1, case.depth), place)) for place in range(case.batch)]
        return [
            Prompt(self._context(case.depth, place), self._tokens(self._fresh, case.tokens))
            for place in range(case.batch)
        ]

    def _context(self, depth: int, place: int) -> tuple[int, ...]:
        return self._tokens(random.Random(f"{self.seed} {depth} {place}"), depth)

    def _tokens(self, source: random.Random, count: int) -> tuple[int, ...]:
        return tuple(source.randrange(self.vocab) for _ in range(count))
