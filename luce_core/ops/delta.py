"""Linear attention with a state per sequence, reference: Gated DeltaNet, Kimi Delta Attention, plain decay.

The recurrence of `DeltaSpec`, worked off in chunks (arXiv 2412.06464): within a chunk every u is the solution
of a triangular system over the rows above it, and the state enters and leaves once. Rows of a tree are one
chunk in which only ancestors are above a row, so a u never depends on other branches; what a held row leaves
in the log (k, u, g) is all a fold needs to bring the state to any accepted row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from luce_core.contracts import DeltaSpec, ForwardBatch, LinearAttentionSpec, SlotState
from luce_core.ops.namespace import Layer
from luce_core.ops.pages import SequenceRows, sequence_rows

CHUNK_ROWS = 64
"""Rows of a prefill chunk: the triangular systems are CHUNK_ROWS wide."""
CHUNK_ROWS_BY_CHANNEL = 16
"""The same where every channel decays on its own: there, products take rows² · Dk. 32 rows lose a digit."""
PRODUCT_ELEMENTS = 1 << 24
"""Numbers of such a product held at once."""


def delta(
    ops: Any,
    b: ForwardBatch,
    qkv: Tensor,
    z: Tensor,
    beta: Tensor,
    decay: Tensor,
    conv: SlotState,
    state: SlotState,
    spec: DeltaSpec,
) -> Tensor:
    rows, kda = qkv.shape[0], spec.kind == "kda"
    widths = [spec.key_heads * spec.key_dim] * 2 + [spec.value_heads * spec.value_dim]
    mixed = ops.act(ops.conv_window(b, qkv, spec.conv, conv), "silu")
    q, k, v = torch.split(mixed, widths, -1)
    q = ops.l2norm(q.view(rows, spec.key_heads, spec.key_dim), spec.eps) * spec.key_dim**-0.5
    k = ops.l2norm(k.view(rows, spec.key_heads, spec.key_dim), spec.eps)
    v = v.view(rows, spec.value_heads, spec.value_dim)
    raw = decay.float() + spec.dt_bias
    if kda:
        raw = raw.view(rows, spec.value_heads, spec.key_dim)
        g = spec.lower * ops.act(spec.a.view(-1, 1) * raw, "sigmoid")
    else:
        g = spec.a.view(-1) * ops.act(raw, "softplus")
    y = ops.delta_scan(b, q, k, v, g, ops.act(beta.float(), "sigmoid"), state)
    gate = ops.act(z.view(rows, spec.value_heads, spec.value_dim), "sigmoid" if kda else "silu")
    return ops.mul(ops.head_rms(y, spec.norm), gate).reshape(rows, -1)  # type: ignore[no-any-return]


def linear_attention(
    ops: Any, b: ForwardBatch, q: Tensor, k: Tensor, v: Tensor, state: SlotState, spec: LinearAttentionSpec
) -> Tensor:
    rows = q.shape[0]
    q, k = (x.view(rows, spec.heads, spec.key_dim) for x in (q, k))
    g = spec.log_decay.expand(rows, -1)
    y = ops.delta_scan(b, q * spec.scale, k, v.view(rows, spec.heads, spec.value_dim), g, None, state)
    return y.reshape(rows, -1)  # type: ignore[no-any-return]


def delta_scan(
    ops: Any,
    b: ForwardBatch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    state: SlotState,
) -> Tensor:
    """q (scaled), k [T, Kh, Dk], v [T, Vh, Dv], g [T, Vh] or [T, Vh, Dk], beta [T, Vh] -> o f32[T, Vh, Dv].

    beta None: u = v, linear attention without the delta rule. prefill writes the state, held rows their log.
    """
    out, made = torch.empty_like(v), torch.empty_like(v)
    for rows in sequence_rows(b):
        slot = int(b.slot[rows.number])
        memory = state.state[slot].float()
        for part, above in _chunks(b, rows, by_channel=g.dim() == 3):
            one = _Chunk(q[part], k[part], v[part], g[part], None if beta is None else beta[part], above)
            out[part], made[part] = one.run(memory)
            if not rows.held:
                memory = one.after(memory, made[part])
        if not rows.held:
            state.state[slot] = memory.to(state.state.dtype)
    if b.phase == "held":
        for field, value in (("k", k), ("u", made), ("g", g)):
            ops.write_log(b, state, field, value)
    return out


def _chunks(b: ForwardBatch, rows: SequenceRows, by_channel: bool) -> list[tuple[slice, Tensor]]:
    """Rows of a sequence with bool[n, n]: which are strictly above which. Held rows are one chunk."""
    if rows.held:
        row = torch.arange(rows.stop - rows.start, device=b.sees.device)
        sees = (b.sees[rows.start : rows.stop][:, row >> 6] >> (row & 63)) & 1 != 0
        return [(slice(rows.start, rows.stop), sees & (row != row[:, None]))]
    size = CHUNK_ROWS_BY_CHANNEL if by_channel else CHUNK_ROWS
    parts = [slice(start, min(start + size, rows.stop)) for start in range(rows.start, rows.stop, size)]
    triangle = torch.ones(size, size, dtype=torch.bool, device=b.token.device).tril(-1)
    return [(part, triangle[: part.stop - part.start, : part.stop - part.start]) for part in parts]


class _Chunk:
    """Rows that meet one state. Heads come first: [H, n, ...], q and k repeated for the value heads."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, above: Tensor
    ) -> None:
        heads = torch.arange(v.shape[1], device=v.device) % k.shape[1]
        self.q, self.k = q.float()[:, heads].transpose(0, 1), k.float()[:, heads].transpose(0, 1)
        self.v = v.float().transpose(0, 1)
        self.beta = None if beta is None else beta.float().T[:, :, None]
        self.above = above
        self.within = above | torch.eye(above.shape[0], dtype=torch.bool, device=above.device)
        decay = g.float().transpose(0, 1)
        if decay.dim() == 2:
            decay = decay[:, :, None]
        self.sum = self.within.float() @ decay
        """[H, n, 1 or Dk]: log decay from the state to a row, along its path."""

    def run(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """memory f32[H, Dk, Dv] -> o, u, both [n, H, Dv]."""
        since = self.sum.exp()
        u = self.v
        if self.beta is not None:
            system = self.beta * self._products(self.k, self.above)
            right = torch.cat((self.beta * self.v, self.beta * since * self.k), -1)
            # The diagonal is taken as ones, whatever stands there.
            solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
            own, read = torch.split(solved, [self.v.shape[-1], self.k.shape[-1]], -1)
            u = own - read @ memory
        o = (since * self.q) @ memory + self._products(self.q, self.within) @ u
        return o.transpose(0, 1), u.transpose(0, 1)

    def after(self, memory: Tensor, u: Tensor) -> Tensor:
        """The state behind the last row of a chain; u [n, H, Dv]."""
        last = self.sum[:, -1:]
        left = (last - self.sum).exp() * self.k
        return last.exp().transpose(1, 2) * memory + left.transpose(1, 2) @ u.float().transpose(0, 1)

    def _products(self, x: Tensor, mask: Tensor) -> Tensor:
        """[H, n, n]: x_i · k_j with the decay from row j to row i, 0 outside the mask.

        Differences of sums are masked before exp: in either factor alone, strong decay overflows.
        """
        if self.sum.shape[-1] == 1:
            between = (self.sum - self.sum.transpose(1, 2)).masked_fill(~mask, -math.inf)
            return (x @ self.k.transpose(1, 2)) * between.exp()
        heads, rows, width = x.shape
        step = max(1, PRODUCT_ELEMENTS // max(1, heads * rows * width))
        blocks = []
        for start in range(0, rows, step):
            own = slice(start, min(start + step, rows))
            between = self.sum[:, own, None] - self.sum[:, None]
            between = between.masked_fill(~mask[own, :, None], -math.inf)
            blocks.append(torch.einsum("hic,hjc,hijc->hij", x[:, own], self.k, between.exp()))
        return torch.cat(blocks, 1)


def delta_fold(ops: Any, state: Tensor, log: Mapping[str, Tensor], count: Tensor) -> Tensor:
    """Row by row along the accepted path: M <- diag(exp g) M + k uᵀ.

    state [S, Vh, Dk, Dv]; log k [S, P, Kh, Dk], u [S, P, Vh, Dv], g [S, P, Vh] or [S, P, Vh, Dk]; count
    i32[S].
    """
    heads = torch.arange(state.shape[1], device=state.device) % log["k"].shape[2]
    memory = state.float()
    for step in range(int(count.max()) if count.numel() else 0):
        g = log["g"][:, step].float().exp()
        g = g[..., None, None] if g.dim() == 2 else g[..., None]
        k, u = log["k"][:, step, heads].float(), log["u"][:, step].float()
        memory = torch.where(
            (step < count)[:, None, None, None], g * memory + k[..., None] * u[..., None, :], memory
        )
    return memory


OPS: Layer = {
    "delta": delta,
    "linear_attention": linear_attention,
    "delta_scan": delta_scan,
    "delta_fold": delta_fold,
}
