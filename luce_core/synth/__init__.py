"""Models of random weights in the exact sizes of published ones, to measure with before downloading.

    from luce_core.synth import write

    write("qwen3.5-27b", "q4_k_m", "/tmp/27b.gguf")

The geometries are those of the installed architecture plugins. See docs/synth.md.
"""

from luce_core.synth.known import by_name, find, geometries
from luce_core.synth.mixture import NATIVE, QUANTS, formats_of, num_bytes, quants_of, sizes
from luce_core.synth.writer import Progress, plan_shards, write

__all__ = [
    "NATIVE",
    "QUANTS",
    "Progress",
    "by_name",
    "find",
    "formats_of",
    "geometries",
    "num_bytes",
    "plan_shards",
    "quants_of",
    "sizes",
    "write",
]
