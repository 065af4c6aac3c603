"""Op `experts` on one CUDA device: decode and prefill of a layer of a mixture, after a check.

    python benchmarks/triton/moe.py [--portable]

It is compared with the reference op on the same packed weights. Decode is timed as a replayed graph over
several layers, together larger than the L2 cache. Bytes are those of the records of distinct experts.
"""

from __future__ import annotations

import argparse

import torch
from attrs import frozen
from linear import Linear as Shape
from linear import pack
from luce_backend_triton import moe, ops
from measure import by_kernel, graph_s, median_s, read_ceiling, table

from luce_core.bench import record
from luce_core.contracts import ExpertStack, Linear, LinearGroup, Norm, SharedExpert
from luce_core.model.weights import ResidentExperts
from luce_core.ops import build_ops

DEVICE = torch.device("cuda:0")


@frozen
class Model:
    """Qwen3.5-35B-A3B."""

    width: int = 2048
    hidden: int = 512
    experts: int = 256
    used: int = 8


class Layer:
    """One layer's experts and shared expert."""

    def __init__(self, model: Model, layer_ops: object, seed: int, down: str = "Q4_K"):
        def matrix(out: int, width: int, name: str, place: int) -> Linear:
            packed = pack(Shape("w", out, width, name, 1), seed * 10 + place, DEVICE)
            return Linear("w", out, width, name, packed)

        count, width, hidden = model.experts, model.width, model.hidden
        pair = tuple(matrix(count * hidden, width, "Q4_K", place) for place in (0, 1))
        self.bank = ResidentExperts(
            torch.arange(count, dtype=torch.int32, device=DEVICE),
            ExpertStack(count, pair, matrix(count * width, hidden, down, 2)),
        )
        members = tuple(matrix(hidden, width, "Q4_K", place) for place in (3, 4))
        group = LinearGroup(members, layer_ops.pack_group(members))
        gate = torch.randn(width, device=DEVICE) / width**0.5
        self.shared = SharedExpert(group, matrix(width, hidden, "Q4_K", 5), gate)
        self.norm = Norm(1 + 0.1 * torch.randn(width, device=DEVICE), 1e-6)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--portable", action="store_true", help="Triton alone, without CUDA C++")
    record.add_option(parser)
    given = parser.parse_args()
    shared = {"model": "35B-A3B layer", "quant": "Q4_K", "context": 0, "portable": given.portable}
    with record.Record(given.out, str(DEVICE), shared) as kept:
        measure(kept, given)


def measure(kept: record.Record, given: argparse.Namespace) -> None:
    model = Model()
    linears = ops.PORTABLE if given.portable else ops.CUDA
    op = (moe.PORTABLE if given.portable else moe.CUDA).experts
    names = ("pack_group", "linear", "table_rows", "norm_linear", "linear_out", "gated_mlp")
    layered = build_ops({name: getattr(linears, name) for name in names})
    reference = build_ops({name: getattr(linears, name) for name in names})
    layers = [Layer(model, layered, seed) for seed in range(12)]
    ceiling = read_ceiling(DEVICE)
    kept.say(f"{torch.cuda.get_device_name(DEVICE)}, reads {ceiling / 1e9:.0f} GB/s; 35B-A3B layer")
    one_expert = layers[0].bank.stack.down.packed.records.nbytes / model.experts * 3
    for rows in (1, 2, 4, 16, 128, 2048):
        x = torch.randn(rows, model.width, device=DEVICE)
        score = torch.rand(rows, model.experts, device=DEVICE)
        weight, ids = score.topk(model.used)
        routed = (ids.int(), weight / weight.sum(1, keepdim=True))

        def run(layer: Layer, x: torch.Tensor = x, routed: tuple = routed) -> torch.Tensor:
            return op(layered, x, layer.norm, routed, layer.bank, layer.shared, x)

        one = layers[0]
        want = reference.experts(x, one.norm, routed, one.bank, one.shared, x)
        got = run(one)
        error = float(((got - want).norm(dim=1) / (want - x).norm(dim=1)).max())
        assert error < 5e-3, error
        if rows <= 32:
            took = graph_s(lambda run=run: [run(layer) for layer in layers]) / len(layers)
        else:
            took = median_s(lambda run=run: [run(layer) for layer in layers[:2]]) / 2
        moved = one_expert * ids.unique().numel()
        kernels = by_kernel(lambda run=run: [run(layer) for layer in layers[:4]])
        kept.say(
            f"{rows} rows: {took * 1e6:.1f} us a layer, error {error:.1e}, {moved / took / 1e9:.0f} GB/s = "
            f"{moved / took / ceiling:.0%}; {table({k: v / 4 for k, v in kernels.items()})}",
            f"experts of {rows} rows", batch=rows, seconds_per_layer=took, error=error, bytes_s=moved / took,
            ceiling_bytes_s=ceiling,
        )  # fmt: skip


if __name__ == "__main__":
    main()
