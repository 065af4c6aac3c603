"""Tensor ops of the standard architectures: signatures only. References: `luce_core.ops`.

Coarse ops are cut for meaning and hold what hardware wants in one launch; each reference is written with
the fine ops.
Values are opaque while recording, so a recorded `Program` is complete. x is [T, E]; w, norm, spec and
region are handles
or frozen records.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

from attrs import frozen

if TYPE_CHECKING:
    from torch import Tensor

    from luce_core.contracts.forward import ForwardBatch
    from luce_core.contracts.memory import ExpertBank
    from luce_core.contracts.model import Linear, LinearGroup, Norm, Region, SlotState, StoredTable
    from luce_core.contracts.op_specs import CompressSpec, NgramSpec, RecallSpec, StreamsSpec

SCORE_LOGITS_BYTES = 8 << 20
"""Logits that scoring a prompt holds at a time, whatever its length (at least one row's). The same again is
needed to work on them; the plan counts both.
"""


@frozen
class RopeSpec:
    """Rotary embedding: angle = position · inv_freq, in f32."""

    inv_freq: Tensor
    """f32[n_rot / 2]; frequency factors and linear or YaRN scaling already applied."""
    pairs: Literal["halves", "adjacent"] = "halves"
    """halves: (x[j], x[j + n_rot/2]), NeoX; adjacent: (x[2j], x[2j+1]), as llama files are stored. j counts
    from the first feature that turns.
    """
    magnitude: float = 1.0
    """Factor on cos and sin (YaRN)."""
    sections: tuple[int, ...] = ()
    """M-RoPE: frequencies per position axis; empty = one axis."""
    interleaved_sections: bool = False
    part: Literal["first", "last"] = "first"
    """Which n_rot features of a head turn; the others pass through. last: DeepSeek and Ling."""


@frozen
class Clamp:
    """Bounds inside a gated MLP: `up` is cut to ±limit in both, the gate only from above.

    before: act(min(gate, limit)) · up (DeepSeek-V4). after: min(act(gate), limit) · up (Ling 3).
    """

    limit: float
    at: Literal["before", "after"] = "before"


@frozen
class AttentionSpec:
    """One attention layer, as far as the op needs it."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    """D of a query and of the key it meets; see `Ops.attention` for what a region holds of it."""
    value_dim: int
    scale: float
    rope: RopeSpec | None
    q_norm: Norm | None = None
    """Over D of every head; a norm without weight has a weight of ones."""
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    window: int | None = None
    """A row at index i sees entries with index > i - window. Entries of `extra` know no window."""
    sinks: Tensor | None = None
    """f32[H] extra logit in the softmax's denominator."""
    softcap: float = 0.0
    gate: Literal["", "sigmoid", "softplus"] = ""
    """y = attention · sigmoid(gate), or · softplus(gate)."""
    gate_per_head: bool = False
    """gate is [T, H], one factor per head; else [T, H·Dv]."""
    inverse_output_rope: bool = False
    """The output is turned back by the row's own position (DeepSeek-V4, where values carry RoPE)."""
    bidirectional_spans: bool = True
    """Rows of one span of the batch see each other; False: this layer is causal in spans too."""


@frozen
class RouteSpec:
    """How experts are chosen."""

    top_k: int
    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    bias: Tensor | None = None
    """f32[X] added for the choice only."""
    given_bias: Tensor | None = None
    """f32[X] in its place for rows given as embeddings, which choose by it even where there is a `table`."""
    groups: int = 1
    top_groups: int = 1
    renorm: bool = True
    scale: float = 1.0
    per_expert: Tensor | None = None
    """f32[X] factor on the weight of each expert."""
    table: Tensor | None = None
    """i32[V, k]: token -> ids, instead of the best scores; the weights are still made from the scores."""
    softcap: float = 0.0
    """Of the logits, before the score."""


@frozen
class SharedExpert:
    """The gated MLP every row goes through beside its routed experts, on the same normed input."""

    gate_up: LinearGroup
    down: Linear
    gate: Tensor | None = None
    """f32[E]: its output is multiplied by sigmoid(gate · n), one factor per row (Qwen3.5)."""
    clamp: Clamp | None = None


@frozen
class DeltaSpec:
    """One linear-attention layer (Gated DeltaNet or KDA). Value head h reads key head h mod key_heads.

    With M [Dk, Dv] per value head, log decay g and step β:
        M <- diag(exp g) M;  u = β (v - Mᵀ k);  M <- M + k uᵀ;  o = Mᵀ q / sqrt(Dk)
    gated: g = a · softplus(decay + dt_bias), one per value head; output rms(o) · silu(z).
    kda: g = lower · sigmoid(a · (decay + dt_bias)), one per key channel; output rms(o) · sigmoid(z).
    """

    layer: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    norm: Norm
    """Over Dv of every head."""
    conv: Tensor
    """f32[C, kernel], C = 2 · key_heads · Dk + value_heads · Dv: of q, k and v in this order."""
    a: Tensor
    """f32[Vh], as GGUF files hold it: gated -exp(A_log), kda exp(A_log)."""
    dt_bias: Tensor
    """f32[Vh]; kda f32[Vh · Dk]."""
    kind: Literal["gated", "kda"] = "gated"
    lower: float = -5.0
    """kda: the lower bound of g."""
    eps: float = 1e-6
    """Inside the root of the L2 norm of q and k."""


@frozen
class LinearAttentionSpec:
    """Linear attention with one fixed decay per head (lightning attention): M <- d M + k vᵀ, o = Mᵀ q."""

    layer: int
    heads: int
    key_dim: int
    value_dim: int
    log_decay: Tensor
    """f32[H], log of d, at most 0."""
    scale: float = 1.0
    """Factor on q."""


@frozen
class OpCall:
    """One recorded call. Values are numbers: `Ref(n)` in args and kwargs names one."""

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outs: tuple[int, ...]


@frozen
class Ref:
    """A value of a program, by number."""

    value: int


@frozen
class Program:
    """A recorded network. T, S and R stay free: nothing in it depends on a batch's size."""

    calls: tuple[OpCall, ...]
    inputs: tuple[str, ...]
    """Names of the first values: "batch", "final"."""
    outputs: tuple[int, ...]


class Ops(Protocol):
    """The frozen namespace of one loaded model: reference ops with the plan's layers over them."""

    # --- called by architecture code
    def embed(self, b: ForwardBatch, table: Linear, scale: float = 1.0, given: bool = True) -> Tensor:
        """Token rows of the table [V, E] · scale -> f32[T, E]; `b.embeds` rows are taken as they are.

        given False: every row is the table's (a second, per-layer table).
        """
        ...

    def norm_linear(self, x: Tensor, norm: Norm | None, w: LinearGroup) -> tuple[Tensor, ...]:
        """One [T, out] per member of `w`, of norm(x)."""
        ...

    def linear_out(
        self, y: Tensor, w: Linear, residual: Tensor | None = None, post: Norm | None = None, scale: Any = 1.0
    ) -> Tensor:
        """(residual + post(W y)) · scale -> [T, E]."""
        ...

    def head_linear(self, x: Tensor, w: Linear) -> Tensor:
        """[T, G, in] × [G, out, in] -> [T, G, out]: MLA absorb and expand, grouped outputs."""
        ...

    def gated_mlp(
        self,
        x: Tensor,
        norm: Norm | None,
        gate_up: LinearGroup,
        down: Linear,
        residual: Tensor | None = None,
        post: Norm | None = None,
        act: str = "silu",
        clamp: Clamp | None = None,
        scale: Any = 1.0,
    ) -> Tensor:
        """(residual + post(down(act(gate n) · up n))) · scale, n = norm(x) -> [T, E]."""
        ...

    def route(
        self, b: ForwardBatch, x: Tensor, norm: Norm | None, w: Linear | Tensor, spec: RouteSpec
    ) -> tuple[Tensor, Tensor]:
        """ids i32[T, k], weight f32[T, k], of logits w · norm(x). Padding rows: ids -1, weights 0.

        w: a plain f32[X, E] tensor (`Weights.vec`) is computed in f32 whatever the layer does with matrices:
        a rounded router picks other experts. groups: a group's score is the sum of its two best biased
        scores; all but the `top_groups` best groups are out. Ties go to the lowest id.
        """
        ...

    def experts(
        self,
        x: Tensor,
        norm: Norm | None,
        routed: tuple[Tensor, Tensor],
        bank: ExpertBank,
        shared: SharedExpert | None = None,
        residual: Tensor | None = None,
        post: Norm | None = None,
        act: str = "silu",
        clamp: Clamp | None = None,
    ) -> Tensor:
        """residual + post(Σ weight · expert(norm(x)) + shared(norm(x))) -> [T, E].

        An expert is down(act(gate n) · up n), clamped by `clamp`, the shared one by its own.
        """
        ...

    def attention(
        self,
        b: ForwardBatch,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        region: Region,
        spec: AttentionSpec,
        gate: Tensor | None = None,
        extra: Any = None,
    ) -> Tensor:
        """Head norms, RoPE, append to `region`, masked softmax, gates -> [T, H·Dv].

        q [T, H·D], k [T, Hk·D], v [T, Hk·Dv] before norm and rope; k and v None: another layer filled the
        region. q, and a gate per feature, may also be [T, H, D] and [T, H, Dv] at any strides: heads whose
        queries and gates alternate need no copy.
        K and V are rounded to the cache type before any row reads them. What the region's fields mean:

        k, v            keys after norm and RoPE, values after norm.
        v               K = V: v alone is given and kept, and K = rope(k_norm.weight · V) at the entry's
                        index (Gemma 4; v_norm is k_norm without its weight).
        k               k alone is given and kept; V is the first Dv features of K (DeepSeek-V4).
        latent, rope    MLA: v is the latent [T, Dv], k the rotated part [T, D - Dv]; K = (latent, rope),
                        V = latent, one head.

        extra: (region, entries): compressed entries of another region, joined to the same softmax, K = V =
        the entry. entries i32[T, n] as `select` gives them; None: every entry a row may see.
        """
        ...

    def delta(
        self,
        b: ForwardBatch,
        qkv: Tensor,
        z: Tensor,
        beta: Tensor,
        decay: Tensor,
        conv: SlotState,
        state: SlotState,
        spec: DeltaSpec,
    ) -> Tensor:
        """conv + SiLU, split, L2 norm, recurrence, gated norm -> [T, Vh·Dv]; see `DeltaSpec`.

        qkv [T, C], z [T, Vh·Dv], beta [T, Vh] (β = sigmoid(beta)), decay [T, Vh] or [T, Vh·Dk]: as projected.
        conv: state [kernel - 1, C], log row [C], fold "shift". state: f32[Vh, Dk, Dv], log k [Kh, Dk],
        u [Vh, Dv], g [Vh] or [Vh, Dk], fold "delta_fold". Held rows follow their ancestors.
        """
        ...

    def linear_attention(
        self, b: ForwardBatch, q: Tensor, k: Tensor, v: Tensor, state: SlotState, spec: LinearAttentionSpec
    ) -> Tensor:
        """q, k [T, H·Dk], v [T, H·Dv], ready to use -> [T, H·Dv]. state as for `delta`, log g [H]."""
        ...

    def compress(
        self,
        b: ForwardBatch,
        kv: Tensor,
        gate: Tensor | None,
        tail: SlotState | None,
        out: Region,
        spec: CompressSpec,
        keys: tuple[Region, Linear, Norm] | None = None,
    ) -> None:
        """Pool rows into entries of `out`, one at every row with (index + 1) % stride == 0: `CompressSpec`.

        tail: the newest rows, f32[spec.rows, 2 · features] (kv, then gate), log row, fold "shift", period
        `stride`. An entry closed by a held row is kept in `out.log` at that row: it is seen by the row
        and its descendants, and a commit of the row makes it an entry. Stride 1: gate and tail are None, and
        a held row's entry lies at length + row, as keys do.

        keys (region, w, norm): beside every entry, rope(norm(w · entry before its RoPE)) goes there in the
        same way; `select` finds the entry by it (DeepSeek-V4.1).
        """
        ...

    def select(
        self,
        b: ForwardBatch,
        q: Tensor,
        weight: Tensor,
        keys: Region,
        top_k: int,
        rope: RopeSpec | None,
        within: tuple[Tensor, int] | None = None,
    ) -> Tensor:
        """q [T, Hi, Di], weight [T, Hi] -> entries i32[T, top_k] each row attends to, best first, then -1.

        Entry w scores Σ_h weight_h · relu(rope(q_h) · key_w); `keys` is a region that `compress` filled. An
        entry's number is that of its block of tokens. Ties go to the lowest number.
        within (blocks i32[T, n], size): only entries with number // size among the row's blocks; -1: none.
        """
        ...

    def select_blocks(
        self,
        b: ForwardBatch,
        q: Tensor,
        weight: Tensor,
        keys: Region,
        count: int,
        size: int,
        rope: RopeSpec | None,
    ) -> Tensor:
        """Blocks of `size` adjacent entries i32[T, count], best first, then -1: `within` of later `select`s.

        A block scores as its best entry that the row sees, by `select`'s scores; the newest is always first.
        """
        ...

    def ngram_rows(self, b: ForwardBatch, history: SlotState, spec: NgramSpec) -> Tensor:
        """Rows i32[T, tables, (n - 1) · heads] of the n-grams that end at each row: `NgramSpec`.

        history: state i32[n - 1, 1], compressed ids + 1 of the newest tokens, oldest first, 0 = none; log
        row, fold "shift". Held rows follow their ancestors. Once per forward.
        """
        ...

    def stored_rows(self, table: StoredTable, rows: Tensor) -> Tensor:
        """Rows i32[...] of a table that stays in its file -> f32[..., width]. Synchronizes, reads a disk."""
        ...

    def streams_in(self, h: Tensor, w: StreamsSpec) -> tuple[Tensor, Tensor]:
        """[T, n, E] -> x [T, E], mix f32[T, n + n·n] for `streams_out` (no columns with pre alone)."""
        ...

    def streams_gates(self, h: Tensor, w: StreamsSpec) -> tuple[Tensor, Tensor]:
        """[T, n, E] -> pre f32[T, n] for `streams_collapse`, mix as of `streams_in`, which is both in one."""
        ...

    def streams_collapse(self, h: Tensor, pre: Tensor) -> Tensor:
        """[T, n, E], f32[T, n] -> Σ pre_i H_i [T, E]. The pre may be that of the sublayer before."""
        ...

    def streams_out(self, h: Tensor, y: Tensor, mix: Tensor) -> Tensor:
        """[T, n, E], [T, E], mix -> [T, n, E]: H'_k = post_k · y + Σ_i mix[i, k] · H_i."""
        ...

    def streams_recall(self, b: ForwardBatch, h: Tensor, kv: Tensor, w: RecallSpec) -> Tensor:
        """[T, n, E], kv [T, (n + 1) · E] (a key per stream, the value last) -> [T, n, E]: `RecallSpec`.

        Rows given as embeddings stay as they are.
        """
        ...

    def head(
        self, x: Tensor, norm: Norm | None, w: Linear, softcap: float = 0.0, scale: float = 1.0
    ) -> Tensor:
        """[R, E] -> f32[R, V]."""
        ...

    def tap(self, b: ForwardBatch, layer: int, x: Tensor) -> None:
        """Copy the residual after `layer` into the batch's tap buffer, where one is asked for."""
        ...

    # --- fine: what the references are written with; architectures use them for what no coarse op is cut for

    def rms(self, x: Tensor, norm: Norm) -> Tensor:
        """`norm` over the last axis, in f32."""
        ...

    def head_rms(self, x: Tensor, norm: Norm) -> Tensor:
        """`norm` of every head of x [T, H, D]."""
        ...

    def linear(self, x: Tensor, w: Linear) -> Tensor:
        """[..., in] -> [..., out]."""
        ...

    def table_rows(self, table: Linear, ids: Tensor) -> Tensor:
        """Rows `ids` i32[...] of the matrix -> f32[..., in]."""
        ...

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y."""
        ...

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        """x · y."""
        ...

    def scale(self, x: Tensor, factor: float | Tensor) -> Tensor:
        """x · factor."""
        ...

    def act(self, x: Tensor, kind: str) -> Tensor:
        """Elementwise: silu, gelu, gelu_tanh, relu, sigmoid, softplus."""
        ...

    def act_mul(self, gate: Tensor, up: Tensor, kind: str = "silu", clamp: Clamp | None = None) -> Tensor:
        """act(gate) · up."""
        ...

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap · tanh(x / cap)."""
        ...

    def rope(self, x: Tensor, position: Tensor, spec: RopeSpec, inverse: bool = False) -> Tensor:
        """x [T, H, D], position i32[axes, T] -> [T, H, D]."""
        ...

    def conv_window(self, b: ForwardBatch, x: Tensor, weight: Tensor, slot: SlotState) -> Tensor:
        """Causal depthwise convolution along every row's path: x [T, C], weight f32[C, kernel] -> [T, C]."""
        ...

    def cat(self, parts: tuple[Tensor, ...], dim: int = -1) -> Tensor:
        """The parts beside each other along `dim`."""
        ...

    def mean(self, x: Tensor, dim: int) -> Tensor:
        """The mean over `dim`."""
        ...

    def expand(self, x: Tensor, dim: int, size: int) -> Tensor:
        """A new axis `dim` of `size` equal copies."""
        ...

    def gather(self, x: Tensor, rows: Tensor) -> Tensor:
        """Rows `rows` i32[...] of x [N, ...]."""
        ...
