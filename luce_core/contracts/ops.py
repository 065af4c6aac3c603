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
    from luce_core.contracts.model import Linear, LinearGroup, Norm, Region, SlotState

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
    """halves: (x[j], x[j + n_rot/2]), NeoX; adjacent: (x[2j], x[2j+1]), as llama files are stored."""
    magnitude: float = 1.0
    """Factor on cos and sin (YaRN)."""
    sections: tuple[int, ...] = ()
    """M-RoPE: frequencies per position axis; empty = one axis."""
    interleaved_sections: bool = False


@frozen
class AttentionSpec:
    """One attention layer, as far as the op needs it."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    rope: RopeSpec | None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    window: int | None = None
    """A row at index i sees entries with index > i - window."""
    sinks: Tensor | None = None
    """f32[H] extra logit in the softmax's denominator."""
    softcap: float = 0.0
    gate: Literal["", "sigmoid"] = ""
    """y = attention · sigmoid(gate)."""
    inverse_output_rope: bool = False


@frozen
class RouteSpec:
    """How experts are chosen."""

    top_k: int
    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    bias: Tensor | None = None
    """f32[X] added for the choice only."""
    groups: int = 1
    top_groups: int = 1
    renorm: bool = True
    scale: float = 1.0
    per_expert: Tensor | None = None
    """f32[X] factor on the weight of each expert."""
    table: Tensor | None = None
    """i32[V, k]: token -> ids, instead of scores."""


@frozen
class DeltaSpec:
    """One linear-attention layer (Gated DeltaNet or KDA)."""

    layer: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    norm: Norm
    conv: Tensor
    """f32[C, kernel]."""
    kind: Literal["gated", "kda"] = "gated"


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
    def embed(self, b: ForwardBatch, table: Linear, scale: float = 1.0) -> Tensor:
        """Token rows of the table [V, E] · scale -> f32[T, E]; `b.embeds` rows are taken as they are."""
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
        clamp: float | None = None,
        scale: Any = 1.0,
    ) -> Tensor:
        """(residual + post(down(act(gate n) · up n))) · scale, n = norm(x) -> [T, E]."""
        ...

    def route(
        self, b: ForwardBatch, x: Tensor, norm: Norm | None, w: Linear | None, spec: RouteSpec
    ) -> tuple[Tensor, Tensor]:
        """ids i32[T, k], weight f32[T, k]."""
        ...

    def experts(
        self,
        x: Tensor,
        norm: Norm | None,
        routed: tuple[Tensor, Tensor],
        bank: ExpertBank,
        shared: Any = None,
        residual: Tensor | None = None,
        post: Norm | None = None,
        act: str = "silu",
        clamp: float | None = None,
    ) -> Tensor:
        """Weighted sum of the routed experts (and the shared one) of norm(x), plus residual -> [T, E]."""
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
        region.
        K and V are rounded to the cache type before any row reads them. extra: (region, entries | None),
        compressed ones.
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
        """conv + SiLU, split, L2 norm, recurrence, gated norm -> [T, Vh·S]; held rows are logged."""
        ...

    def compress(
        self, b: ForwardBatch, kv: Tensor, gate: Tensor, tail: SlotState, out: Region, spec: Any
    ) -> None:
        """Pool `stride` rows into one entry of `out`."""
        ...

    def select(
        self, b: ForwardBatch, q: Tensor, weight: Tensor, keys: Region, top_k: int, rope: RopeSpec | None
    ) -> Tensor:
        """q [T, Hi, Di], weight [T, Hi] -> entries i32[T, top_k] each row attends to."""
        ...

    def streams_in(self, h: Tensor, w: Any) -> tuple[Tensor, Tensor]:
        """[T, n, E] -> x [T, E], mix."""
        ...

    def streams_out(self, h: Tensor, y: Tensor, mix: Tensor) -> Tensor:
        """[T, n, E], [T, E], mix -> [T, n, E]."""
        ...

    def head(
        self, x: Tensor, norm: Norm | None, w: Linear, softcap: float = 0.0, scale: float = 1.0
    ) -> Tensor:
        """[R, E] -> f32[R, V]."""
        ...

    def tap(self, b: ForwardBatch, layer: int, x: Tensor) -> None:
        """Copy the residual after `layer` into the batch's tap buffer, where one is asked for."""
        ...
