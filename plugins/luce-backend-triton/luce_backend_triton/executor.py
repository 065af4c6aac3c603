"""Executor `cuda-graphs`: a step that was seen before is one replayed graph. The host queues it and goes on.

The first step of a bucket runs as plain calls over its static buffers: that compiles kernels and makes
workspaces grow. The second captures, all later ones replay. Programs without static buffers are plain calls.
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
"""Of a program: a graph of a thousand nodes takes the driver about a megabyte."""


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
        whose = "thread_local"
        with torch.cuda.device(self.device), torch.cuda.graph(graph, self._pool, capture_error_mode=whose):
            results = work()
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


@define(eq=False)
class Prepared:
    """One bucket."""

    buffers: StageBuffers
    captured: Captured | None = None
    fetched: dict[str, Tensor] = field(factory=dict)
    """Host copies of results."""


class GraphExecutor:
    """`Executor`. Engine thread only. At most one submission is under way: the next waits for it."""

    def __init__(
        self, device: str, capture: Callable[[Callable[[], Results]], Captured], *, prompts: bool = False
    ) -> None:
        """prompts: whether they are captured too."""
        self.device = torch.device(device)
        self.compiles = self.device.type == "cuda"
        self._capture = capture
        self._prompts = prompts
        self._programs: dict[str, Program] = {}
        self._fence = 0
        self._done: Any = torch.cuda.Event() if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]

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
        self._wait()  # buffers of the step before are about to be written
        pending = [self._start(step) for step in steps]
        if self._done is not None:
            self._done.record()
        self._fence += 1
        return GraphHandle(Fence(self._fence), pending, self._done)

    def _wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()

    def _start(self, step: Step) -> Callable[[], Mapping[str, Any]]:
        """Queue one step -> what makes its outputs, once the device is through."""
        program = self._programs[step.program]
        staged = program.staged
        bucket = None if staged is None or program.refused else staged.bucket(step.inputs)
        if staged is None or bucket is None:
            outputs = program.call(**step.inputs)
            return lambda: outputs
        if program.generation != staged.generation:
            program.buckets.clear()
            program.generation = staged.generation
        prepared = program.buckets.pop(bucket, None)
        first = prepared is None
        if prepared is None:
            if len(program.buckets) == MOST_BUCKETS:
                program.buckets.pop(next(iter(program.buckets)))  # the one that was used longest ago
            prepared = Prepared(staged.stage(bucket))
        program.buckets[bucket] = prepared
        buffers = prepared.buffers
        staged.fill(buffers, step.inputs)
        buffers.device.copy_(buffers.host, non_blocking=True)
        if first:
            results = staged.compute(buffers)
        else:
            if prepared.captured is None:
                prepared.captured = self._captured(step.program, partial(staged.compute, buffers))
            if prepared.captured is None:
                outputs = program.call(**step.inputs)
                return lambda: outputs
            prepared.captured.replay()
            results = prepared.captured.results
        fetched = self._fetch(staged, prepared, results)
        return partial(staged.finish, buffers, {**results, **fetched}, step.inputs)

    def _captured(self, name: str, work: Callable[[], Results]) -> Captured | None:
        """A graph; None where the work has an op that waits for the device."""
        try:
            return self._capture(work)
        except RuntimeError as error:
            self._programs[name].refused = True
            log.warning(
                "Steps of %r on %s are plain calls from now on, which the host slows down: an op of this "
                "model cannot be captured into a CUDA graph (%s).",
                name, self.device, str(error).partition("\n")[0],
            )  # fmt: skip
            return None

    def _fetch(self, staged: Staged, prepared: Prepared, results: Results) -> dict[str, Tensor]:
        for name in staged.fetch:
            if name in results and name not in prepared.fetched:
                pinned = self.device.type == "cuda"
                like = results[name]
                prepared.fetched[name] = torch.empty(like.shape, dtype=like.dtype, pin_memory=pinned)
            if name in results:
                prepared.fetched[name].copy_(results[name], non_blocking=True)
        return prepared.fetched


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
    return GraphExecutor(device, Capture(torch.device(device)), prompts=context.options.prompt_graphs)
