"""Long prompts and several streams of a whole model on one CUDA device, beside what arithmetic allows.

    python benchmarks/triton/long.py [--model qwen3.5-27b:q4_k_m ...] [--lengths 32768,131072]
                                     [--streams 1,2,4,5,8,16] [--context 4096] [--chunk 2048]

A prompt is timed from `submit` to its first token, by the engine, cold cache. Floor: two operations for every
active weight and token, and 4 · layers · heads · width · length² / 2 of attention, at the rate of a large f16
product on the card, measured first. Streams: tokens of all of them a second, each with --context behind it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from math import prod
from pathlib import Path
from typing import Any

import torch
from decode import DEVICE, HOOKS, Bench, model_file, of, prompt

from luce_core.bench import record
from luce_core.engine.warming import warm
from luce_core.synth.known import find
from luce_core.testing.pipeline import registry_of


def rate() -> float:
    """Operations per second of a product of halves."""
    a, b = (torch.randn(8192, 8192, dtype=torch.float16, device=DEVICE) for _ in range(2))
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.mm(a, b)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * 8192**3 / sorted(times)[len(times) // 2]


def work(name: str) -> tuple[float, float]:
    """Operations of a token's products without the head, and of attention per token and token before it."""
    geometry = find(registry_of(HOOKS[0]), name.partition(":")[0])
    keys: dict[str, Any] = {key.partition(".")[2]: value for key, value in geometry.metadata.items()}
    used = keys.get("expert_used_count", 0) / max(1, keys.get("expert_count", 0))
    weights = 0.0
    for tensor, shape in geometry.shapes.items():
        if tensor.startswith("blk.") and len(shape) > 1:
            weights += prod(shape) * (used if "_exps." in tensor else 1)
    layers = keys["block_count"] // keys["full_attention_interval"]
    return 2 * weights, 4.0 * layers * keys["attention.head_count"] * keys["attention.key_length"]


def long_prompt(bench: Bench, length: int) -> float:
    arrived = bench.submit(prompt(length, length), 1)
    torch.cuda.synchronize()
    start = time.perf_counter()
    bench.run()
    return arrived[0][0] - start


def measure(kept: record.Record, name: str, given: argparse.Namespace, ceiling: float) -> None:
    path = model_file(given.folder, name)
    products, attention = work(name)
    lengths = [int(part) for part in given.lengths.split(",") if part]
    if lengths:
        bench = Bench(path, ctx_size=max(lengths) + 64, chunk=given.chunk, max_sequences=1)
        warm(bench.engine)  # as a server does: no kernel is compiled in what is timed
        for length in lengths:
            took = long_prompt(bench, length)
            floor = (products * length + attention * length**2 / 2) / ceiling
            kept.say(
                f"{path.stem}, prompt of {length}: {took:.2f} s, {length / took:.0f} tokens/s; floor "
                f"{floor:.2f} s, {floor / took:.0%} of it reached",
                "prompt", **of(name), context=length, batch=1, chunk=given.chunk, seconds=took, floor_s=floor,
            )  # fmt: skip
        del bench
        torch.cuda.empty_cache()
    streams = [int(part) for part in given.streams.split(",") if part]
    if streams:
        bench = Bench(path, ctx_size=given.context + 512, chunk=given.chunk, max_sequences=max(streams))
        alone = None
        for count in streams:
            took = bench.decode_s(given.context, count)
            alone = alone or took
            kept.say(
                f"{path.stem}, {count} streams behind {given.context}: {took * 1e3:.2f} ms a step, "
                f"{count / took:.0f} tokens/s, {count * alone / took:.2f} times one stream's",
                "streams", **of(name), context=given.context, batch=count, seconds_per_step=took,
            )  # fmt: skip
        del bench
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="*", default=["qwen3.5-27b:q4_k_m"], help="GEOMETRY:QUANT")
    parser.add_argument("--lengths", default="32768,65536,131072", help="empty leaves them out")
    parser.add_argument("--streams", default="1,2,4,5,8,16", help="empty leaves them out")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "luce-models")
    record.add_option(parser)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    with record.Record(given.out, str(DEVICE)) as kept:
        ceiling = rate()
        kept.say(f"{torch.cuda.get_device_name(0)}, products of halves {ceiling / 1e12:.0f} TFLOP/s")
        for name in given.model:
            measure(kept, name, given, ceiling)


if __name__ == "__main__":
    sys.exit(main())
