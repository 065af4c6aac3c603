"""What the plan counts beside the file's bytes. Imports neither torch nor triton."""

from __future__ import annotations

from luce_core.contracts import LayerWidths, ModelSpec, Slot, StepBytes
from luce_core.gguf.formats import FORMATS
from luce_core.plan_memory import reference_step

RECORD_COLS = 256
"""Of a record: rows are filled up to whole ones."""
RECORD_BITS = {
    "Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 5.5, "Q5_1": 6.0, "Q8_0": 8.5, "Q4_K": 4.625, "Q5_K": 5.625,
    "Q6_K": 6.5625, "IQ4_NL": 4.5, "IQ4_XS": 4.3125, "MXFP4": 4.25, "NVFP4": 4.5,
}  # fmt: skip
"""Block format -> bits a weight takes in a record (`formats.FORMATS`)."""
HALF_BITS = 16
"""Of a weight in blocks of any other format."""
SCRATCH_BYTES = 512 << 20
"""Of dense f16 weights that are made at a time."""
GRAPH_BYTES = 64 << 20
"""What the driver keeps of one program's captured steps: `executor.MOST_BUCKETS` of a thousand nodes each."""
CAPTURED = 2
"""Programs that are captured: prompts, and rows that are held."""
DRIVER_BYTES = 640 << 20
"""Context, modules of kernels, tables: 0.65 GB of an H200 after loading and 0.02 in the end, beside graphs
(LOG.md 2026-12-01). Cards of fewer multiprocessors take less.
"""
LIBRARY_BYTES = 32 << 20
"""What torch allocates for cuBLAS on each stream from compute capability 9.0 on: one for plain calls, one for
captures.
"""
DELTA_ROWS = 64
"""Rows of a prompt that meet one state: `delta.CHUNK`."""
SPLIT_ROWS = 148 * 128
"""Rows · heads from which on there are enough programs: of 128 each, one for every multiprocessor (of a B200;
an H200 has 132).
"""
DELTA_FOLD, SHIFT = "delta_fold", "shift"
"""Of the slots whose ops have kernels: states of the delta rule, windows of convolutions."""
F32, F16 = 4, 2
"""Bytes of a number."""


