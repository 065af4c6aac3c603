"""Programs an executor may capture: the work of a step over tensors that never move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from attrs import frozen

if TYPE_CHECKING:
    from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


def takes_padding(check: Callable[..., bool]) -> Callable[[Function], Function]:
    """Marks an implementation of an op that reads sequences, so that prompts may be captured with it.

    check: called with the arguments of a recorded call, the namespace None and values `Ref`s; whether the op
    takes a batch that is `padded` there.
    """

    def mark(function: Function) -> Function:
        function.takes_padding = check  # type: ignore[attr-defined]
        return function

    return mark


def stays_on_device(check: Callable[..., bool]) -> Callable[[Function], Function]:
    """Marks an implementation of `sample`, so that sampled steps may be captured with it.

    check: called with the `StepParams`; whether it then neither waits for the device nor takes memory beyond
    what the logits take.
    """

    def mark(function: Function) -> Function:
        function.stays_on_device = check  # type: ignore[attr-defined]
        return function

    return mark


ROW_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Held rows of every sequence of a staged step: fewer are filled up, more are run as a plain call."""


def padded_rows(rows: int) -> int:
    """Of every sequence, where one of a step has so many."""
    return next((size for size in ROW_BUCKETS if size >= rows), rows)


Bucket = tuple[Any, ...]
"""What decides the shapes of a step, and what is computed in it; hashable."""


@frozen(eq=False)
class StageBuffers:
    """The static inputs of one bucket. Whoever runs it takes `host` to `device`, then computes."""

    bucket: Bucket
    host: Tensor
    """u8[n] in host memory."""
    device: Tensor
    """(dev) u8[n]."""
    view: Any
    """What the program itself made of them."""


class Staged(Protocol):
    """A program over static buffers. `compute` may be captured once and replayed for all steps of a bucket.

    Order of a step: `fill`, the copy, `compute` (or its replay), `behind`, the results named in `fetch` to
    the host, `finish`. Engine thread only.
    """

    fetch: tuple[str, ...]
    """Results that `finish` wants in host memory, where a bucket has them."""

    @property
    def generation(self) -> int:
        """Rises when tensors that `compute` reads have moved: captured graphs must be remade."""
        ...

    def bucket(self, inputs: Mapping[str, Any]) -> Bucket | None:
        """The bucket of these inputs; None: run the program as a plain call."""
        ...

    def stage(self, bucket: Bucket) -> StageBuffers:
        """Allocate the buffers of a bucket."""
        ...

    def fill(self, buffers: StageBuffers, inputs: Mapping[str, Any]) -> None:
        """(host) Write the inputs into `buffers.host`."""
        ...

    def compute(self, buffers: StageBuffers) -> Mapping[str, Tensor]:
        """(dev) The work. Queues kernels only: no synchronization, nothing that depends on values."""
        ...

    def behind(
        self, buffers: StageBuffers, results: Mapping[str, Tensor], inputs: Mapping[str, Any]
    ) -> Mapping[str, Tensor]:
        """(dev) Plain calls queued behind `compute`, which follow from the inputs -> all results."""
        ...

    def can_follow(self, inputs: Mapping[str, Any]) -> bool:
        """Whether the step can be queued before the one in front is read, and such a step behind it: nothing
        of it but `finish` waits for the device or needs tokens that may be AHEAD.
        """
        ...

    def finish(
        self, buffers: StageBuffers, results: Mapping[str, Tensor], inputs: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """What the plain call would have returned. May queue more work behind the step, and wait for it."""
        ...
