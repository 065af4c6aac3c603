"""Paged attention, reference: head norms, RoPE, append, masked softmax over pages, gates.

`luce_core.ops.pages` says which entries a row sees.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from luce_core.contracts import AttentionSpec, ForwardBatch, Region
from luce_core.errors import PluginError
from luce_core.ops import codecs
from luce_core.ops.namespace import Layer
from luce_core.ops.pages import ClosedEntries, SequenceView, closed_entries, sequences

Extra = tuple[Region, Tensor | None]
"""Compressed entries joined to the softmax: their region, and which of them, None = all."""

GIVEN = {"k v": (True, True), "v": (False, True), "k": (True, False), "latent rope": (True, True)}
"""Fields a region may have -> whether `k` and `v` are given; see `Ops.attention`."""


def attention(
    ops: Any,
    b: ForwardBatch,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    region: Region,
    spec: AttentionSpec,
    gate: Tensor | None = None,
    extra: Extra | None = None,
) -> Tensor:
    """q [T, H·D], k, v as the region's fields want them, before norm and rope -> [T, H·Dv]: see `Ops`."""
    query = _turned(ops, b, q.reshape(-1, spec.heads, spec.head_dim), spec.q_norm, spec)
    if k is not None or v is not None:
        _check_given(region, k, v)
        key = None if k is None else _turned(ops, b, k.view(k.shape[0], spec.kv_heads, -1), spec.k_norm, spec)
        value = None if v is None else v.view(-1, spec.kv_heads, spec.value_dim)
        if value is not None and spec.v_norm is not None:
            value = ops.head_rms(value, spec.v_norm)
        ops.append(b, key, value, region)
    y = ops.attend(b, query, region, spec, extra) if extra else ops.attend(b, query, region, spec)
    if spec.inverse_output_rope and spec.rope is not None:
        y = ops.rope(y, b.position, spec.rope, inverse=True)
    y = y.reshape(-1, spec.heads * spec.value_dim)
    if spec.gate:
        if gate is None:
            raise PluginError(
                f"Op 'attention' of layer {spec.layer} has the gate {spec.gate!r} and got none."
            )
        factor = ops.act(gate.reshape(gate.shape[0], -1), spec.gate)
        if spec.gate_per_head:
            factor = ops.expand(factor, -1, spec.value_dim).reshape(y.shape)
        y = ops.mul(y, factor)
    return y  # type: ignore[no-any-return]


def _turned(ops: Any, b: ForwardBatch, x: Tensor, norm: Any, spec: AttentionSpec) -> Tensor:
    """Head norm, then RoPE."""
    if norm is not None:
        x = ops.head_rms(x, norm)
    return x if spec.rope is None else ops.rope(x, b.position, spec.rope)


def _check_given(region: Region, k: Tensor | None, v: Tensor | None) -> None:
    wanted = GIVEN.get(_fields(region))
    if wanted is None:
        raise PluginError(
            f"The reference of op 'attention' reads regions with the fields {', or '.join(GIVEN)}; region "
            f"{region.name!r} has {', '.join(region.fields)}. Use an op layer that reads those."
        )
    if (k is not None, v is not None) != wanted:
        needs = " and ".join(name for name, need in zip("kv", wanted, strict=True) if need)
        raise PluginError(
            f"Region {region.name!r} has the fields {', '.join(region.fields)}, so op 'attention' takes "
            f"{needs} for it and nothing else."
        )


def _fields(region: Region) -> str:
    return " ".join(sorted(region.fields))


# --- writing


def append(ops: Any, b: ForwardBatch, key: Tensor | None, value: Tensor | None, region: Region) -> None:
    """Write key and value [T, Hk, ...] of every row to its entry, rounded to the cache type or encoded.

    Fields k and rope take the key, v and latent the value.
    """
    sources = {"k": key, "rope": key, "v": value, "latent": value}
    for seq in sequences(b, region):
        rows, entries = seq.written(b, region)
        for name, pages in region.fields.items():
            source = sources[name]
            if source is not None:
                flat, how, new = pages.view(-1, *pages.shape[2:]), region.codecs.get(name), source[rows]
                if how is None:
                    flat[entries] = new.reshape(-1, *flat.shape[1:]).to(pages.dtype)
                else:
                    new = new.reshape(-1, *flat.shape[1:-1], how.width)
                    flat[entries] = codecs.encode(how, new)


# --- reading


