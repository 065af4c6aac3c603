"""Op `attention` on one CUDA device: decode, tree verify, prefill and ragged batches, after a check.

    python benchmarks/triton/attention.py [--model 27B] [--type f16] [--quick]

Every case is compared with the reference op first (pages f16, sums f32). Decode and verify are timed as a
replayed graph over as many layers as the model has, each with its own pages, so that no page is found in
the L2 cache; a graph captures only what never waits for the host. Floors: bytes of K and V over the read
ceiling, or floating-point operations over what a large bf16 product reaches. Ragged: one long text among
short ones, beside the same number that are all as long, which is what filling up would cost.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from attrs import evolve, frozen
from luce_backend_triton import attention
from measure import by_kernel, graph_s, read_ceiling, table

from luce_core.bench import record
from luce_core.contracts import AttentionSpec, Norm, Region, RopeSpec, SeqTable
from luce_core.model.batch import RowSet, make_batch
from luce_core.ops import build_ops

BLOCK = 32
DEVICE = torch.device("cuda:0")
OPS = build_ops()


@frozen
class Model:
    heads: int
    kv_heads: int
    dim: int
    layers: int
    gated: bool = False
    rotated: int = 0


MODELS = {
    "27B": Model(24, 4, 256, 16, True, 64),
    "0.8B": Model(8, 2, 256, 6, True, 64),
    "35B-A3B": Model(16, 2, 256, 10, True, 64),
    "8B": Model(32, 8, 128, 36, False, 128),
}


def spec_of(model: Model, window: int | None = None) -> AttentionSpec:
    rope = RopeSpec(torch.logspace(0, -6, model.rotated // 2, device=DEVICE))
    norms = [Norm(1 + 0.1 * torch.randn(model.dim, device=DEVICE), 1e-6) for _ in range(2)]
    gate = "sigmoid" if model.gated else ""
    return AttentionSpec(
        0, model.heads, model.kv_heads, model.dim, model.dim, model.dim**-0.5, rope, *norms, gate=gate,
        window=window,
    )  # fmt: skip


RAGGED = (("128K and 7 of 8K", (131072, *[8192] * 7)), ("4K and 7 of 256", (4096, *[256] * 7)))
"""Committed tokens of the sequences."""


class Case:
    """Sequences of so many committed tokens, and some rows each."""

    def __init__(
        self, model: Model, phase: str, depths: Sequence[int], rows: int, dtype: torch.dtype, layers: int
    ):
        blocks = [-(-(depth + rows) // BLOCK) for depth in depths]
        order = torch.randperm(sum(blocks)).tolist()
        sets, at = [], 0
        for s, (depth, each) in enumerate(zip(depths, blocks, strict=True)):
            table = SeqTable(tuple(order[at : at + each]), tuple(range(0, each * BLOCK, BLOCK)))
            at += each
            tree = (
                None
                if phase == "prefill" or rows == 1
                else [-1, *(max(0, j // 2 - 1) for j in range(1, rows))]
            )
            sets.append(RowSet(s, depth, [1] * rows, {"full": table}, parents=tree))
        self.batch = make_batch(phase, sets, device="cuda:0")
        shape = (sum(blocks), BLOCK, model.kv_heads, model.dim)
        self.regions = []
        for _ in range(layers):
            fields = {name: torch.randn(*shape, device=DEVICE, dtype=dtype) for name in ("k", "v")}
            self.regions.append(Region("r", "full", fields, BLOCK))
        total = len(depths) * rows
        widths = (model.heads * model.dim, model.kv_heads * model.dim, model.kv_heads * model.dim)
        self.q, self.k, self.v = (torch.randn(total, width, device=DEVICE) for width in widths)
        self.gate = torch.randn(total, widths[0], device=DEVICE) if model.gated else None

    def run(self, spec: AttentionSpec) -> None:
        for region in self.regions:
            attention.attention(OPS, self.batch, self.q, self.k, self.v, region, spec, self.gate)

    def error(self, spec: AttentionSpec) -> float:
        """Relative, the worst row."""
        region = self.regions[0]
        copy = evolve(region, fields={name: page.clone() for name, page in region.fields.items()})
        want = OPS.attention(self.batch, self.q, self.k, self.v, copy, spec, self.gate)
        got = attention.attention(OPS, self.batch, self.q, self.k, self.v, region, spec, self.gate)
        assert bool(torch.isfinite(got).all())
        return float(((got - want).norm(dim=1) / want.norm(dim=1)).max())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="27B")
    parser.add_argument("--type", choices=("f16", "bf16", "f32"), default="f16")
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    record.add_option(parser)
    given = parser.parse_args()
    model = MODELS[given.model]
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}[given.type]
    shared = {"model": given.model, "quant": f"pages {given.type}"}
    with record.Record(given.out, str(DEVICE), shared) as kept:
        measure(kept, given, model, dtype)


def measure(kept: record.Record, given: argparse.Namespace, model: Model, dtype: torch.dtype) -> None:
    ceiling = read_ceiling(DEVICE)
    kept.say(
        f"{torch.cuda.get_device_name(DEVICE)}, reads {ceiling / 1e9:.0f} GB/s; "
        f"{given.model}, pages {given.type}"
    )
    spec = spec_of(model)
    held = [
        (1, 1, 16), (1, 1, 200), (1, 16, 16), (1, 1, 4096), (1, 16, 4096), (1, 1, 32768), (1, 24, 16),
        (16, 1, 4096), (4, 8, 4096),
    ]  # fmt: skip
    for seqs, rows, depth in held[:5:2] if given.quick else held:
        case = Case(model, "held", [depth] * seqs, rows, dtype, model.layers)
        error = case.error(spec)
        assert error < 2e-2, error
        took = graph_s(lambda case=case: case.run(spec)) / model.layers
        moved = 2 * seqs * (depth + rows) * model.kv_heads * model.dim * dtype.itemsize
        kernels = by_kernel(lambda case=case: case.run(spec))
        kept.say(
            f"held {seqs}x{rows} at {depth}: {took * 1e6:.2f} us a layer, error {error:.1e}, "
            f"{moved / took / 1e9:.0f} GB/s = {moved / took / ceiling:.0%}; "
            f"{table({k: v / model.layers for k, v in kernels.items()})}",
            f"held {seqs}x{rows}", context=depth, batch=seqs, rows=rows, seconds_per_layer=took, error=error,
            bytes_s=moved / took, ceiling_bytes_s=ceiling,
        )  # fmt: skip
    for name, depths in () if given.quick else RAGGED:
        took, layers = [], 1 if max(depths) > 1 << 16 else model.layers
        for lengths in (depths, [max(depths)] * len(depths)):
            case = Case(model, "held", lengths, 1, dtype, layers)
            if lengths is depths:
                error = case.error(spec)
                assert error < 2e-2, error
            took.append(graph_s(lambda case=case: case.run(spec)) / layers)
            del case
        moved = 2 * (sum(depths) + len(depths)) * model.kv_heads * model.dim * dtype.itemsize
        kept.say(
            f"ragged, {name}: {took[0] * 1e6:.1f} us a layer, {moved / took[0] / 1e9:.0f} GB/s; all as long "
            f"{took[1] * 1e6:.1f} us, {took[1] / took[0]:.2f} times; error {error:.1e}",
            f"ragged {name}", context=max(depths), batch=len(depths), depths=list(depths), error=error,
            seconds_per_layer=took[0], seconds_filled_up=took[1], bytes_s=moved / took[0],
        )  # fmt: skip
    for rows, depth, window in ((2048, 0, None), (2048, 4096, None), (512, 8192, None), (2048, 4096, 1024)):
        case = Case(model, "prefill", [depth], rows, dtype, 1)
        narrow = spec_of(model, window)
        error = case.error(narrow)
        assert error < 2e-2, error
        took = graph_s(lambda case=case, narrow=narrow: case.run(narrow))
        seen = rows * depth + rows * rows / 2 if window is None else rows * window
        rate = 4 * seen * model.heads * model.dim / took
        kernels = by_kernel(lambda case=case, narrow=narrow: case.run(narrow))
        kept.say(
            f"prefill {rows} at {depth}, window {window}: {took * 1e6:.0f} us, error {error:.1e}, "
            f"{rate / 1e12:.0f} TFLOP/s; {table(kernels)}",
            f"prefill {rows}", context=depth, batch=1, rows=rows, window=window, seconds=took, error=error,
            flops_s=rate,
        )  # fmt: skip


if __name__ == "__main__":
    main()
