"""Prompt preparation, scheduling and execution."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from attrs import frozen

if TYPE_CHECKING:
    from luce_core.contracts.model import Fence, SeqId
    from luce_core.contracts.plugin import Claim
    from luce_core.contracts.staged import Staged


@frozen
class ReducedPrompt:
    messages: Sequence[Mapping[str, Any]]
    report: Mapping[str, Any]


class PromptReducer(Protocol):
    """messages -> fewer messages, with a report; cooperative."""

    def reduce(self, conversation: Any, max_tokens: int) -> Iterator[ReducedPrompt | None]:
        """Yields None after each 50 ms of device work at most, then the result."""
        ...


@frozen
class SeqView:
    """(host) A sequence as the scheduler sees it."""

    seq: SeqId
    length: int
    """Committed tokens."""
    prompt: int
    """Tokens the prompt phase must commit before the first held row: the prompt less its last token."""
    arrived_s: float
    constrained: bool
    """Each of its steps waits for the host, which makes a mask for the next token."""
    barrier: int
    """Next index where the host must act; no row at or beyond it this step."""
    nodes: int
    """Candidate nodes the controller would like."""
    spans: tuple[tuple[int, int], ...] = ()
    """Prompt ranges no chunk may cut."""
    priority: int = 0
    """Higher first."""
    tenant: str = ""
    """Who it is from; all requests of one tenant share what the tenant gets."""
    served: int = 0
    """Rows the tenant was given, counted so that whoever comes back after a pause starts level with the rest.

    The same for all sequences of a tenant; only differences between tenants mean something.
    """


@frozen
class Work:
    """Rows of one sequence in one step. held: one decided row plus `rows - 1` candidate nodes."""

    seq: SeqId
    phase: Literal["held", "prefill"]
    rows: int


class Scheduler(Protocol):
    """Pure policy: no tensors, no clocks of its own, no memory between calls that changes meaning."""

    def plan(
        self,
        waiting: Sequence[SeqView],
        running: Sequence[SeqView],
        row_budget: int,
        fits: Callable[[SeqId, int], bool],
    ) -> tuple[Sequence[Work], Sequence[SeqId]]:
        """The work of one step, and sequences to preempt.

        A waiting sequence is admitted by giving it work. `fits(seq, rows)`: whether its state has room for
        that many more.
        The engine refuses (as a bug of the plugin) work that exceeds the budget, cuts a span or reaches a
        barrier.
        """
        ...


@frozen
class Step:
    """One program run. Inputs are (host) data only: the same bytes reach every shard."""

    program: str
    bucket: tuple[int, ...]
    inputs: Mapping[str, Any]


class StepHandle(Protocol):
    fence: Fence

    def ready(self) -> bool:
        """Whether `outputs` would return at once."""
        ...

    def outputs(self) -> Mapping[str, Any]:
        """(host) Waits for the device."""
        ...


class Executor(Protocol):
    """How programs run: eager, graphs, megakernel, shards."""

    compiles: bool
    """Whether the first step of a kind takes much longer than later ones; the engine then runs some before it
    serves (`--no-warmup`: not).
    """
    steps_ahead: int
    """Steps that `follow` takes at once. 0: none, and `submit` returns when the device is through."""

    def prepare(
        self,
        name: str,
        fn: Callable[..., Any],
        buckets: Sequence[tuple[int, ...]],
        staged: Staged | None = None,
    ) -> Claim:
        """Make `fn` runnable as `name`; returns the memory it takes. staged: the same over static buffers,
        for executors that capture.
        """
        ...

    def submit(self, steps: Sequence[Step]) -> StepHandle:
        """Queue steps in order. Adjacent steps without a host window may fuse."""
        ...

    def follow(self, step: Step) -> StepHandle | None:
        """Queue a step behind the one submitted last, whose outputs have not been read: its rows have AHEAD
        for the tokens picked there. At most these two are under way. The engine asks for `steps_ahead` of
        them at once (input "steps") where as many can be, else for one: each takes what the one before
        picked, and all are read together.

        None: not this; a step is submitted when its tokens are known. A row behind the end of its text picks
        AHEAD and leaves state as it was.
        """
        ...