def kept(block_format: str, columns: int) -> float:
    """Bytes that are kept of a matrix with rows of so many columns, per byte of the file."""
    blocks = FORMATS.by_name(block_format)
    if blocks.block_weights == 1:
        return 1.0
    in_file = 8 * blocks.block_bytes / blocks.block_weights
    if block_format not in RECORD_BITS:
        return HALF_BITS / in_file
    filled_up = -(-columns // RECORD_COLS) * RECORD_COLS / columns
    return RECORD_BITS[block_format] / in_file * filled_up


def activations(spec: ModelSpec, rows: int) -> StepBytes:
    """Of a chunk of a prompt, by what is alive at once; steps that pick tokens take less.

    The residual as it goes into a half of a layer, and all that the half makes of it. The first step of a
    kind is plain calls, in memory that torch takes back. Graphs share a pool, where blocks that were cut for
    one half seldom suit the other: it has room for both.
    """
    if not _has_kernels(spec):
        return reference_step(spec, rows)
    heads = {pages.layer: pages.fields["v"].shape[-1] for pages in spec.layout.pages}
    linear = {slot.layer: slot for slot in spec.layout.slots if slot.fold == DELTA_FOLD}
    hidden, mixers, widest = spec.hidden, [0], max(heads.values(), default=1)
    for n, widths in enumerate(spec.widths):
        if n in linear:
            mixers.append(rows * _linear_attention(hidden, widths, linear[n]))
        else:
            mixers.append(_attention(hidden, widths, heads.get(n, widest), rows))
    residual = rows * F32 * hidden * (2 if spec.runs_nextn else 1)  # the MTP block reads the trunk's result
    mixer, ffn = max(mixers), rows * max(_ffn(hidden, widths) for widths in spec.widths)
    working, both = residual + max(mixer, ffn), residual + mixer + ffn
    return StepBytes(working + LIBRARY_BYTES, both + LIBRARY_BYTES)


def _has_kernels(spec: ModelSpec) -> bool:
    """Whether no layer's work goes to the reference ops: its products are known, its pages are keys and
    values, its slots windows and states of the gated delta rule.
    """
    return (
        bool(spec.widths)
        and all(one.mixer_in and (one.ffn_in or one.experts_used) for one in spec.widths)
        and all(set(pages.fields) == {"k", "v"} for pages in spec.layout.pages)
        and all(
            slot.fold == SHIFT or (slot.fold == DELTA_FOLD and len(slot.log["g"].shape) == 1)
            for slot in spec.layout.slots
        )
    )


def _attention(hidden: int, widths: LayerWidths, value_dim: int, rows: int) -> int:
    """Bytes of the first half of a layer."""
    made, out = F32 * widths.mixer_in, widths.mixer_out
    apart, sums = rows * out // value_dim, 0
    if apart < SPLIT_ROWS:  # too few programs: the text is cut, and the sums of its parts are added last
        sums = F32 * (apart + SPLIT_ROWS) * (value_dim + 2)
    inside = rows * (made + (F32 + F16) * out) + sums  # the result, and the query
    return max(rows * _ahead(widths.mixer_in, hidden), inside, rows * (made + _behind(hidden, widths)))


def _linear_attention(hidden: int, widths: LayerWidths, slot: Slot) -> int:
    """Bytes of a row in the first half of a layer with the delta rule."""
    made = F32 * widths.mixer_in
    heads, key_dim, value_dim = slot.state.shape
    keys, values, key_heads = heads * key_dim, heads * value_dim, slot.log["k"].shape[0]
    inputs = F16 * (2 * key_heads * key_dim + values)  # q, k, v behind the convolution
    solved = F16 * (keys + values) + F32 * heads  # w, u, and sums of log decays
    states = F16 * keys * value_dim // DELTA_ROWS
    inside = made + inputs + solved + states + F32 * values  # the last: the result
    return max(_ahead(widths.mixer_in, hidden), inside, made + _behind(hidden, widths))


def _ffn(hidden: int, widths: LayerWidths) -> int:
    """Bytes of a row in the second half of a layer."""
    own = _mlp(widths.ffn_in, widths.ffn_out, hidden) + _normed(widths)
    if not widths.experts_used:
        return max(_ahead(widths.ffn_in, hidden), own)
    one = _mlp(widths.expert_in, widths.expert_out, hidden)
    chosen = widths.experts_used * (one + 3 * F32) + F16 * hidden  # id, weight, place; x as halves
    router = F32 * (hidden + widths.experts)  # x as floats, and logits
    results = F32 * hidden * (2 if own else 1)  # the sum, beside what the shared expert gave
    return router + chosen + max(own, results)


def _ahead(results: int, hidden: int) -> int:
    """Bytes of a row at a half's first products: x as halves; the results, and once more where the weights
    become halves in several slices.
    """
    sliced = F16 * results * hidden > SCRATCH_BYTES
    return F16 * hidden + F32 * results * (2 if sliced else 1)


def _behind(hidden: int, widths: LayerWidths) -> int:
    """Bytes of a row at the first half's last product: its input, the same as halves, its result."""
    return (F32 + F16) * widths.mixer_out + F32 * hidden + _normed(widths)


def _mlp(gate_up: int, down: int, hidden: int) -> int:
    """Bytes of a row at the last product: gate and up; act(gate) · up as halves; its factor; the result."""
    return F32 * gate_up + F16 * down + F32 * (1 + hidden) if gate_up else 0


def _normed(widths: LayerWidths) -> int:
    """Bytes of a row of a result that is normed: twice more."""
    return 2 * F32 * widths.norm_behind
