"""What rendering one chat template may cost: steps, time, and memory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import attrs
from jinja2 import TemplateError

from luce_core.text.marked import bulk

MAX_CPU_S = 15.0  # of the rendering thread: a busy machine stops nobody
MAX_STEPS = 10_000_000  # two seconds of empty loop turns on a laptop core
MAX_VALUE_BYTES = 64 * 2**20  # a prompt of a million tokens takes 5 to 20 MB
MAX_TOTAL_BYTES = 512 * 2**20  # plus, for each byte that came in:
TOTAL_BYTES_PER_BYTE = 1024  # templates that show all tools again in every turn are slow, but not hostile
MAX_INT_BITS = 4096
NODE_BYTES = 16  # what a number, or the frame of a list or dict, counts
PART_BYTES = 128  # what one more small string counts
_STEPS_PER_LOOK = 256
_GLANCES_PER_LOOK = 16


class LimitError(TemplateError):
    """A rendering asked for more time or memory than any prompt needs."""


@attrs.define
class Budget:
    """What one rendering may still use; belongs to the thread that made it."""

    deadline_s: float = attrs.field(factory=lambda: time.thread_time() + MAX_CPU_S)
    steps: int = 0
    glances: int = 0
    spent_bytes: int = 0
    total_bytes: int = attrs.field(factory=lambda: MAX_TOTAL_BYTES)

    def step(self, count: int = 1) -> None:
        """Before each loop turn, call or operator."""
        self.steps += count
        if self.steps > MAX_STEPS:
            raise LimitError(f"it took more than {MAX_STEPS:,} steps")
        if self.steps % _STEPS_PER_LOOK < count:
            self.look()

    def glance(self) -> None:
        """Beside an operation that is no step but takes its time on large values."""
        self.glances += 1
        if self.glances % _GLANCES_PER_LOOK == 0:
            self.look()

    def look(self) -> None:
        """Whether there is time left."""
        if time.thread_time() > self.deadline_s:
            raise LimitError(f"it took more than {MAX_CPU_S:g} s")

    def allow(self, num_bytes: int) -> None:
        """Before a value of that size is made."""
        self.spent_bytes += num_bytes
        if num_bytes > MAX_VALUE_BYTES:
            raise LimitError(f"it made a value of {num_bytes:,} bytes, wanted at most {MAX_VALUE_BYTES:,}")
        if self.spent_bytes > self.total_bytes:
            raise LimitError(f"it made values of more than {self.total_bytes:,} bytes in all")

    def weigh(self, value: Any) -> Any:
        """Count a new container as the tree it is, however much its branches share; answers the value."""
        pending, weight = [value], 0
        while pending:
            item = pending.pop()
            if isinstance(item, str):
                weight += bulk(item)
            elif isinstance(item, dict):
                pending.extend(item.keys())
                pending.extend(item.values())
            elif isinstance(item, (list, tuple)):
                pending.extend(item)
            weight += NODE_BYTES
            if weight + NODE_BYTES * len(pending) > MAX_VALUE_BYTES:
                self.allow(weight + NODE_BYTES * len(pending))
        self.allow(weight)
        return value

    def admit(self, variables: dict[str, Any]) -> None:
        """Count what comes in, and widen the total by it."""
        self.weigh(variables)
        self.total_bytes += TOTAL_BYTES_PER_BYTE * self.spent_bytes


class Counted:
    """An iterable whose every turn is a step; keeps the length for `loop.last` and friends."""

    __slots__ = ("_budget", "_items")

    def __init__(self, budget: Budget, items: Iterable[Any]) -> None:
        self._budget, self._items = budget, items

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._budget.step()
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # a TypeError is the protocol for "no length"
