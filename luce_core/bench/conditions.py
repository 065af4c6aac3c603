"""When two engines may be compared, and the gain. Pure.

The rule: same file, same types of keys and values, flash attention on both sides, same threads, same context.
gain = √(prefill gain × decode gain), each a ratio of medians of one run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

from attrs import asdict, evolve, frozen

from luce_core.bench.cases import Case


@frozen
class Conditions:
    """What must be the same on both sides."""

    file: str
    """Path without links, size and time of change: what the process itself saw of the file it loaded."""
    k_type: str
    v_type: str
    flash_attention: bool
    threads: int
    context: int


NAMES = {
    "file": "file",
    "k_type": "type of keys",
    "v_type": "type of values",
    "flash_attention": "flash attention",
    "threads": "threads",
    "context": "context",
}


def read_conditions(about: Mapping[str, Any]) -> Conditions:
    """Out of what a worker says of itself. KeyError names what it does not say."""
    return Conditions(**{name: about[name] for name in NAMES})


def differences(ours: Conditions, theirs: Conditions) -> list[str]:
    """Each condition that differs, like "threads: 2 and 4"; flash attention must also be on."""
    mine, other = asdict(ours), asdict(theirs)
    found = [
        f"{words}: {_word(mine[name])} and {_word(other[name])}"
        for name, words in NAMES.items()
        if mine[name] != other[name]
    ]
    if not ours.flash_attention and not theirs.flash_attention:
        found.append("flash attention: off on both sides, wanted on")
    return found


def _word(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def gain(prefill: float, decode: float) -> float:
    """The geometric mean of two ratios."""
    if prefill <= 0 or decode <= 0:
        raise ValueError(f"ratios must be positive: prefill {prefill}, decode {decode}")
    return sqrt(prefill * decode)


@frozen
class Pair:
    """One test on both sides: medians of tokens per second."""

    case: Case
    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        """Above 1: ours is faster."""
        return self.ours / self.theirs


@frozen
class Gain:
    """At one depth, for one pair of lengths."""

    prompt: Case
    answer: Case
    prefill: float
    decode: float
    gain: float


def gains(pairs: Sequence[Pair]) -> list[Gain]:
    """For every pp and tg of the same depth, in order. Whether they may be compared is asked before."""
    return [
        Gain(prompt.case, answer.case, prompt.ratio, answer.ratio, gain(prompt.ratio, answer.ratio))
        for prompt in pairs
        if prompt.case.kind == "pp"
        for answer in pairs
        if answer.case == evolve(prompt.case, kind="tg", tokens=answer.case.tokens)
    ]
