"""What a model is and what a sequence must remember for it. Torch-free at run time.

Letters used in every contract: T rows, S sequences, R logit rows, N tree nodes, P path, E hidden, H/Hk
query/KV heads,
D head dim, X experts, V vocabulary. (dev) = device tensor at a fixed address, legal in a captured graph.
(host) = plain
Python or numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NewType, Protocol

from attrs import Factory, frozen

from luce_core.contracts.codec import CodedField

if TYPE_CHECKING:
    from torch import Tensor

    from luce_core.contracts.memory import ExpertBank

SeqId = NewType("SeqId", int)
"""Never reused by an engine; a stale id raises."""
Fence = NewType("Fence", int)
"""Rises with every submit; "retired" = the device is past it."""


@frozen
class Field:
    """One tensor per entry (pages) or per sequence (slots)."""

    shape: tuple[int, ...]
    dtype: str
    """"f32", "f16", "bf16", "i32", "i64", "u8"; "kv.k"/"kv.v" = what the plan chose for the cache, one of
    these or a codec of `contracts.codec`, which is kept as u8.
    """


@frozen
class Group:
    """Regions that share one block table."""

    name: str
    stride: int = 1
    """One entry per `stride` tokens."""
    window: int | None = None
    """Only the newest `window` tokens are ever read; None = all."""


@frozen
class Pages:
    """Positional state. Entries at or beyond the committed length are garbage: rolling back is shortening.

    Several layers may read one region; `layer` only places it on a device.
    """

    name: str
    group: str
    layer: int
    fields: Mapping[str, Field]
    """Per entry: {"k","v"}, {"v"}, {"latent","rope"}, {"key"}, ..."""


@frozen
class Slot:
    """State without positions: one `state` per sequence, changed only by folding accepted rows into it."""

    name: str
    layer: int
    state: Field
    log: Mapping[str, Field]
    """What one held row leaves so that `fold` can apply it later."""
    fold: str
    """Op (state, log rows in path order) -> state; "shift": append the rows, keep the newest shape[0]."""
    period: int = 1
    """shift: rows of finished periods but the newest shape[0] - period are never read again, so a snapshot at
    `length` keeps shape[0] - period + length % period rows. 1: all of them.
    """


@frozen
class StateLayout:
    """Everything a sequence must remember, for a target or a drafter."""

    groups: tuple[Group, ...]
    pages: tuple[Pages, ...]
    slots: tuple[Slot, ...] = ()
    best_effort: bool = False
    """Drafters: a prefix hit may lack it."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of pages and slots."""
        return (*(pages.name for pages in self.pages), *(slot.name for slot in self.slots))


@frozen
class Tap:
    """A place drafters read: the residual after `layer` (before the final norm), or the input of the head."""

    kind: Literal["residual", "final"]
    layer: int


@frozen
class StoredSize:
    """Size of a table that stays in the model's file; a few of its rows are read per token."""

    parameters: int
    num_bytes: int
    """In the file."""


@frozen
class LayerWidths:
    """How wide a row gets in a layer, in numbers: results and columns of the products with weights."""

    mixer_in: int = 0
    """Results in front of attention, or of what stands in its place."""
    mixer_out: int = 0
    """Columns of the product behind it."""
    ffn_in: int = 0
    """Results in front of the activation of an MLP that every row takes: gate and up."""
    ffn_out: int = 0
    """Columns of the product behind it."""
    expert_in: int = 0
    """The same of one routed expert."""
    expert_out: int = 0
    experts: int = 0
    """That the router chooses among."""
    experts_used: int = 0
    """By a row."""
    norm_behind: int = 0
    """Of the result of a half, where that is normed before it joins the residual."""


@frozen
class BorrowedEncoder:
    """Image encoders a text model may be given though they were made for another one."""

    families: tuple[str, ...]
    """Of projector files: "clip.TYPE"."""
    placeholder: str
    """Text of the token that stands for each of their rows; "" = the file's vocabulary has none."""
    wanted: tuple[str, ...]
    """Tokens that could, best first."""
    caution: str
    """What the plan says to who does it: one sentence."""


@frozen
class ModelSpec:
    """A model as far as planning needs it; made from the header alone."""

    arch: str
    identity: str
    """Hash of weights, tokenizer and rope; part of every cache key."""
    num_layers: int
    hidden: int
    vocab: int
    context: int
    """Tokens the model was trained for."""
    position_axes: int
    """1, or 3 for M-RoPE."""
    tap_width: int
    final_width: int
    """Both differ from `hidden` when the residual is several streams."""
    layout: StateLayout
    nextn_layout: StateLayout | None
    """State of the MTP block, where the file has one. The plan makes it part of `layout` when a drafter needs
    "nextn"; without, the block is not built and its weights stay in the file.
    """
    tree: Literal["any", "chain", "none"]
    """Shapes of candidates a held batch may carry."""
    tokens: Mapping[str, tuple[int, ...]]
    """"eos", "pad", "image", ..."""
    parameters: int = 0
    """Of the weights in memory, as `weight_bytes`."""
    weight_bytes: int = 0
    rows_bytes: Mapping[tuple[str, int], int] = Factory(dict)
    """`weight_bytes` by (block format, columns of a row)."""
    active_bytes: int = 0
    """Weight bytes one decoded token reads; equals `weight_bytes` less the embedding table for dense
    models.
    """
    prompt_parameters: int = 0
    """Weights one row of a prompt is multiplied with: neither tables nor the head, of experts those used."""
    details: Mapping[str, Any] = Factory(dict)
    """The architecture's own hyper-parameters, for its `build` and for `inspect`."""
    stored: Mapping[str, StoredSize] = Factory(dict)
    """Tables that stay in the file, by tensor; in neither `parameters` nor `weight_bytes`."""
    nextn_size: StoredSize | None = None
    """Of `parameters` and `weight_bytes`, what is the MTP block's alone."""
    widths: tuple[LayerWidths, ...] = ()
    """Of each layer; () = not known."""
    borrows: BorrowedEncoder | None = None
    """None: a processor decides by itself whether its encoder goes with this model."""

    @property
    def runs_nextn(self) -> bool:
        """Whether the MTP block's state is allocated, and so the block is there to be run."""
        if self.nextn_layout is None:
            return False
        return set(self.nextn_layout.names) <= set(self.layout.names)


