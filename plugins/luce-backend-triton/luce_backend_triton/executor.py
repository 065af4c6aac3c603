"""Executor `cuda-graphs`: a step that was seen before is one replayed graph. The host queues it and goes on.

The first step of a bucket runs as plain calls over its static buffers: that compiles kernels and makes
workspaces grow. The second captures, all later ones replay. Programs without static buffers are plain calls.

A step, or several as one graph, can follow another before that one is read: what the host writes and reads
lies twice, and the two take turns.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from attrs import define, field, frozen
from torch import Tensor

from luce_backend_triton.memory import GRAPH_BYTES
from luce_core.contracts import Bucket, Claim, ExecutorContext, Fence, StageBuffers, Staged, Step

log = logging.getLogger(__name__)

Results = Mapping[str, Tensor]
MOST_BUCKETS = 64
"""Of a program, one of several steps counted as so many: the driver takes about a megabyte for a graph of a
thousand nodes.
"""


class Captured(Protocol):
    """Work that can be run again."""

    @property
    def results(self) -> Results:
        """The same tensors after every replay."""
        ...

    def replay(self) -> None:
        """Queue it."""
        ...


@frozen
class CudaGraph:
    """One captured step."""

    graph: Any
    results: Results

    def replay(self) -> None:
        self.graph.replay()


class Capture:
    """Captures work on one CUDA device. All graphs share one pool: only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None

    def __call__(self, work: Callable[[], Results]) -> CudaGraph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        start = time.perf_counter()
        torch.cuda.empty_cache()  # what plain calls left: the graph's tensors lie in a pool of their own
        # Only this thread's calls must suit a capture: another may just wait for a snapshot's event.
        capturing = torch.cuda.graph(graph, self._pool, capture_error_mode="thread_local")
        try:
            with torch.cuda.device(self.device), capturing:
                results = work()
        except RuntimeError:
            self._pool = None  # torch takes a pool for one that is being captured to when a capture failed
            raise
        log.info("captured a step in %.0f ms", 1e3 * (time.perf_counter() - start))
        return CudaGraph(graph, results)


@define(eq=False)
class Program:
    """One prepared program and what was made of its buckets."""

    call: Callable[..., Mapping[str, Any]]
    staged: Staged | None
    buckets: dict[Bucket, Prepared] = field(factory=dict)
    refused: bool = False
    """An op of it cannot be captured."""
    generation: int = 0

    @property
    def steps(self) -> int:
        """Of all buckets."""
        return sum(one.steps for one in self.buckets.values())


@define(eq=False)
class Prepared:
    """One bucket."""

    buffers: StageBuffers
    sides: tuple[Side, Side]
    steps: int
    captured: Captured | None = None
    refused: bool = False
    """Something in it, which other buckets do not have, cannot be captured."""


@frozen(eq=False)
class Side:
    """What one of two steps under way has in (pinned) host memory."""

    numbers: Tensor
    """As `StageBuffers.host`."""
    fetched: dict[str, Tensor] = field(factory=dict)
    """Copies of results."""


