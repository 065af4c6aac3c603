"""Op calls as the C library runs them. A call it cannot run gives `None`: the reference runs that one.

Every function here takes the arguments of the op it is named after. Values among them (tensors when called
directly, `Ref`s while a program is rewritten) are only noted down; handles are turned into structures whose
pointers stay valid as long as the `Step` lives.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor

from luce_backend_cpu import native
from luce_core.contracts import AttentionSpec, Clamp, Linear, LinearGroup, Norm, Region
from luce_core.ops.fine import section_axes

CACHE_FORMATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
CACHE_CODECS = {"q8_0": "Q8_0"}
"""The library's formats of caches; `hooks.NATIVE_CODECS` names the same codecs."""


class Packed:
    """A matrix as the library reads it: the file's bytes, mapped or rearranged, or f32 where it must be."""

    __slots__ = ("_bound", "bytes", "matrix")

    def __init__(
        self, data: npt.NDArray[np.uint8], format_name: str, rows: int, cols: int, *, lanes: bool = False,
    ) -> None:
        """data: u8[rows, row_bytes]; with `lanes`, as `rearranged` left it."""
        self.bytes = data
        self.matrix = native.Matrix(
            data=data.ctypes.data,
            row_bytes=data.strides[0],
            format=native.FORMATS[format_name],
            rows=rows,
            cols=cols,
            lanes=lanes,
            scale=1.0,
        )
        self._bound: Linear | None = None

    @classmethod
    def from_file(
        cls, lib: native.Native, data: npt.NDArray[np.uint8], format_name: str, rows: int, cols: int,
    ) -> Packed:
        """The file's bytes in the order this processor likes; what was read once stops being resident."""
        packed = cls(data, format_name, rows, cols)
        if not lib.wants_lanes(native.FORMATS[format_name]):
            return packed
        moved = np.empty((-(-rows // 16) * 16, data.shape[1]), np.uint8)
        lib.to_lanes(packed.matrix, moved.ctypes.data)
        if is_mapped_file(data):
            lib.forget(data.ctypes.data, data.nbytes)
        return cls(moved, format_name, rows, cols, lanes=True)

    def bind(self, w: Linear) -> native.Matrix:
        """The matrix with the bias and scale of its handle; they are the same at every call."""
        if self._bound is not w:
            self._bound = w
            self.matrix.bias = None if w.bias is None else w.bias.data_ptr()
            self.matrix.scale = 1.0 if w.scale is None else float(w.scale)
        return self.matrix


def is_mapped_file(data: npt.NDArray[np.uint8]) -> bool:
    """Whether these bytes can be read from a file again: a view of a read-only mapping."""
    owner: Any = data
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return isinstance(owner, mmap.mmap) and memoryview(owner).readonly


@frozen(eq=False)
class Step:
    """One op for the library. The numbers of its values are filled in by whoever runs it."""

    op: native.Op
    reads: Mapping[str, Any]
    """x, residual, gate, k, v -> value."""
    widths: tuple[int, ...]
    """Of the results, all f32 [rows, width]."""
    keep: tuple[Any, ...]
    """What the pointers of `op` point into."""
    batch: Any = None
    """The batch value, where the op reads it."""
    group: str = ""
    """attention: the group whose block table it walks."""
    layer: int = -1
    """tap: the layer."""


def embed(b: Any, table: Linear, scale: float = 1.0, given: bool = True) -> Step | None:
    if not isinstance(table.packed, Packed) or not given:
        return None
    op = _op(native.EMBED, (table,), scale=scale)
    return Step(op, {}, (table.in_features,), (op.keep, table), batch=b) if op else None


def norm_linear(x: Any, norm: Norm | None, w: LinearGroup) -> Step | None:
    if len(w.members) > native.MAX_OUTS:
        return None
    op = _op(native.NORM_LINEAR, w.members, norm=norm)
    widths = tuple(member.out_features for member in w.members)
    return Step(op, {"x": x}, widths, (op.keep, w, norm)) if op else None


def linear(x: Any, w: Linear) -> Step | None:
    op = _op(native.NORM_LINEAR, (w,))
    return Step(op, {"x": x}, (w.out_features,), (op.keep, w)) if op else None


def linear_out(
    y: Any, w: Linear, residual: Any = None, post: Norm | None = None, scale: Any = 1.0,
) -> Step | None:
    factor = _number(scale)
    op = None if factor is None else _op(native.LINEAR_OUT, (w,), post=post, scale=factor)
    return Step(op, {"x": y, "residual": residual}, (w.out_features,), (op.keep, w, post)) if op else None


def gated_mlp(
    x: Any,
    norm: Norm | None,
    gate_up: LinearGroup,
    down: Linear,
    residual: Any = None,
    post: Norm | None = None,
    act: str = "silu",
    clamp: Clamp | None = None,
    scale: Any = 1.0,
) -> Step | None:
    factor, pair = _number(scale), gate_up.members
    if factor is None or act not in native.ACTS or (clamp is not None and clamp.at != "before"):
        return None
    if len(pair) != 2 or pair[0].out_features != pair[1].out_features:
        return None
    op = _op(native.GATED_MLP, (*pair, down), norm=norm, post=post, scale=factor)
    if op is None:
        return None
    op.act = native.ACTS[act]
    op.clamp = -1.0 if clamp is None else clamp.limit
    return Step(
        op, {"x": x, "residual": residual}, (down.out_features,), (op.keep, gate_up, down, norm, post),
    )


def head(x: Any, norm: Norm | None, w: Linear, softcap: float = 0.0, scale: float = 1.0) -> Step | None:
    op = _op(native.HEAD, (w,), norm=norm, scale=scale)
    if op is None:
        return None
    op.softcap = softcap
    return Step(op, {"x": x}, (w.out_features,), (op.keep, w, norm))


def attention(
    b: Any, q: Any, k: Any, v: Any, region: Region, spec: AttentionSpec, gate: Any = None, extra: Any = None
) -> Step | None:
    pages = region.fields
    if extra is not None or spec.inverse_output_rope or region.stride != 1 or set(pages) != {"k", "v"}:
        return None
    if spec.gate not in ("", "sigmoid") or spec.gate_per_head or (spec.rope and spec.rope.part != "first"):
        return None
    if (k is None) != (v is None) or None in (_cache_format(region, name) for name in pages):
        return None
    detail, keep = _attention(region, spec)
    op = _Op(kind=native.ATTENTION, attention=ctypes.addressof(detail))
    reads = {"x": q, "k": k, "v": v, "gate": gate if spec.gate else None}
    return Step(
        op, reads, (spec.heads * spec.value_dim,), (detail, keep, region, spec), batch=b, group=region.group,
    )


def tap(b: Any, layer: int, x: Any) -> Step | None:
    return Step(_Op(kind=native.TAP), {"x": x}, (), (), batch=b, layer=layer)


LOWER: Mapping[str, Callable[..., Step | None]] = {
    "embed": embed,
    "norm_linear": norm_linear,
    "linear_out": linear_out,
    "gated_mlp": gated_mlp,
    "head": head,
    "attention": attention,
    "tap": tap,
}
"""Ops the library can run, by name."""


# --- structures


class _Op(native.Op):
    """An op with no values yet. keep: what its pointers point into."""

    keep: Any = None

    def __init__(self, **fields: Any) -> None:
        super().__init__(x=-1, residual=-1, gate=-1, clamp=-1.0, scale=1.0, **fields)
        self.out[:] = [-1] * native.MAX_OUTS


def _op(
    kind: int,
    linears: tuple[Linear, ...],
    *,
    norm: Norm | None = None,
    post: Norm | None = None,
    scale: float = 1.0,
) -> _Op | None:
    """An op over these matrices; None where one of them was packed by another layer."""
    if not all(isinstance(w.packed, Packed) for w in linears):
        return None
    matrices = (native.Matrix * len(linears))(*(w.packed.bind(w) for w in linears))
    op = _Op(kind=kind, num_matrices=len(linears), matrices=ctypes.addressof(matrices))
    op.keep = matrices
    op.scale = scale
    op.norm, op.norm_eps = _norm(norm)
    op.post, op.post_eps = _norm(post)
    return op


def _norm(norm: Norm | None) -> tuple[int | None, float]:
    return (None, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)


def _number(scale: Any) -> float | None:
    """A factor as a float; None where it is a vector."""
    if isinstance(scale, Tensor):
        return float(scale) if scale.numel() == 1 else None
    return float(scale)


def _cache_format(region: Region, name: str) -> str | None:
    """The library's name of how a field is kept; None where it does not read that."""
    how = region.codecs.get(name)
    if how is None:
        return CACHE_FORMATS.get(region.fields[name].dtype)
    return CACHE_CODECS.get(how.codec.name)


def _turn(region: Region, name: str) -> int:
    how = region.codecs.get(name)
    return 0 if how is None else how.codec.turn(how.width)


def _attention(region: Region, spec: AttentionSpec) -> tuple[native.Attention, tuple[Any, ...]]:
    rope, keys, values = spec.rope, region.fields["k"], region.fields["v"]
    axis = None
    if rope is not None and rope.sections:
        axis = section_axes(rope.sections, rope.interleaved_sections).to(torch.int32).contiguous()
    detail = native.Attention(
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        value_dim=spec.value_dim,
        scale=spec.scale,
        softcap=spec.softcap,
        window=spec.window or 0,
        half=0 if rope is None else rope.inv_freq.shape[0],
        adjacent=int(rope is not None and rope.pairs == "adjacent"),
        gated=int(spec.gate == "sigmoid"),
        magnitude=1.0 if rope is None else rope.magnitude,
        inv_freq=None if rope is None else rope.inv_freq.data_ptr(),
        axis=None if axis is None else axis.data_ptr(),
        sinks=None if spec.sinks is None else spec.sinks.data_ptr(),
        k_pages=keys.data_ptr(),
        v_pages=values.data_ptr(),
        k_format=native.FORMATS[_cache_format(region, "k")],
        v_format=native.FORMATS[_cache_format(region, "v")],
        block_entries=region.block_entries,
        k_turn=_turn(region, "k"),
        v_turn=_turn(region, "v"),
    )
    detail.q_norm, detail.q_eps = _norm(spec.q_norm)
    detail.k_norm, detail.k_eps = _norm(spec.k_norm)
    detail.v_norm, detail.v_eps = _norm(spec.v_norm)
    return detail, (axis, rope)