@frozen
class Linear:
    """A weight matrix [out, in], packed for its device by `ops.pack_linear`; y = (x Wᵀ) · scale + bias."""

    name: str
    out_features: int
    in_features: int
    format: str
    """GGUF block format of the bytes in the file."""
    packed: Any
    """Whatever `ops.pack_linear` of the model's op layers made; only ops of the same layers read it."""
    bias: Tensor | None = None
    """f32[out]."""
    scale: Tensor | None = None
    """f32 scalar; of a stack of experts, f32[count]."""


@frozen
class LinearGroup:
    """Several linears on one input: one launch, one result per member."""

    members: tuple[Linear, ...]
    packed: Any = None
    """What `ops.pack_group` made, or None: the members one by one."""


@frozen
class RawLinear:
    """What `ops.pack_linear` is given: bytes exactly as in the file, still mapped, plus how to read them."""

    name: str
    format: str
    shape: tuple[int, int]
    """(out, in)."""
    data: Any
    """(host) numpy uint8[out, row_bytes], read-only view of the file or a row slice of it."""
    device: str


@frozen
class Norm:
    """RMS norm: w * x / sqrt(mean(x²) + eps), in f32."""

    weight: Tensor
    """f32[width]."""
    eps: float


@frozen
class Region:
    """Allocated Pages of one model: what `Weights.region` returns and `ops.attention` reads."""

    name: str
    group: str
    fields: Mapping[str, Tensor]
    """(dev) field -> [num_blocks, block_entries, *shape]; one of `codecs`: u8, the last axis in bytes."""
    block_entries: int
    stride: int = 1
    window: int | None = None
    log: Mapping[str, Tensor] = Factory(dict)
    """(dev) stride above 1: field -> [slots, max_held_rows, *shape], the entries that held rows closed, by
    the row that closed each. Branches of a tree may close the same entry.
    """
    codecs: Mapping[str, CodedField] = Factory(dict)
    """Fields kept as codes: whoever reads or writes them decodes and encodes. All others are numbers."""


@frozen
class SlotState:
    """An allocated Slot of one model."""

    name: str
    state: Tensor
    """(dev) [slots, *shape]."""
    log: Mapping[str, Tensor]
    """(dev) field -> [slots, max_held_rows, *shape]."""
    fold: str
    period: int = 1


class StoredTable(Protocol):
    """A matrix [rows, width] that stays in the model's file; read by row, never mapped or loaded whole."""

    name: str
    num_rows: int
    width: int

    def read(self, rows: Any) -> Any:
        """(host) numpy int[...] -> new numpy f32[..., width].

        Raises IndexError for a row that is none, ModelFormatError where the file ends early.
        """
        ...


class StateHandles(Protocol):
    """The allocated state of one model or drafter, by the names of its layout; KeyError for any other."""

    def region(self, name: str) -> Region:
        """The allocated Pages called `name`."""
        ...

    def slot(self, name: str) -> SlotState:
        """The allocated Slot called `name`."""
        ...


class Weights(Protocol):
    """One model's tensors, by GGUF name without the `.weight` suffix. Bytes stay quantized; packing happens
    here.

    Every method raises `ModelFormatError` naming the tensor when it is missing or mis-shaped. Start-up
    thread only.
    """

    def has(self, name: str) -> bool:
        """Whether the file holds `name.weight` (or `name` itself)."""
        ...

    def linear(self, *names: str, split: Literal["", "out", "in"] = "", heads: int = 0) -> Linear:
        """The first of `names` present, with `.bias` and `.scale` where the file has them.

        split: how the matrix may be sharded, by output or input features; heads: the unit it may be cut at.
        A stack [G, out, in] counts as [G · out, in].
        """
        ...

    def group(
        self,
        prefix: str,
        *names: str,
        fused: str = "",
        rows: tuple[int, ...] = (),
        split: Literal["", "out", "in"] = "",
    ) -> LinearGroup:
        """Several linears on one input: `prefix + name` each, or row slices of `prefix + fused` when the
        file has that.
        """
        ...

    def vec(self, name: str) -> Tensor:
        """A small tensor as f32, e.g. a norm weight."""
        ...

    def norm(self, name: str, eps: float) -> Norm:
        """`vec(name)` with its epsilon."""
        ...

    def experts(self, layer: int) -> ExpertBank:
        """`blk.{layer}.ffn_{gate,up,down}_exps`, or the fused `ffn_gate_up_exps`, with biases and scales."""
        ...

    def stored(self, name: str) -> StoredTable:
        """A matrix read row by row while the model runs; list it in `ModelSpec.stored`."""
        ...

    def region(self, name: str) -> Region:
        """The allocated Pages called `name` in the layout."""
        ...

    def slot(self, name: str) -> SlotState:
        """The allocated Slot called `name` in the layout."""
        ...
