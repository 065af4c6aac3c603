"""Sampling, token trees, drafters and constraints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from attrs import Factory, frozen

if TYPE_CHECKING:
    from torch import Tensor

    from luce_core.contracts.forward import BlockTable, Commit, ForwardBatch
    from luce_core.contracts.model import StateLayout, Tap


@frozen
class SamplingParams:
    """(host) How one request samples. Mirrored into the parameter table, (dev) arrays by slot."""

    temperature: float = 1.0
    top_k: int = 0
    """0 = off."""
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    top_n_sigma: float = 0.0
    """Keep logits within n standard deviations of the best; 0 = off."""
    xtc_probability: float = 0.0
    """Chance per token of removing all top choices but the least likely; 0 = off."""
    xtc_threshold: float = 0.1
    """Probability from which a token is a top choice."""
    dry_multiplier: float = 0.0
    """Penalty on continuing a repeated sequence, times dry_base^(length - dry_allowed_length); 0 = off."""
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: int = 0
    """Newest tokens looked at for repetitions; 0 = all."""
    dry_breakers: frozenset[int] = frozenset()
    """Ids that no repetition reaches across."""
    logit_bias: Mapping[int, float] = Factory(dict)
    seed: int = 0
    logprobs: int = 0
    """1 + alternatives reported per emitted token; 0 = no log-probabilities."""
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    """Act on the device; stop strings are the text layer's business."""


class Noise(Protocol):
    """Counter-based noise: a pure function of its arguments, the same on every host and device."""

    def gumbel(self, seed: Tensor, index: Tensor, token: Tensor) -> Tensor:
        """f32 Gumbel(0,1) for (request seed, index of the emitted token, token id); arguments broadcast."""
        ...


@frozen
class TokenTree:
    """(dev) Candidates behind the last decided row, in topological order; the root is not stored."""

    token: Tensor
    """i32[S, N]."""
    parent: Tensor
    """i16[S, N] node index, -1 = child of the last decided row."""
    survival: Tensor
    """f32[S, N] probability that the node is accepted, as its source believes."""
    source: Tensor
    """u8[S, N] which drafter."""
    count: Tensor
    """i32[S] nodes in use."""


@frozen
class Round:
    """(dev) What a drafter sees before it proposes."""

    slot: Tensor
    """i32[S]."""
    anchor: Tensor
    """i32[S] the last decided token, which has no state yet."""
    length: Tensor
    """i32[S] committed tokens."""
    usable_from: Tensor
    """i32[S] first index with state in every model and layout of this drafter; `length` = there is none.

    Page entries below it are garbage. 0 with nothing lacking, or for a drafter without state.
    """
    history: Tensor
    """i32[slots, context] committed tokens and the anchor."""
    params: Any
    noise: Noise
    capacity: int
    """Nodes per sequence."""
    room: Tensor
    """i32[S] nodes of this sequence that can be run, at most `capacity`: entries length..length+room are
    reserved, and no row of the drafter's may be written beyond.
    """
    shift: Tensor | None = None
    """i32[S] added to an index to get the position; None = 0 (no images before)."""
    table: Mapping[str, BlockTable] = Factory(dict)
    """By "owner/group", as in `ForwardBatch.table`: of every model and drafter; of the target only where its
    MTP block is run.
    """


class Drafter(Protocol):
    """A source of candidates. Lossless by construction: the target's own picks decide.

    Its state, in its models and in `layout`, follows the text as the target's does: after `observe` it stands
    at the committed length, folded, for every sequence of the batch. Rows run in `propose` are held: they
    leave logs and entries beyond the length, never committed state.
    """

    name: str
    taps: tuple[Tap, ...]
    layout: StateLayout
    """What its `PartSpec.layout` said; the handles are in its context."""
    site: Literal["device", "host"]
    """host: costs one synchronization a round."""

    def observe(self, batch: ForwardBatch, commit: Commit | None) -> None:
        """Committed rows and their taps, once, in order. commit None: a prefill batch, all rows."""
        ...

    def propose(self, round: Round) -> TokenTree:
        """Candidates for every sequence of the round, at most `capacity` each."""
        ...


class Constraint(Protocol):
    """(host) A grammar, forced tokens, a tool's arguments: which tokens may come next in one text.

    Engine thread only, between steps: while a mask is made the device has nothing to do.
    """

    @property
    def is_finished(self) -> bool:
        """The text is whole and nothing may follow: it ends here, though no id ended it."""
        ...

    def mask(self, path: Sequence[int], out: Any) -> None:
        """Set bit t % 32 of word t // 32 for every token t allowed behind what was committed and `path`.

        path: tokens that are allowed one after the other, none of which ends the text. out: numpy
        u32[(V + 31) // 32], zeros. Where the text may end here, the ids that end it are allowed, too; nothing
        set: the path leads nowhere.
        """
        ...

    def advance(self, token: int) -> bool:
        """The token is committed, one that ends the text included. False: it was not allowed."""
        ...


class ConstraintSpec(Protocol):
    """What a request says of its constraint: plain data, since it crosses processes and may run again."""

    def start(self, vocab: int, ending: frozenset[int]) -> Constraint:
        """For a new text. ending: ids that end it. On the engine's thread: what takes long was done before.

        Raises what ends the request; a LuceError with its own words.
        """
        ...
