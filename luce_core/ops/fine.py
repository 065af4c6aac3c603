"""Fine ops: the vocabulary the coarse references are written in. Activations are f32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from luce_core.contracts import Clamp, Norm, RopeSpec
from luce_core.errors import PluginError
from luce_core.ops.namespace import Layer

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
}


def rms(ops: Any, x: Tensor, norm: Norm) -> Tensor:
    """weight · x / sqrt(mean(x²) + eps) over the last axis, in f32."""
    return F.rms_norm(x.float(), norm.weight.shape, norm.weight, norm.eps)


def head_rms(ops: Any, x: Tensor, norm: Norm) -> Tensor:
    """`rms` of every head of x [T, H, D]."""
    return rms(ops, x, norm)


def add(ops: Any, x: Tensor, y: Tensor) -> Tensor:
    return x + y


def mul(ops: Any, x: Tensor, y: Tensor) -> Tensor:
    return x * y


def scale(ops: Any, x: Tensor, factor: float | Tensor) -> Tensor:
    return x * factor


def act(ops: Any, x: Tensor, kind: str) -> Tensor:
    """Elementwise `kind` of ACTIVATIONS."""
    if kind not in ACTIVATIONS:
        raise PluginError(f"Activation {kind!r} is unknown. Known: {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[kind](x)


def act_mul(ops: Any, gate: Tensor, up: Tensor, kind: str = "silu", clamp: Clamp | None = None) -> Tensor:
    """act(gate) · up, within the bounds of `clamp`."""
    if clamp is None:
        return ops.act(gate, kind) * up  # type: ignore[no-any-return]
    up = up.clamp(-clamp.limit, clamp.limit)
    if clamp.at == "before":
        return ops.act(gate.clamp(max=clamp.limit), kind) * up  # type: ignore[no-any-return]
    return ops.act(gate, kind).clamp(max=clamp.limit) * up  # type: ignore[no-any-return]


def softcap(ops: Any, x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x / cap)."""
    return torch.tanh(x / cap) * cap


def mean(ops: Any, x: Tensor, dim: int) -> Tensor:
    return x.mean(dim)


def expand(ops: Any, x: Tensor, dim: int, size: int) -> Tensor:
    """A new axis `dim` of `size` equal copies."""
    shape = list(x.shape)
    where = dim % (x.dim() + 1)
    shape.insert(where, size)
    return x.unsqueeze(where).expand(shape)


def gather(ops: Any, x: Tensor, rows: Tensor) -> Tensor:
    """Rows `rows` i32[...] of x [N, ...]."""
    return x[rows.long()]


def l2norm(ops: Any, x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(Σ x² + eps) over the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def cat(ops: Any, parts: tuple[Tensor, ...], dim: int = -1) -> Tensor:
    return torch.cat(tuple(parts), dim)


def topk(ops: Any, x: Tensor, k: int) -> Tensor:
    """Places of the k largest of x [..., n] -> i32[..., k], best first, the lowest place on ties."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :k].to(torch.int32)


def rope(ops: Any, x: Tensor, position: Tensor, spec: RopeSpec, inverse: bool = False) -> Tensor:
    """Rotate n_rot features of every head, the first or the last. x [T, H, D], position i32[axes, T]."""
    rotated = 2 * spec.inv_freq.shape[0]
    if spec.part == "last" and x.shape[-1] != rotated:
        still, turning = torch.split(x, [x.shape[-1] - rotated, rotated], -1)
        return torch.cat((still, ops.rope(turning, position, spec, inverse)), -1)
    angle = _angles(position, spec)[:, None, :]
    cos, sin = torch.cos(angle) * spec.magnitude, torch.sin(angle) * spec.magnitude
    if inverse:
        sin = -sin
    half = spec.inv_freq.shape[0]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    out = torch.empty_like(x)
    if spec.pairs == "halves":
        a, b = turned[..., :half], turned[..., half:]
        out[..., :half] = a * cos - b * sin
        out[..., half : 2 * half] = a * sin + b * cos
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        out[..., 0 : 2 * half : 2] = a * cos - b * sin
        out[..., 1 : 2 * half : 2] = a * sin + b * cos
    if rest.shape[-1]:
        out[..., 2 * half :] = rest
    return out


def _angles(position: Tensor, spec: RopeSpec) -> Tensor:
    """f32[T, n_rot / 2]: each frequency times the position on its axis."""
    if not spec.sections:
        return position[0].float()[:, None] * spec.inv_freq
    axis = section_axes(spec.sections, spec.interleaved_sections).to(position.device)
    return position.float()[axis].T * spec.inv_freq


def section_axes(sections: tuple[int, ...], interleaved: bool) -> Tensor:
    """i64[n_rot / 2]: position axis of every frequency (M-RoPE).

    In turn: all of axis 0, then axis 1, ... Interleaved: frequency j takes axis a = j mod axes where
    j < axes · sections[a], else axis 0.
    """
    counts = [count for count in sections if count]
    if not interleaved:
        return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    axes = len(counts)
    axis = torch.arange(sum(counts)) % axes
    limit = torch.tensor(counts)[axis] * axes
    return torch.where(torch.arange(sum(counts)) < limit, axis, 0)


OPS: Layer = {
    "rms": rms,
    "head_rms": head_rms,
    "add": add,
    "mul": mul,
    "scale": scale,
    "act": act,
    "act_mul": act_mul,
    "softcap": softcap,
    "mean": mean,
    "expand": expand,
    "gather": gather,
    "l2norm": l2norm,
    "rope": rope,
    "cat": cat,
    "topk": topk,
}
