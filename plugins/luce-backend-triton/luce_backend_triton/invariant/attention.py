"""Op `attention` whose sums are cut by places in the text: two or three launches, none of which waits.

The same regions as `luce_backend_triton.attention` reads; others go to the reference, whose sums of a held
row change with the number of rows of its sequence, though not with other sequences.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from luce_backend_triton import attention as plain
from luce_backend_triton.attention import GATES, LOG2E, overlaps, room_of
from luce_backend_triton.attention_cuts import searched
from luce_backend_triton.invariant import attention_kernels as kernels
from luce_backend_triton.kernels import INTERPRETED
from luce_core.contracts import AttentionSpec, ForwardBatch, Region
from luce_core.contracts.staged import takes_padding
from luce_core.ops import attention as reference

PART = 512
"""Tokens of a part: what one program sums of a decoded row."""
TILE, PLACES = 32, 32
"""Least rows · heads of a tile, and the tokens it meets at a time; half where Triton has no tensor cores.
Below 64, from where on Triton would choose other instructions on compute capability 9.0.
"""
WIDE = 256
"""Of keys or values: wider ones take half the tokens too, twice the warps, and one stage."""


@takes_padding(plain.reads_padded)
def attention(
    ops: Any,
    b: ForwardBatch,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    region: Region,
    spec: AttentionSpec,
    gate: Tensor | None = None,
    extra: Any = None,
) -> Tensor:
    """q [T, H·D] or [T, H, D], k, v before norm and rope -> f32[T, H·Dv]; see `Ops.attention`."""
    if not plain.reads(region, extra, spec):
        return reference.attention(ops, b, q, k, v, region, spec, gate, extra)
    plain.check_given(k, v, region, spec, gate)
    query = plain.make_rows(b, q, k, v, region, spec, heads_each=8 if INTERPRETED else 1, joins=False)
    return _attend(b, query, region, spec, gate)


def _attend(
    b: ForwardBatch, query: Tensor, region: Region, spec: AttentionSpec, gate: Tensor | None
) -> Tensor:
    """query [T, H, D] -> f32[T, H·Dv], gated."""
    rows, seqs, held = query.shape[0], b.slot.shape[0], b.phase == "held"
    heads, kv_heads, value_dim = spec.heads, spec.kv_heads, spec.value_dim
    made = torch.zeros if b.padded else torch.empty
    out = made(rows, heads * value_dim, device=query.device)
    if rows == 0:
        return out
    pages_k, pages_v = region.fields["k"], region.fields["v"]
    table, block, group = b.table[region.group], region.block_entries, heads // kv_heads
    wide = max(16, triton.next_power_of_2(spec.head_dim)), max(16, triton.next_power_of_2(value_dim))
    matrix, overlap = room_of(query.device).matrix, overlaps(query.device)
    m = max(TILE if matrix else TILE // 2, triton.next_power_of_2(group))
    each = 1 if held else m // group
    tiles = -(-rows // each) if seqs == 1 else rows // each + seqs
    splits, parts, peaks = 1, out, out
    if held:
        tokens = table.block.shape[1] * block
        if spec.window is not None:
            tokens = min(tokens, spec.window + PART)
        splits = -(-tokens // PART) + (spec.window is not None)
        parts = made(splits, rows, heads, value_dim, device=query.device)
        peaks = made(splits, rows, heads, 2, device=query.device)
    span = None if held or not spec.bidirectional_spans else b.span
    sinks = out if spec.sinks is None else spec.sinks
    given, *apart = plain.gate_of(gate, spec, out)
    ends = {
        "SINKS": spec.sinks is not None, "GATE": GATES[spec.gate], "PER_HEAD": spec.gate_per_head,
        "DV": value_dim, "H": heads,
    }  # fmt: skip
    scales_k, scales_v, codings = plain.codings_of(region)
    places, warps, stages = (PLACES // 2, 8, 1) if max(wide) > WIDE or not matrix else (PLACES, 4, 2)
    kernels.attend_parts[(tiles, kv_heads, splits)](
        query, pages_k, pages_v, scales_k, scales_v, out, parts, peaks, given, sinks, b.index, b.query_start,
        b.length, b.sees, b.index if span is None else span, table.block, table.first, table.count, rows,
        seqs, b.sees.shape[1], table.block.stride(0), *apart, spec.scale * LOG2E,
        spec.softcap * LOG2E, spec.window or 0,
        HK=kv_heads, D=spec.head_dim, DP=wide[0], DVP=wide[1], M=m, N=places, PART=PART, RT=each,
        SB=searched(seqs), BLOCK=block, HELD=held, WINDOW=spec.window is not None,
        CAP=spec.softcap != 0.0, SPAN=span is not None, **ends, **codings,
        PTX=plain.ptx_of(query.device), num_warps=warps, num_stages=stages, OVERLAP=overlap,
        launch_pdl=overlap, enable_fp_fusion=False,
    )  # fmt: skip
    if held:
        per = min(32, triton.next_power_of_2(heads)) if INTERPRETED else 1
        kernels.join_parts[(rows, -(-heads // per))](
            parts, peaks, out, given, sinks, rows, splits, *apart, HP=per, DVP=wide[1], **ends,
            VT=codings["VT"], num_warps=1, OVERLAP=overlap, launch_pdl=overlap, enable_fp_fusion=False,
        )  # fmt: skip
    return out


__all__ = ["attention"]
