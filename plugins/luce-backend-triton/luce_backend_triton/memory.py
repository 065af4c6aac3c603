"""What the plan counts beside the file's bytes. Imports neither torch nor triton."""

from __future__ import annotations

from luce_core.gguf.formats import FORMATS

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
ACTIVATION_VECTORS = 70
"""A step's own, in the memory graphs share, and beside them those of a first step, which is plain calls.

What an H200 used beside all other lines of the plan, chunks of 2,048: 49 (0.8B), 32 (35B-A3B), 51 (27B) and
69 (27B behind 32,768 tokens) such vectors (LOG.md 2026-11-30).
"""
DRIVER_BYTES = 512 << 20
"""Context, modules of kernels, workspaces of libraries: what explains, with the other lines, all four of
those runs to 3 %. Cards of fewer multiprocessors take less.
"""


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
