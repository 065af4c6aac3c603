"""Quantized linears on one CUDA device: time, bytes per second and share of the read ceiling, after a check.

    python benchmarks/triton/linear.py [--model 27B] [--rows 1,4,16,24,32] [--prefill 2048] [--portable]

Every product is first compared with float64 on the same dequantized weights. Then it is timed as a
replayed CUDA graph over several copies of the matrix, together larger than four times the L2 cache, so
that no weight is found there. `file` counts the bytes of the GGUF blocks, `moved` those of the records
that are read.
"""

from __future__ import annotations

import argparse

import gguf
import numpy as np
import torch
from attrs import frozen
from luce_backend_triton import few_rows, formats, matrix, product, shapes
from luce_backend_triton.formats import BLOCKS
from luce_backend_triton.matrix import Matrix
from luce_backend_triton.product import Rows
from measure import graph_s, median_s, read_ceiling

from luce_core.bench import record
from luce_core.contracts import RawLinear

HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q8_0": (0,)}
"""Block format -> where its half floats lie."""
TOLERANCE = 1e-3
"""Relative error a product may have: x and scales are halves."""


@frozen
class Linear:
    """One matrix of a model, `count` times."""

    name: str
    rows: int
    cols: int
    format: str
    count: int


MODELS = {
    # Qwen3.5-27B, 48 GDN and 16 attention layers, formats as in a Q4_K_M file.
    "27B": (
        Linear("gdn qkv", 10240, 5120, "Q4_K", 48),
        Linear("gdn z", 6144, 5120, "Q4_K", 48),
        Linear("attn q,gate,k,v", 14336, 5120, "Q4_K", 16),
        Linear("out", 5120, 6144, "Q4_K", 64),
        Linear("gate,up", 34816, 5120, "Q4_K", 64),
        Linear("down Q4_K", 5120, 17408, "Q4_K", 32),
        Linear("down Q6_K", 5120, 17408, "Q6_K", 32),
        Linear("head", 248320, 5120, "Q6_K", 1),
    ),
    # Qwen3.5-0.8B, 18 GDN and 6 attention layers.
    "0.8B": (
        Linear("gdn qkv", 6144, 1024, "Q8_0", 18),
        Linear("gdn z", 2048, 1024, "Q8_0", 18),
        Linear("attn q,gate,k,v", 5120, 1024, "Q8_0", 6),
        Linear("out", 1024, 2048, "Q8_0", 24),
        Linear("gate,up", 7168, 1024, "Q8_0", 24),
        Linear("down", 1024, 3584, "Q8_0", 24),
        Linear("head", 248320, 1024, "Q8_0", 1),
    ),
}
PUBLISHED = {
    "27B": (
        "llama.cpp, Qwen3.5-27B Q4_K_M, RTX 4090 2K: 39 tokens/s, prefill 1409-2467 (published)",
        "llama.cpp, Qwen3.8-27B UD-Q4_K_XL, RTX 5090: 76 tokens/s (published)",
    ),
    "0.8B": ("llama.cpp, Qwen3.5-0.8B bf16, RTX 3090: 267 tokens/s (published)",),
}


