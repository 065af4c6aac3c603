"""One forward: the batch, its commit, and who runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from attrs import Factory, evolve, frozen

if TYPE_CHECKING:
    from torch import Tensor

    from luce_core.contracts.model import ModelSpec, Region, Tap
    from luce_core.contracts.plugin import ModelPlan


@frozen
class BlockTable:
    """Where the entries of a group lie. Blocks carry their first index, so evicted blocks leave no gap to
    walk.
    """

    block: Tensor
    """(dev) i32[S, B] block id; columns at or beyond `count` are padding."""
    first: Tensor
    """(dev) i32[S, B] first token index of each block; rising along B."""
    count: Tensor
    """(dev) i32[S] blocks in use."""


@frozen
class ForwardBatch:
    """Rows of one phase; a step is a list of batches. All tensors (dev).

    prefill: writes through: pages at `index`, slots in place; never samples.
    held: `sure` decided rows per sequence, then candidate nodes. Committed state stays as it is: page
    entries of row j of a sequence are written at `length + j` (garbage until committed), slots leave a log.
    `commit` applies accepted rows. As many rows as sequences: one of each.
    """

    phase: Literal["held", "prefill"]
    token: Tensor
    """i32[T]."""
    index: Tensor
    """i32[T] place in the sequence: masks, pages, noise."""
    position: Tensor
    """i32[axes, T], RoPE only."""
    seq: Tensor
    """i32[T] sequence of the batch (0..S-1) each row belongs to."""
    query_start: Tensor
    """i32[S+1]; rows of sequence s are query_start[s]..query_start[s+1]."""
    slot: Tensor
    """i32[S] row of the per-sequence tables: parameters, slot states."""
    length: Tensor
    """i32[S] committed tokens before this batch."""
    sure: Tensor
    """i32[S] decided held rows; candidates follow them."""
    parent: Tensor
    """i32[T] held: row within its sequence; -1 root, -2 padding."""
    sees: Tensor
    """i64[T, words] held: bit j = sees row j of its own sequence (itself included)."""
    table: Mapping[str, BlockTable]
    """By group name of the model that runs the batch; beside them, by "owner/group", those of other models
    and of drafters with state of their own. `of` makes the latter the former.
    """
    wanted: Tensor
    """i32[R] rows whose logits are wanted."""
    pending: Commit | None = None
    """A backend that defers folding applies this first."""
    taps: Mapping[Tap, Tensor] = Factory(dict)
    """bf16[T, tap_width] each, filled by `ops.tap`; [T, final_width] of kind "final"."""
    embeds: Tensor | None = None
    embed_rows: Tensor | None = None
    """i32[M] rows that take `embeds` [M, E] instead of the table; `token` holds the placeholder there."""
    span: Tensor | None = None
    """i32[T] bidirectional span, -1 causal (prefill)."""
    mask: Tensor | None = None
    """i32[R, (V + 31) // 32] held: bit t % 32 of word t // 32 = token t may be picked; None = all may."""
    padded: bool = False
    """prefill: rows from query_start[S] on stand for nothing. Ops leave state alone for them and give finite
    values. Only for programs all of whose ops take it: `takes_padding`.
    """

    def of(self, owner: str) -> ForwardBatch:
        """The same rows for the state of `owner`, a model or drafter: what its forward, ops and commit take.

        Its tables stand under bare group names. Without the target's taps, embeddings, pending commit and
        mask; positions are the target's.
        """
        return evolve(
            self, table=tables_of(self.table, owner), taps={}, embeds=None, embed_rows=None, pending=None,
            mask=None,
        )  # fmt: skip


def tables_of(table: Mapping[str, BlockTable], owner: str) -> dict[str, BlockTable]:
    """The tables named "owner/group", under their bare group names."""
    prefix = f"{owner}/"
    return {key.removeprefix(prefix): one for key, one in table.items() if key.startswith(prefix)}


@frozen
class Commit:
    """Which held rows were accepted. count 0 discards the batch. Sequences in the batch's order."""

    path: Tensor
    """(dev) i32[S, P] rows within the sequence, root to last accepted, rising."""
    count: Tensor
    """(dev) i32[S]."""


@frozen
class ForwardResult:
    final: Tensor
    """(dev) [R, final_width]."""
    logits: Tensor | None
    """(dev) f32[R, V]; None in prefill."""


class Network(Protocol):
    """What an architecture plugin writes, with `ops.*` calls and views only, so that a recording is
    complete.
    """

    nextn: Network | None
    """The MTP block: `trunk(batch, final of the previous token)`; zeros where there is none. Its own `nextn`
    is what goes on from the finals it gives. None where the layout has no state for it (`runs_nextn`).
    """

    def trunk(self, batch: ForwardBatch, final: Tensor | None = None) -> Tensor:
        """All layers -> [T, final_width], before the final norm."""
        ...

    def logits(self, final: Tensor) -> Tensor:
        """[R, final_width] -> f32[R, V]."""
        ...


class ModelBackend(Protocol):
    """A model as the engine sees it. Engine thread only."""

    @property
    def spec(self) -> ModelSpec:
        """What was loaded."""
        ...

    def forward(self, batch: ForwardBatch) -> ForwardResult:
        """Run one batch. Does not synchronize; allocates nothing beyond its workspace when held."""
        ...

    def commit(self, batch: ForwardBatch, commit: Commit) -> None:
        """Apply the accepted rows of a held batch (or discard them all)."""
        ...

    def settle(self, slots: Sequence[int]) -> None:
        """Finish deferred folds of these slots; called before checkpoint, fork or move."""
        ...


class DFlashTarget(Protocol):
    """All a drafter may ask of its target."""

    @property
    def spec(self) -> ModelSpec:
        """What the target is."""
        ...

    @property
    def nextn(self) -> Network | None:
        """The target's MTP block, for drafters that need "nextn". Its state is the target's: it runs on the
        target's batches as they are, in `propose` on chains of the target's name. Ask anew after `unpark`.
        """
        ...

    def commit_nextn(self, batch: ForwardBatch, commit: Commit) -> None:
        """Apply the accepted rows to the state of the MTP block, after its trunk ran over the batch.

        `ModelBackend.commit` leaves that state alone: it comes before `observe`, where the block runs.
        """
        ...

    def embed(self, token: Tensor) -> Tensor:
        """i32[T] -> [T, E]."""
        ...

    def head(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """[R, final_width] -> f32[R, V], or f32[R, len(ids)] for a vocabulary subset."""
        ...

    def region(self, name: str) -> Region:
        """Read-only pages of the target, for drafters that attend to its cache."""
        ...


class LoadedModel(Protocol):
    """A model in memory."""

    @property
    def plan(self) -> ModelPlan:
        """What was asked for."""
        ...

    @property
    def backend(self) -> ModelBackend:
        """Forward and commit."""
        ...

    @property
    def network(self) -> Any:
        """What its architecture's `build` returned; EngineError while it is parked."""
        ...

    @property
    def ops(self) -> Any:
        """Its namespace: reference ops with the plan's layers over them."""
        ...

    @property
    def target(self) -> DFlashTarget:
        """What drafters may ask of it."""
        ...

    @property
    def tokenizer(self) -> Any:
        """Made from the same file."""
        ...

    @property
    def generation(self) -> int:
        """Rises whenever addresses change (unpark): captured graphs must be remade."""
        ...

    def park(self) -> None:
        """Give the device memory back; the model answers no forward until `unpark`."""
        ...

    def unpark(self) -> None:
        """Take the device memory again."""
        ...


class ModelLoader(Protocol):
    """Loads targets, drafters' and scorers' models alike."""

    def load(self, plan: ModelPlan, layer: Mapping[str, Callable[..., Any]] | None = None) -> LoadedModel:
        """Map the file, pack the weights, allocate the state. `layer`: a part's own ops, laid on top for
        this model.
        """
        ...