class GraphExecutor:
    """`Executor`. Engine thread only. At most one submission is under way, and one that follows it."""

    def __init__(
        self,
        device: str,
        capture: Callable[[Callable[[], Results]], Captured],
        *,
        prompts: bool = False,
        steps: int = 1,
    ) -> None:
        """prompts: whether they are captured too. steps: that follow at once."""
        self.steps_ahead = steps
        self.device = torch.device(device)
        self.compiles = self.device.type == "cuda"
        self._capture = capture
        self._prompts = prompts
        self._programs: dict[str, Program] = {}
        self._fence = 0
        self._events = tuple(_event(self.device) for _ in range(2))
        self._turn = 0
        self._leads = False
        """Whether a step may follow the newest submission."""

    def prepare(
        self,
        name: str,
        fn: Callable[..., Any],
        buckets: Sequence[tuple[int, ...]],
        staged: Staged | None = None,
    ) -> Claim:
        """Remember the program; graphs are captured when their buckets are first used."""
        del buckets
        if name == "prefill" and not self._prompts:
            staged = None
        self._programs[name] = Program(fn, staged)
        taken = GRAPH_BYTES if staged else 0
        return Claim(f"executor/{name}", str(self.device), "graphs", taken, taken)

    def submit(self, steps: Sequence[Step]) -> GraphHandle:
        """Queue the steps in order. Plain calls have run when it returns, replays may be under way."""
        for event in self._events:  # buffers of the steps before are about to be written
            if event is not None:
                event.synchronize()
        self._leads = False
        return self._handle([self._start(step) for step in steps])

    def follow(self, step: Step) -> GraphHandle | None:
        """Queue a step behind a staged one that leads on."""
        program = self._programs[step.program]
        staged = program.staged
        if not self._leads or staged is None or program.generation != staged.generation:
            return None
        if not staged.can_follow(step.inputs):
            return None
        prepared = self._prepared(step)
        return None if prepared is None else self._handle([self._run(staged, prepared, step)])

    def _handle(self, pending: Sequence[Callable[[], Mapping[str, Any]]]) -> GraphHandle:
        done = self._events[self._turn]
        if done is not None:
            done.record()
        self._turn = 1 - self._turn
        self._fence += 1
        return GraphHandle(Fence(self._fence), pending, done)

    def _start(self, step: Step) -> Callable[[], Mapping[str, Any]]:
        """Queue one step -> what makes its outputs, once the device is through."""
        program = self._programs[step.program]
        staged, prepared = program.staged, self._prepared(step)
        if staged is None or prepared is None:
            outputs = program.call(**step.inputs)
            return lambda: outputs
        self._leads = staged.can_follow(step.inputs)
        return self._run(staged, prepared, step)

    def _prepared(self, step: Step) -> Prepared | None:
        """What there is of its bucket, captured if it comes a second time. None: it is a plain call."""
        program = self._programs[step.program]
        staged = program.staged
        bucket = None if staged is None or program.refused else staged.bucket(step.inputs)
        if staged is None or bucket is None:
            return None
        if program.generation != staged.generation:
            program.buckets.clear()
            program.generation = staged.generation
        prepared = program.buckets.pop(bucket, None)
        first = prepared is None
        if prepared is None:
            prepared = self._with_sides(staged.stage(bucket), step.inputs.get("steps", 1))
            while program.buckets and program.steps + prepared.steps > MOST_BUCKETS:
                program.buckets.pop(next(iter(program.buckets)))  # the one that was used longest ago
        program.buckets[bucket] = prepared
        if not (first or prepared.captured or prepared.refused):
            self._try_to_capture(step.program, prepared, partial(staged.compute, prepared.buffers))
        return None if program.refused else prepared

    def _with_sides(self, buffers: StageBuffers, steps: int) -> Prepared:
        pinned, size = self.device.type == "cuda", buffers.host.shape
        one, other = (torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2))
        return Prepared(buffers, (Side(one), Side(other)), steps)

    def _run(self, staged: Staged, prepared: Prepared, step: Step) -> Callable[[], Mapping[str, Any]]:
        buffers, side, captured = prepared.buffers, prepared.sides[self._turn], prepared.captured
        staged.fill(buffers, step.inputs)
        side.numbers.copy_(buffers.host)
        buffers.device.copy_(side.numbers, non_blocking=True)
        if captured is None:
            results = staged.compute(buffers)
        else:
            captured.replay()
            results = captured.results
        results = staged.behind(buffers, results, step.inputs)
        self._fetch(staged, side, results)
        return partial(staged.finish, buffers, {**results, **side.fetched}, step.inputs)

    def _try_to_capture(self, name: str, prepared: Prepared, work: Callable[[], Results]) -> None:
        """Not where the work has an op that waits for the device: the model's, unless other steps went."""
        program = self._programs[name]
        try:
            prepared.captured = self._capture(work)
        except RuntimeError as error:
            prepared.refused = True
            program.refused = not any(one.captured for one in program.buckets.values())
            log.warning(
                "%s of %r on %s are plain calls from now on, which the host slows down: an op of %s cannot "
                "be captured into a CUDA graph (%s).",
                "Steps" if program.refused else "Some steps", name, self.device,
                "this model" if program.refused else "theirs", str(error).partition("\n")[0],
            )  # fmt: skip

    def _fetch(self, staged: Staged, side: Side, results: Results) -> None:
        for name in staged.fetch:
            if name in results and name not in side.fetched:
                pinned = self.device.type == "cuda"
                like = results[name]
                side.fetched[name] = torch.empty(like.shape, dtype=like.dtype, pin_memory=pinned)
            if name in results:
                side.fetched[name].copy_(results[name], non_blocking=True)


def _event(device: torch.device) -> Any:
    """None on a device that is through when a call returns."""
    return torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class GraphHandle:
    """Steps that were queued."""

    def __init__(self, fence: Fence, pending: Sequence[Callable[[], Mapping[str, Any]]], done: Any) -> None:
        self.fence = fence
        self._pending = pending
        self._done = done
        self._outputs: dict[str, Any] | None = None

    def ready(self) -> bool:
        return self._outputs is not None or self._done is None or bool(self._done.query())

    def outputs(self) -> Mapping[str, Any]:
        if self._outputs is None:
            if self._done is not None:
                self._done.synchronize()
            self._outputs = {}
            for finish in self._pending:
                self._outputs.update(finish())
        return self._outputs


def make_executor(context: ExecutorContext) -> GraphExecutor:
    """Factory of the part "cuda-graphs"."""
    device = context.device.id
    chosen = context.options
    capture = Capture(torch.device(device))
    return GraphExecutor(device, capture, prompts=chosen.prompt_graphs, steps=chosen.graph_steps)