def random_blocks(name: str, rows: int, cols: int, seed: int, device: torch.device) -> torch.Tensor:
    """u8[rows, row bytes] of ordinary weights."""
    generator = torch.Generator(device=device).manual_seed(seed)
    weights, size = BLOCKS[name]
    blocks = torch.randint(
        0, 256, (rows * cols // weights, size), dtype=torch.uint8, device=device, generator=generator
    )
    for at in HALVES[name]:
        scale = torch.randn(len(blocks), 1, device=device, generator=generator) * 0.002
        blocks[:, at : at + 2] = scale.half().view(torch.uint8)
    return blocks.view(rows, -1)


def pack(linear: Linear, seed: int, device: torch.device) -> Matrix:
    """One copy of the matrix, a slice at a time."""
    fmt = formats.FORMATS[linear.format]
    shape = (formats.tiles_of(linear.rows), formats.blocks_of(linear.cols), fmt.record_bytes)
    records = torch.empty(shape, dtype=torch.uint8, device=device)
    step = 4096
    for first in range(0, linear.rows, step):
        count = min(step, linear.rows - first)
        raw = random_blocks(linear.format, count, linear.cols, seed * 1000 + first, device)
        records[first // 16 : first // 16 + formats.tiles_of(count)] = formats.pack(linear.format, raw)
    return Matrix(linear.name, linear.format, linear.rows, linear.cols, records)


def check(name: str, rows: int, cuda: bool, device: torch.device) -> float:
    """Relative error of a small product, row by row the worst."""
    n, k = 528, 1536
    raw = random_blocks(name, n, k, 7, device)
    packed = matrix.pack_matrix(RawLinear("w", name, (n, k), raw.cpu().numpy(), str(device)), None)
    x = torch.randn(rows, k, device=device)
    got = product.product(packed, Rows(x), cuda).double().cpu()
    exact = torch.from_numpy(
        np.array(gguf.dequantize(raw.cpu().numpy(), gguf.GGMLQuantizationType[name]))
    ).double()
    want = x.double().cpu() @ exact.T
    return float(((got - want).norm(dim=1) / want.norm(dim=1)).max())


def bench_few(linear: Linear, copies: list[Matrix], m: int, cuda: bool, whole: bool) -> float:
    """Seconds of one product; whole: with making x ready."""
    device = copies[0].records.device
    x = torch.randn(m, linear.cols, device=device)
    found = (
        shapes.choose(
            copies[0].fmt, m, copies[0].records.shape[0], copies[0].blocks, shapes.room_of(device.index or 0)
        )
        if cuda
        else None
    )
    if whole or found is None:
        return graph_s(lambda: [product.product(one, Rows(x), cuda) for one in copies]) / len(copies)
    shape, grid = found
    given, y = Rows(x).few(shape.kind), torch.empty(m, linear.rows, device=device)

    def run() -> None:
        for one in copies:
            few_rows.launch(one.format, one.records, one.rows, given, y, shape, grid)

    return graph_s(run) / len(copies)


def report(
    kept: record.Record, model: str, rows: list[int], prefill: int, cuda: bool, device: torch.device
) -> None:
    ceiling = read_ceiling(device)
    kernels = "CUDA C++" if cuda else "Triton"
    kept.say(f"{torch.cuda.get_device_name(device)}, reads {ceiling / 1e9:.0f} GB/s; kernels {kernels}")
    for name in sorted({linear.format for linear in MODELS[model]}):
        errors = {m: check(name, m, cuda, device) for m in (*rows, 300)}
        shown = ", ".join(f"{m} rows {error:.1e}" for m, error in errors.items())
        line = f"{name}: relative error {shown}"
        kept.say(line, "relative error", quant=name, batch=max(errors), errors=errors)
        assert max(errors.values()) <= TOLERANCE, errors
    totals: dict[str, float] = dict.fromkeys([*map(str, rows), "prefill"], 0.0)
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    for linear in MODELS[model]:
        weights, size = BLOCKS[linear.format]
        file_bytes = linear.rows * linear.cols // weights * size
        copies = [pack(linear, seed, device) for seed in range(max(2, -(-4 * l2 // file_bytes)))]
        moved = copies[0].records.numel()
        shape = f"{linear.name} {linear.rows}x{linear.cols}"
        kept.say(f"{linear.name} {linear.format} {linear.rows}x{linear.cols}, {len(copies)} copies")
        for m in rows:
            took, with_x = (bench_few(linear, copies, m, cuda, whole) for whole in (False, True))
            totals[str(m)] += linear.count * took
            kept.say(
                f"  {m:3d} rows {took * 1e6:8.2f} us, with x {with_x * 1e6:8.2f}; "
                f"file {file_bytes / took / 1e9:5.0f} GB/s, "
                f"moved {moved / took / 1e9:5.0f} = {moved / took / ceiling:4.0%} of the ceiling",
                shape, quant=linear.format, batch=m, seconds=took, seconds_with_x=with_x,
                file_bytes_s=file_bytes / took, moved_bytes_s=moved / took, ceiling_bytes_s=ceiling,
            )  # fmt: skip
        if prefill:
            x = torch.randn(prefill, linear.cols, device=device)
            many = min(prefill, 1) if linear.name == "head" else prefill
            took = median_s(lambda copies=copies, x=x[:many]: product.product(copies[0], Rows(x), cuda), 5)
            totals["prefill"] += linear.count * took
            rate = 2 * many * linear.rows * linear.cols / took / 1e12
            line = f"  {many} rows {took * 1e6:8.0f} us, {rate:.0f} TFLOP/s"
            kept.say(line, shape, quant=linear.format, batch=many, seconds=took, flops_s=rate * 1e12)
        del copies
        torch.cuda.empty_cache()
    for m in rows:
        took, ratio = totals[str(m)], totals[str(m)] / totals[str(rows[0])]
        line = f"linears of {model}, {m} rows: {took * 1e3:.3f} ms, {1 / took:.1f} steps/s, {ratio:.2f} times"
        kept.say(line, "all linears", quant="Q4_K_M", batch=m, seconds=took)
    if prefill:
        took = totals["prefill"]
        line = f"linears of {model}, prefill {prefill}: {took * 1e3:.1f} ms, {prefill / took:.0f} tokens/s"
        kept.say(line, "all linears, prompt", quant="Q4_K_M", batch=prefill, seconds=took)
    kept.say("\n".join(PUBLISHED[model]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="27B")
    parser.add_argument("--rows", default="1,4,16,24,32")
    parser.add_argument("--prefill", type=int, default=2048, help="rows of a prompt's chunk; 0 leaves it out")
    parser.add_argument("--portable", action="store_true", help="Triton alone, without CUDA C++")
    record.add_option(parser)
    given = parser.parse_args()
    rows = [int(part) for part in given.rows.split(",")]
    shared = {"model": given.model, "context": 0, "portable": given.portable}
    with record.Record(given.out, "cuda:0", shared) as kept:
        report(kept, given.model, rows, given.prefill, not given.portable, torch.device("cuda:0"))


if __name__ == "__main__":
    main()
