"""Who holds which bytes: broker, blocks, residency, experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol

from attrs import frozen

if TYPE_CHECKING:
    from torch import Tensor

    from luce_core.contracts.model import Fence, Group, Linear, SeqId
    from luce_core.contracts.plugin import Claim


class MemoryBroker(Protocol):
    """One per device and process: arbitrates what moves after start-up."""

    def lease(self, claim: Claim) -> AbstractContextManager[None]:
        """Hold `claim.num_bytes` while the context lasts; reclaims in declared order, else raises
        CapacityError.
        """
        ...

    def offer(self, owner: str, reclaim: Callable[[int], int]) -> None:
        """`reclaim(bytes wanted) -> bytes freed`, called in the order offers were made."""
        ...


@frozen
class Hit:
    """A prefix that can be restored in every group and slot of the target."""

    length: int
    checkpoint: int | None
    """Snapshot of the slots at exactly `length`, where the layout has slots or windows."""


@frozen
class StateSizes:
    """How much state one engine holds; decided by the plan, obeyed by whoever allocates."""

    block_tokens: int
    """Tokens one block covers; a group of stride n has block_tokens / n entries per block."""
    num_blocks: Mapping[str, int]
    """By "owner/group"; the owner is a model, or a drafter with state of its own."""
    num_slots: int
    """Sequences that may run at once; rows of every per-sequence table."""
    max_held_rows: int
    """Rows of one sequence a held batch may carry; the length of every slot log."""
    k_type: str = "f16"
    v_type: str = "f16"


class StateStore(Protocol):
    """The allocated state of all models and drafters of one engine. The block manager decides, this moves
    bytes.

    Block ids run from 0 to num_blocks - 1 in every group. Engine thread only; work is queued behind what
    was submitted.
    """

    sizes: StateSizes
    groups: Mapping[str, Group]
    """By "model/group"."""
    has_slots: bool
    slot_bytes: int
    """The most bytes one saved slot takes, over all models."""
    block_bytes: Mapping[str, int]
    """Bytes one block takes, by "model/group"."""

    def copy_blocks(self, group: str, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole blocks, in order."""
        ...

    def read_blocks(self, group: str, blocks: Sequence[int]) -> Any:
        """(host) An opaque copy of these blocks."""
        ...

    def write_blocks(self, group: str, blocks: Sequence[int], saved: Any) -> None:
        """Put back what `read_blocks` returned, into these blocks."""
        ...

    def reset_slot(self, slot: int) -> None:
        """The state before the first token."""
        ...

    def copy_slot(self, source: int, target: int) -> None:
        """Copy the committed state of a slot; logs are not copied."""
        ...

    def save_slot(self, slot: int, length: int) -> Any:
        """(host) An opaque snapshot of the committed state, after `length` tokens.

        It may be filled after the return, in the order of the device's work: what is queued later does not
        change it. `load_slot` waits for it.
        """
        ...

    def snapshot_bytes(self, length: int) -> int:
        """Bytes a snapshot after `length` tokens takes, over all models: see `Slot.period`."""
        ...

    def load_slot(self, slot: int, saved: Any) -> None:
        """Put back a snapshot."""
        ...


@frozen
class SeqTable:
    """(host) The blocks of one sequence in one group."""

    blocks: tuple[int, ...]
    firsts: tuple[int, ...]
    """First token index of each block."""


@frozen
class CacheStats:
    """Figures for metrics; blocks by "model/group"."""

    used_blocks: Mapping[str, int]
    cached_blocks: Mapping[str, int]
    free_blocks: Mapping[str, int]
    """Including those that wait for a fence."""
    cached_bytes: int
    host_bytes: int
    checkpoints: int
    asked_tokens: int
    """Prompt tokens of every sequence opened."""
    hit_tokens: int
    evictions: int
    spills: int
    copies: int
    """Blocks made private by copying."""
    retained: int
    """Stopped sequences that come back."""
    swap_bytes: int
    """Bytes of theirs in host memory."""
    swaps: int
    """Entries copied there."""
    sequences: int
    free_slots: int


