"""Time of one held step by number of rows, int8 products against panels: where `GEMM_ROWS` belongs.

    python benchmarks/cpu/rows.py MODEL.gguf [--threads 2]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from luce_backend_cpu import region

from luce_core.testing.rig import ModelRig

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rig = ModelRig(
        options.model, "luce_arch_llama.hooks", "luce_backend_cpu.hooks", layers=("cpu-c",), cache_type="f16",
    )
    seq = rig.open()
    rig.prefill({seq: list(range(100, 132))})
    print(f"{'rows':>6}{'int8 ms':>10}{'panels ms':>11}")
    for rows in ROWS:
        times: dict[int, list[float]] = {10**6: [], 1: []}
        for _ in range(options.repetitions):
            for threshold, found in times.items():
                region.GEMM_ROWS = threshold
                start = time.perf_counter()
                rig.hold({seq: list(range(200, 200 + rows))})
                found.append(1e3 * (time.perf_counter() - start))
        print(f"{rows:6}" + "".join(f"{statistics.median(found):10.2f}" for found in times.values()))


if __name__ == "__main__":
    main()
