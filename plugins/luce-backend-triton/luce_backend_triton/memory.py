"""What the plan counts beside the file's bytes. Imports nothing."""

WEIGHT_SHARE = 1.03
"""Bytes of records per byte of blocks, the most of any format: Q4_K takes 4.625 bits for 4.5."""
SCRATCH_BYTES = 512 << 20
"""Of dense f16 weights that are made at a time."""
GRAPH_BYTES = 64 << 20
"""What the driver keeps of one program's captured steps: `executor.MOST_BUCKETS` of a thousand nodes each."""
CAPTURED = 2
"""Programs that are captured: prompts, and rows that are held."""