class BlockManager(Protocol):
    """Paged, reference-counted, copy-on-write state of all sequences of one engine; regions are named
    "model/region".

    Keys: one int per token, the id, or a content hash under an embedded row. A stale SeqId raises KeyError.
    """

    def match(self, keys: Sequence[int]) -> Hit:
        """The longest cached prefix of `keys`."""
        ...

    def open(self, keys: Sequence[int], hit: Hit) -> SeqId:
        """A new sequence holding the hit's prefix."""
        ...

    def reserve(self, seq: SeqId, tokens: int) -> bool:
        """Blocks for `tokens` more entries in every group, or nothing and False. Makes shared blocks
        private.
        """
        ...

    def fits(self, seq: SeqId, tokens: int, *, step_tokens: int | None = None) -> bool:
        """Whether `reserve` would find room, in steps of at most `step_tokens`; changes nothing."""
        ...

    def room(self, tokens: int, *, step_tokens: int | None = None) -> bool:
        """Whether a new sequence of `tokens` tokens that shares nothing would find a slot and blocks."""
        ...

    def advance(self, seq: SeqId, keys: Sequence[int]) -> None:
        """`keys` are committed; entries at index >= length are garbage."""
        ...

    def length(self, seq: SeqId) -> int:
        """Committed tokens."""
        ...

    def slot(self, seq: SeqId) -> int:
        """The sequence's row of every per-sequence table."""
        ...

    def tables(self, seq: SeqId) -> Mapping[str, SeqTable]:
        """The sequence's blocks, by "model/group"."""
        ...

    def fork(self, seq: SeqId) -> SeqId:
        """A second sequence with the same content, sharing blocks until one writes."""
        ...

    def checkpoint(self, seq: SeqId) -> int:
        """Keep slots, window blocks and residency at this length; returns the checkpoint's id."""
        ...

    def retain(self, seq: SeqId, most_bytes: int) -> int | None:
        """Before `close`, of a sequence that comes back: what is evicted of it goes to host memory. None
        where that is more than `most_bytes`, or than there is room for.
        """
        ...

    def release(self, retained: int) -> None:
        """The sequence is back, or never will be: forget what `retain` kept."""
        ...

    def usable_from(self, seq: SeqId) -> Mapping[str, int]:
        """By owner of a best-effort layout: first token index from which its state is there."""
        ...

    def retire(self, fence: Fence) -> None:
        """The device is past `fence`: what was closed behind it may be reused."""
        ...

    def close(self, seq: SeqId, after: Fence) -> None:
        """Give the blocks back once `after` has retired; full blocks stay as cached prefix."""
        ...

    def move(self, blocks: Sequence[int], tier: Literal["device", "host", "disk"], after: Fence) -> Fence:
        """Change the tier of blocks; returns the fence after which they are there."""
        ...

    def clear(self) -> None:
        """Forget everything cached."""
        ...

    def start_over(self) -> None:
        """As new: nothing cached, nothing counted. Called when no sequence is open."""
        ...

    def stats(self) -> CacheStats:
        """Gauges and counters: blocks used, cached and free, hit tokens, evictions."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError with the values when counts, tables and index disagree."""
        ...


class ResidencyPolicy(Protocol):
    """Which chunks of a sequence stay. Pure: depends on the committed text, never on rounds or neighbours."""

    chunk_tokens: int
    pool_tokens: int
    """Per sequence."""

    def next_decision(self, index: int) -> int:
        """The next index at which `select` must run: a barrier."""
        ...

    def select(self, chunks: int, resident: frozenset[int], scores: Sequence[float] | None) -> frozenset[int]:
        """The chunks that stay or come back."""
        ...


class ChunkScorer(Protocol):
    """Scores chunks for a residency policy."""

    def score(self, seq: SeqId, chunks: int) -> Iterator[Sequence[float] | None]:
        """Yields None while there is more to do, then the scores."""
        ...


@frozen
class ExpertStack:
    """Experts of one layer, packed: every matrix holds `count` experts one below the other.

    A bias has one row per expert, a scale is one factor or f32[count]. Read by `ops.moe_linear`.
    """

    count: int
    gate_up: tuple[Linear, ...]
    """gate and up, [count · F, E] each; or one fused [count · 2F, E], the gate rows of an expert first."""
    down: Linear
    """[count · E, F]."""


class ExpertBank(Protocol):
    """What `ops.experts` reads. Addresses never change, contents only between steps."""

    @property
    def lut(self) -> Tensor:
        """(dev) i32[X] place of each expert in the stack, -1 = not resident."""
        ...

    @property
    def stack(self) -> ExpertStack:
        """What is resident."""
        ...

    @property
    def mailbox(self) -> Any:
        """Where experts that are not resident are asked for. None: every expert is resident."""
        ...


class ExpertStore(Protocol):
    """Fills expert banks: pinned, ring, host, SSD."""

    def bank(self, layer: int) -> ExpertBank:
        """The bank of `layer`."""
        ...

    def hint(self, tokens: Sequence[int]) -> None:
        """Tokens of rows about to run: hash routes, drafted trees."""
        ...

    def rebalance(self, counts: Any) -> None:
        """Between steps; rewrites contents, never addresses."""
        ...