def attend(
    ops: Any,
    b: ForwardBatch,
    query: Tensor,
    region: Region,
    spec: AttentionSpec,
    extra: Extra | None = None,
) -> Tensor:
    """query [T, H, D] over the pages of `region` (and `extra` entries) -> [T, H, Dv]."""
    if not spec.bidirectional_spans and b.span is not None:
        b = evolve(b, span=None)
    out = query.new_zeros(query.shape[0], spec.heads, spec.value_dim)
    for seq in sequences(b, region):
        closed = None if extra is None else closed_entries(b, seq, extra[0])
        chosen = None if extra is None else extra[1]
        every = closed.values() if closed is not None and chosen is None else query[:0]
        for rows in seq.row_blocks(spec.heads, _more_per_row(spec, closed, chosen)):
            seen = seq.entries_seen(b, rows, spec.window)
            mask = seq.visible(b, rows, seen, spec.window)
            k, v = keys_values(ops, b, seq, seen, region, spec)
            if closed is None:
                out[rows] = masked_attention(ops, query[rows], k, v, mask, spec)
                continue
            if mask is None:
                mask = torch.ones(rows.stop - rows.start, k.shape[0], dtype=torch.bool, device=k.device)
            if chosen is None:
                entries = every[:, None].expand(-1, k.shape[1], -1)
                k, v = torch.cat((k, entries)), torch.cat((v, entries[..., : spec.value_dim]))
                mask = torch.cat((mask, closed.visible(b, rows)), 1)
                out[rows] = masked_attention(ops, query[rows], k, v, mask, spec)
            else:
                place = closed.places(b, rows, chosen[rows])
                picked = closed.picked(place), place >= 0
                out[rows] = masked_attention(ops, query[rows], k, v, mask, spec, picked)
    return out


def _more_per_row(spec: AttentionSpec, closed: ClosedEntries | None, chosen: Tensor | None) -> int:
    """Numbers one row's extra entries take."""
    if closed is None:
        return 0
    if chosen is None:
        return spec.heads * closed.number.shape[0]
    return chosen.shape[1] * (spec.heads + spec.head_dim + closed.closer.shape[0])


def keys_values(
    ops: Any, b: ForwardBatch, seq: SequenceView, seen: slice, region: Region, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """k f32[n, Hk, D] and v f32[n, Hk, Dv] of these places."""
    at = {name: _numbers(region, name, seq.entry[seen]) for name in region.fields}
    kind = _fields(region)
    if kind == "k v":
        return at["k"], at["v"]
    if kind == "v":
        v = at["v"]
        k = v if spec.k_norm is None else v * spec.k_norm.weight
        if spec.rope is not None:
            if spec.rope.sections:
                raise PluginError(
                    f"Region {region.name!r} keeps values only: RoPE by several axes is not kept."
                )
            k = ops.rope(k, seq.index_of(b, seen)[None], spec.rope)
        return k, v
    if kind == "k":
        k = at["k"].view(-1, spec.kv_heads, spec.head_dim)
        return k, k[..., : spec.value_dim]
    latent, turned = (at[name].view(-1, spec.kv_heads, at[name].shape[-1]) for name in ("latent", "rope"))
    return torch.cat((latent, turned), -1), latent


def _numbers(region: Region, name: str, entries: Tensor) -> Tensor:
    """f32[n, ...] what a field keeps at flat entries."""
    pages, how = region.fields[name], region.codecs.get(name)
    kept = pages.view(-1, *pages.shape[2:])[entries]
    return kept.float() if how is None else codecs.decode(how, kept)


def masked_attention(
    ops: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    spec: AttentionSpec,
    picked: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """q [T, H, D], k [n, Hk, D], v [n, Hk, Dv], mask bool[T, n] (None = all seen) -> [T, H, Dv].

    picked: (f32[T, m, D], bool[T, m]) entries of each row's own, K and V at once, and which of them count. A
    row that sees nothing (padding) gives zeros.
    """
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.view(rows, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)  # [Hk, G·T, D]
    scores = torch.bmm(grouped, k.permute(1, 2, 0)).view(kv_heads, -1, rows, k.shape[0]) * spec.scale
    if picked is not None:
        own = torch.einsum("hgtd,tmd->hgtm", grouped.view(kv_heads, -1, rows, dim), picked[0]) * spec.scale
        scores = torch.cat((scores, own), -1)
        mask = picked[1] if mask is None else torch.cat((mask, picked[1]), 1)
    if spec.softcap:
        scores = ops.softcap(scores, spec.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    highest = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    weight = torch.exp(scores - highest)
    total = weight.sum(-1, keepdim=True)
    if spec.sinks is not None:  # where this overflows, the right answer is 0, and x / inf is
        total = total + torch.exp(spec.sinks.view(kv_heads, -1, 1, 1) - highest)
    weight = weight / total.clamp(min=torch.finfo(torch.float32).tiny)
    shared = weight if picked is None else weight[..., : k.shape[0]]
    y = torch.bmm(shared.reshape(kv_heads, -1, v.shape[0]), v.permute(1, 0, 2)).view(
        kv_heads, -1, rows, v.shape[2]
    )
    if picked is not None:
        y = y + torch.einsum("hgtm,tmd->hgtd", weight[..., k.shape[0] :], picked[0][..., : v.shape[2]])
    return y.permute(2, 0, 1, 3).reshape(rows, heads, -1)


OPS: Layer = {"attention": attention, "append": append, "attend": attend}

__all__ = ["OPS", "append", "attend", "attention", "masked_attention", "sequences"]
