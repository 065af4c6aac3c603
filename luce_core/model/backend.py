"""A network as the engine sees it: forward, commit, and what drafters may ask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attrs import frozen
from torch import Tensor

from luce_core.contracts import (
    Commit,
    ForwardBatch,
    ForwardResult,
    Linear,
    ModelSpec,
    Network,
    Program,
    Region,
    SlotState,
)
from luce_core.errors import EngineError
from luce_core.model.state import ModelState
from luce_core.ops import OpsNamespace


@frozen(eq=False)
class Built:
    """A network ready to run: its methods, direct or as compiled programs."""

    network: Network
    trunk: Callable[[ForwardBatch], Tensor]
    logits: Callable[[Tensor], Tensor]
    record: Callable[[], Recorded]
    """Records everything, before any rewrite. Raises PluginError for a network that is not ops only."""
    nextn: Network | None = None
    """The MTP block, direct or as compiled programs."""


@frozen(eq=False)
class Recorded:
    """The programs of a network."""

    trunk: Program
    """"batch" -> final."""
    logits: Program
    """"final" -> logits."""
    nextn: tuple[NextnPrograms, ...] = ()
    """Of the MTP block, then of whatever goes on from it."""


@frozen(eq=False)
class NextnPrograms:
    """The programs of one network of the chain behind an MTP block."""

    trunk: Program
    """"batch", "final" -> final."""
    logits: Program
    following: int | None
    """Which of the chain goes on from its finals."""


@frozen(eq=False)
class Committed:
    """State that is committed together."""

    regions: tuple[tuple[Region, ...], ...] = ()
    """By group."""
    slots: tuple[SlotState, ...] = ()

    @classmethod
    def of(cls, state: ModelState, chosen: Callable[[str], bool]) -> Committed:
        """Pages and slots with these names."""
        groups = (tuple(one for one in group if chosen(one.name)) for group in state.by_group.values())
        slots = tuple(one for one in state.slots.values() if chosen(one.name))
        return cls(tuple(group for group in groups if group), slots)


class NetworkBackend:
    """`ModelBackend` and `DFlashTarget` over one network. Folds at once, so nothing is ever pending."""

    def __init__(self, spec: ModelSpec, ops: OpsNamespace, state: ModelState) -> None:
        self.spec = spec
        self.ops = ops
        self.state = state
        self._built: Built | None = None
        self._programs: Recorded | None = None
        self._table: tuple[Linear, float] | None = None
        self._own = self._nextn = Committed()

    def attach(self, built: Built) -> None:
        """Run this network from now on, over the state as it lies now."""
        self._built = built
        layout = self.spec.nextn_layout if self.spec.runs_nextn else None
        nextn = frozenset(layout.names if layout else ())
        self._own = Committed.of(self.state, lambda name: name not in nextn)
        self._nextn = Committed.of(self.state, nextn.__contains__)

    def detach(self) -> None:
        """Forget the network and with it the weights."""
        self._built = self._programs = self._table = None
        self._own = self._nextn = Committed()

    @property
    def network(self) -> Any:
        """What the architecture built."""
        return self._running().network

    @property
    def nextn(self) -> Network | None:
        """The MTP block, where its state is allocated."""
        return self._running().nextn

    def forward(self, batch: ForwardBatch) -> ForwardResult:
        """Run one batch. logits for the wanted rows when held; prefill gives `final` only."""
        if batch.pending is not None:
            raise EngineError(
                f"Model {self.state.model!r} was given a batch with a pending commit, but it folds at once: "
                "call `commit`."
            )
        built = self._running()
        final = built.trunk(batch)
        for tap, buffer in batch.taps.items():
            if tap.kind == "final":
                buffer[: final.shape[0]].copy_(final)
        rows = final.index_select(0, batch.wanted)
        return ForwardResult(rows, built.logits(rows) if batch.phase == "held" else None)

    def commit(self, batch: ForwardBatch, commit: Commit) -> None:
        """Apply the accepted rows of a held batch to pages and slots; count 0 leaves a sequence as it was."""
        self._commit(batch, commit, self._own)

    def commit_nextn(self, batch: ForwardBatch, commit: Commit) -> None:
        """The same for the state of the MTP block, after its trunk ran over the batch."""
        self._commit(batch, commit, self._nextn)

    def _commit(self, batch: ForwardBatch, commit: Commit, state: Committed) -> None:
        for regions in state.regions:
            self.ops.commit_pages(batch, commit, regions)
        self.ops.commit_slots(batch, commit, state.slots)

    def settle(self, slots: Sequence[int]) -> None:
        """Nothing to finish: commits fold at once."""

    # --- what drafters may ask

    def embed(self, token: Tensor) -> Tensor:
        """i32[T] -> f32[T, E], as the network embeds it: the same table and scale."""
        if self._table is None:
            self._table = _embedding(self.programs()[0])
        table, scale = self._table
        rows: Tensor = self.ops.table_rows(table, token)
        return rows if scale == 1.0 else rows * scale

    def head(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """[R, final_width] -> f32[R, V], or f32[R, len(ids)]."""
        logits = self._running().logits(hidden)
        return logits if ids is None else logits.index_select(1, ids)

    def region(self, name: str) -> Region:
        """Pages of this model. Read-only to the caller."""
        return self.state.regions[name]

    def programs(self) -> tuple[Program, Program]:
        """The recorded trunk ("batch" -> final) and logits ("final" -> logits), without rewrites."""
        if self._programs is None:
            self._programs = self._running().record()
        return self._programs.trunk, self._programs.logits

    def nextn_programs(self) -> tuple[NextnPrograms, ...]:
        """Those of the MTP block and of what goes on from it; empty without one."""
        self.programs()
        return self._programs.nextn if self._programs else ()

    def _running(self) -> Built:
        if self._built is None:
            raise EngineError(f"Model {self.state.model!r} is parked. Call `unpark` before it is used.")
        return self._built


def _embedding(trunk: Program) -> tuple[Linear, float]:
    """Table and scale of the program's embed call."""
    for call in trunk.calls:
        if call.op == "embed":
            given = dict(zip(("b", "table", "scale"), call.args, strict=False))
            named = {"scale": 1.0, **given, **call.kwargs}
            return named["table"], named["scale"]
    raise EngineError("This model's program has no 'embed' call, so a drafter cannot embed tokens with it.")
