"""Executors that run staged programs without a device: at once, or read as late as may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from luce_core.contracts import Claim, Fence, StageBuffers, Staged, Step
from luce_core.engine.executor import EagerExecutor, EagerHandle
from luce_core.ops.newest import AHEAD


class StagingExecutor(EagerExecutor):
    """Runs staged programs over their buffers, poisoned before each step."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.staged: dict[str, Staged | None] = {}
        self.made: dict[Any, StageBuffers] = {}
        """By bucket."""

    def prepare(
        self,
        name: str,
        fn: Callable[..., Any],
        buckets: Sequence[tuple[int, ...]],
        staged: Staged | None = None,
    ) -> Claim:
        """Keep both ways."""
        self.staged[name] = staged
        return super().prepare(name, fn, buckets)

    def submit(self, steps: Sequence[Step]) -> EagerHandle:
        """Run the steps."""
        results: dict[str, Any] = {}
        for step in steps:
            results |= self._run(step)
        self._fence += 1
        return EagerHandle(Fence(self._fence), results)

    def _run(self, step: Step) -> Mapping[str, Any]:
        staged = self.staged[step.program]
        bucket = None if staged is None else staged.bucket(step.inputs)
        if staged is None or bucket is None:
            return self._programs[step.program](**step.inputs)
        if bucket not in self.made:
            self.made[bucket] = staged.stage(bucket)
        buffers = self.made[bucket]
        staged.fill(buffers, step.inputs)
        buffers.device.fill_(255).copy_(buffers.host)
        computed = staged.behind(buffers, staged.compute(buffers), step.inputs)
        return staged.finish(buffers, computed, step.inputs)


class AheadExecutor(StagingExecutor):
    """Steps follow where they can, so many at once. Raises AssertionError where a step is submitted before
    everything in front of it was read, follows two that were not, or has a token that is known.
    """

    def __init__(self, steps: int = 1) -> None:
        super().__init__()
        self.steps_ahead = steps
        self.unread: list[Fence] = []
        self.followed = 0
        """Steps that did."""
        self._leads = False

    def submit(self, steps: Sequence[Step]) -> LateHandle:  # type: ignore[override]
        """Run the steps; one that stands alone may be followed."""
        _demand(not self.unread, f"submitted, though {self.unread} have not been read")
        handle = super().submit(steps)
        self._leads = len(steps) == 1 and self._has_bucket(steps[0]) and self._can_follow(steps[0])
        return self._late(handle)

    def follow(self, step: Step) -> LateHandle | None:  # type: ignore[override]
        """Run a step whose tokens the one in front picked."""
        _demand(len(self.unread) == 1, f"followed {self.unread}, wanted one")
        if not self._leads or not self._can_follow(step) or not self._has_bucket(step):
            return None
        tokens = [row.tokens for row in step.inputs["rows"]]
        _demand(all(one == [AHEAD] for one in tokens), f"followed with tokens {tokens}")
        self.followed += step.inputs.get("steps", 1)
        return self._late(super().submit([step]))

    def _can_follow(self, step: Step) -> bool:
        staged = self.staged[step.program]
        return staged is not None and staged.can_follow(step.inputs)

    def _has_bucket(self, step: Step) -> bool:
        staged = self.staged[step.program]
        return staged is not None and staged.bucket(step.inputs) is not None

    def _late(self, handle: EagerHandle) -> LateHandle:
        self.unread.append(handle.fence)
        return LateHandle(handle, self.unread)


class LateHandle:
    """Steps that must be read in order."""

    def __init__(self, handle: EagerHandle, unread: list[Fence]) -> None:
        self.fence = handle.fence
        self._handle = handle
        self._unread = unread

    def ready(self) -> bool:
        return True

    def outputs(self) -> Mapping[str, Any]:
        if self.fence in self._unread:
            first = self._unread.pop(0)
            _demand(first == self.fence, f"read {self.fence} before {first}")
        return self._handle.outputs()


def _demand(holds: bool, words: str) -> None:
    if not holds:
        raise AssertionError(words)
