"""Ops `route` and `experts` on one CUDA device: decode and prefill of a layer of a mixture, after a check.

    python benchmarks/triton/moe.py [--portable] [--rows 1,16] [VARIANT ...]

Experts are compared with the reference op on the same packed weights, for the same choice of them. Decode is
timed as a replayed graph over several layers, one behind the other, together larger than the L2 cache. Bytes
are those of the records of distinct experts. Variants: as in variants.py, after as it is.
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import torch
from attrs import frozen
from linear import Linear as Shape
from linear import pack
from luce_backend_triton import moe, ops, route
from measure import by_kernel, graph_s, median_s, read_ceiling, table
from variants import AS_IT_IS
from variants import given as settings

from luce_core.bench import record
from luce_core.contracts import ExpertStack, Linear, LinearGroup, Norm, RouteSpec, SharedExpert
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
        self.router = torch.randn(count, width, device=DEVICE) / width**0.5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("variants", nargs="*", metavar="NAME=VALUE[,NAME=VALUE ...]")
    parser.add_argument("--portable", action="store_true", help="Triton alone, without CUDA C++")
    parser.add_argument("--rows", default="1,2,4,16,128,2048")
    parser.add_argument("--down", default="Q4_K", help="format of the second product")
    parser.add_argument("--layers", type=int, default=12)
    record.add_option(parser)
    given = parser.parse_args()
    shared = {"model": "35B-A3B layer", "quant": "Q4_K", "context": 0, "portable": given.portable}
    with record.Record(given.out, str(DEVICE), shared) as kept:
        ceiling = read_ceiling(DEVICE)
        kept.say(f"{torch.cuda.get_device_name(DEVICE)}, reads {ceiling / 1e9:.0f} GB/s; 35B-A3B layer")
        measured = Measured(given.portable, given.down, given.layers)
        for variant in (AS_IT_IS, *given.variants):
            for rows in map(int, given.rows.split(",")):
                with settings(variant):
                    measured.one(kept, rows, variant, ceiling)


class Measured:
    """Layers of one model, and what runs them."""

    def __init__(self, portable: bool, down: str, layers: int) -> None:
        self.model = Model()
        linears = ops.PORTABLE if portable else ops.CUDA
        self.op = (moe.PORTABLE if portable else moe.CUDA).experts
        names = ("pack_group", "linear", "table_rows", "norm_linear", "linear_out", "gated_mlp")
        self.ops = build_ops({name: getattr(linears, name) for name in names})
        self.layers = [Layer(self.model, self.ops, seed, down) for seed in range(layers)]

    def run(self, layers: list[Layer], x: torch.Tensor, batch: object) -> torch.Tensor:
        """One behind the other."""
        spec = RouteSpec(self.model.used)
        for layer in layers:
            routed = route.route(self.ops, batch, x, layer.norm, layer.router, spec)
            x = self.op(self.ops, x, layer.norm, routed, layer.bank, layer.shared, x)
        return x

    def one(self, kept: record.Record, rows: int, variant: str, ceiling: float) -> None:
        generator = torch.Generator(DEVICE).manual_seed(rows)
        x = torch.randn(rows, self.model.width, device=DEVICE, generator=generator)
        batch = SimpleNamespace(parent=torch.full((rows,), -1, dtype=torch.int32, device=DEVICE))
        first = self.layers[0]
        routed = route.route(self.ops, batch, x, first.norm, first.router, RouteSpec(self.model.used))
        given = (first.norm, tuple(routed), first.bank, first.shared, x)
        want = self.ops.experts(x, *given)
        got = self.run(self.layers[:1], x, batch)
        error = float(((got - want).norm(dim=1) / (want - x).norm(dim=1)).max())
        assert error < 5e-3, error
        if rows <= 32:
            took = graph_s(lambda: self.run(self.layers, x, batch)) / len(self.layers)
        else:
            took = median_s(lambda: self.run(self.layers[:2], x, batch)) / 2
        stack = first.bank.stack
        each = sum(w.packed.records.nbytes for w in (*stack.gate_up, stack.down)) / stack.count
        moved = each * routed[0].unique().numel()
        kernels = by_kernel(lambda: self.run(self.layers[:4], x, batch))
        kept.say(
            f"{variant}, {rows} rows: {took * 1e6:.2f} us a layer, error {error:.1e}, "
            f"{moved / took / 1e9:.0f} GB/s = {moved / took / ceiling:.0%}; "
            f"{table({k: v / 4 for k, v in kernels.items()})}",
            f"router and experts of {rows} rows", batch=rows, variant=variant, seconds_per_layer=took,
            error=error, bytes_s=moved / took, ceiling_bytes_s=ceiling,
        )  # fmt: skip


if __name__ == "__main__":
    main()
