"""The plain executor: programs are Python functions, run in order at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import frozen

from luce_core.contracts import Claim, ExecutorContext, Fence, Staged, Step


@frozen
class EagerHandle:
    """A step that has already run."""

    fence: Fence
    results: Mapping[str, Any]

    def ready(self) -> bool:
        return True

    def outputs(self) -> Mapping[str, Any]:
        return self.results


class EagerExecutor:
    """Runs every step where it is submitted. The fence has retired when `submit` returns."""

    compiles = False
    steps_ahead = 0

    def __init__(self, device: str) -> None:
        self.device = device
        self._programs: dict[str, Callable[..., Mapping[str, Any]]] = {}
        self._fence = 0

    def prepare(
        self,
        name: str,
        fn: Callable[..., Any],
        buckets: Sequence[tuple[int, ...]],
        staged: Staged | None = None,
    ) -> Claim:
        """Remember `fn`; an eager program takes nothing beyond the model's workspace."""
        del buckets, staged
        self._programs[name] = fn
        return Claim(f"executor/{name}", self.device, "graphs", 0, 0)

    def submit(self, steps: Sequence[Step]) -> EagerHandle:
        """Run the steps in order; later results win where names repeat."""
        results: dict[str, Any] = {}
        for step in steps:
            results.update(self._programs[step.program](**step.inputs))
        self._fence += 1
        return EagerHandle(Fence(self._fence), results)

    def follow(self, step: Step) -> None:
        """Nothing: the step in front has been read before there is another."""


def make_executor(context: ExecutorContext) -> EagerExecutor:
    """Factory of the part "eager"."""
    return EagerExecutor(context.device.id)
