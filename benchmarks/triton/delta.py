"""Op `delta` and its commits on one CUDA device: decode, tree verify and prefill, after a check.

    python benchmarks/triton/delta.py [--model 27B] [--trees]

Every case is compared with the reference op. Decode and verify are timed as a replayed graph over all
layers of the model, each with its own state; a graph captures only what never waits for the host. Bytes:
the state read once when held, read and written once when committed. --trees: a row and trees of one
sequence alone, by CUDA C++ and by Triton.
"""

from __future__ import annotations

import argparse

import torch
from attrs import evolve, frozen
from luce_backend_triton import delta, state
from measure import by_kernel, graph_s, read_ceiling, table

from luce_core.bench import record
from luce_core.contracts import Commit, DeltaSpec, ForwardBatch, Norm, SlotState
from luce_core.model.batch import RowSet, make_batch
from luce_core.ops import build_ops

DEVICE = torch.device("cuda:0")
OPS = build_ops()
KERNEL, HELD = 4, 64


@frozen
class Model:
    key_heads: int
    value_heads: int
    layers: int
    dim: int = 128


MODELS = {"27B": Model(16, 48, 48), "35B-A3B": Model(16, 32, 30), "0.8B": Model(16, 16, 18)}


class Layers:
    """The state of some layers, and one input for all."""

    op = delta.CUDA

    def __init__(self, model: Model, slots: int, rows: int, layers: int):
        heads, dim = model.value_heads, model.dim
        self.channels = (2 * model.key_heads + heads) * dim
        self.model = model
        self.convs, self.memories = [], []
        for _ in range(layers):
            self.convs.append(self.slot(slots, (KERNEL - 1, self.channels), "shift", row=(self.channels,)))
            logs = {"k": (model.key_heads, dim), "u": (heads, dim), "g": (heads,)}
            self.memories.append(self.slot(slots, (heads, dim, dim), "delta_fold", **logs))
        self.spec = DeltaSpec(
            0, model.key_heads, heads, dim, dim, Norm(1 + 0.1 * torch.randn(dim, device=DEVICE), 1e-6),
            torch.randn(self.channels, KERNEL, device=DEVICE), -torch.rand(heads, device=DEVICE),
            torch.randn(heads, device=DEVICE),
        )  # fmt: skip
        widths = (self.channels, heads * dim, heads, heads)
        self.given = [torch.randn(rows, width, device=DEVICE) for width in widths]

    def slot(self, slots: int, shape: tuple[int, ...], fold: str, **log: tuple[int, ...]) -> SlotState:
        rows = {name: torch.randn(slots, HELD, *one, device=DEVICE) for name, one in log.items()}
        return SlotState("slot", 0.1 * torch.randn(slots, *shape, device=DEVICE), rows, fold)

    def run(self, b: ForwardBatch) -> None:
        for conv, memory in zip(self.convs, self.memories, strict=True):
            self.op.delta(OPS, b, *self.given, conv, memory, self.spec)

    def commit(self, b: ForwardBatch, commit: Commit) -> None:
        state.commit_slots(OPS, b, commit, [*self.convs, *self.memories])

    def error(self, b: ForwardBatch) -> tuple[float, float]:
        """Relative, of outputs (the worst row) and of the state (the worst head)."""
        conv, memory = self.convs[0], self.memories[0]
        copies = [
            evolve(slot, state=slot.state.clone(), log={name: t.clone() for name, t in slot.log.items()})
            for slot in (conv, memory)
        ]
        want = OPS.delta(b, *self.given, *copies, self.spec)
        got = self.op.delta(OPS, b, *self.given, conv, memory, self.spec)
        assert bool(torch.isfinite(got).all())
        pairs = [(got, want), (memory.state.flatten(2), copies[1].state.flatten(2))]
        pairs += [(conv.state.flatten(1), copies[0].state.flatten(1))]
        pairs += [(log.flatten(1), copies[1].log[name].flatten(1)) for name, log in memory.log.items()]
        errors = [float(((mine - its).norm(dim=-1) / its.norm(dim=-1)).max()) for mine, its in pairs]
        return errors[0], max(errors[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="27B")
    parser.add_argument("--trees", action="store_true")
    record.add_option(parser)
    given = parser.parse_args()
    with record.Record(given.out, str(DEVICE), {"model": given.model, "quant": "f32 states"}) as kept:
        measure(kept, given, MODELS[given.model])


def measure(kept: record.Record, given: argparse.Namespace, model: Model) -> None:
    ceiling = read_ceiling(DEVICE)
    kept.say(f"{torch.cuda.get_device_name(DEVICE)}, reads {ceiling / 1e9:.0f} GB/s; {given.model}")
    state_bytes = model.value_heads * model.dim * model.dim * 4
    if given.trees:
        trees(kept, model)
        return
    for seqs, rows in ((1, 1), (4, 1), (16, 1), (1, 4), (1, 16), (1, 24), (1, 48), (8, 8)):
        layers = Layers(model, seqs, seqs * rows, model.layers)
        tree = [-1, *(max(0, j // 2 - 1) for j in range(1, rows))]
        b = make_batch(
            "held", [RowSet(s, 9, [1] * rows, {}, parents=tree) for s in range(seqs)], device="cuda:0"
        )
        errors = layers.error(b)
        assert max(errors) < 2e-3, errors
        took = graph_s(lambda layers=layers, b=b: layers.run(b)) / model.layers
        path = torch.arange(min(rows, 4), dtype=torch.int32, device=DEVICE).expand(seqs, -1).contiguous()
        commit = Commit(path, torch.full((seqs,), path.shape[1], dtype=torch.int32, device=DEVICE))
        folded = graph_s(lambda layers=layers, b=b, commit=commit: layers.commit(b, commit))
        rate, rate_fold = seqs * state_bytes / took, 2 * seqs * state_bytes * model.layers / folded
        kept.say(
            f"held {seqs}x{rows}: {took * 1e6:.2f} us a layer, errors {errors[0]:.1e} {errors[1]:.1e}, "
            f"{rate / 1e9:.0f} GB/s = {rate / ceiling:.0%}; commit of all {folded * 1e6:.1f} us, "
            f"{rate_fold / 1e9:.0f} GB/s = {rate_fold / ceiling:.0%}",
            f"held {seqs}x{rows}", context=9, batch=seqs, rows=rows, seconds_per_layer=took, errors=errors,
            bytes_s=rate, commit_seconds=folded, commit_bytes_s=rate_fold, ceiling_bytes_s=ceiling,
        )  # fmt: skip
    for seqs, rows in ((1, 2048), (1, 512), (4, 300)):
        layers = Layers(model, seqs, seqs * rows, 1)
        b = make_batch("prefill", [RowSet(s, 9, [1] * rows, {}) for s in range(seqs)], device="cuda:0")
        errors = layers.error(b)
        assert max(errors) < 1e-2, errors
        took = graph_s(lambda layers=layers, b=b: layers.run(b))
        kernels = by_kernel(lambda layers=layers, b=b: layers.run(b))
        kept.say(
            f"prefill {seqs}x{rows}: {took * 1e6:.0f} us, errors {errors[0]:.1e} {errors[1]:.1e}; "
            f"{table(kernels)}",
            f"prefill {seqs}x{rows}", context=9, batch=seqs, rows=rows, seconds=took, errors=errors,
        )  # fmt: skip


def trees(kept: record.Record, model: Model) -> None:
    """Rows of one sequence, branches and a chain, in both ways; one is no more than a chain."""
    for rows in (1, 2, 8, 16, 24, 32):
        layers = Layers(model, 1, rows, model.layers)
        shapes = {"tree": [-1, *(max(0, j // 2 - 1) for j in range(1, rows))], "chain": None}
        for shape, parents in list(shapes.items())[rows == 1 :]:
            b = make_batch("held", [RowSet(0, 9, [1] * rows, {}, parents=parents)], device="cuda:0")
            for name, op in (("CUDA C++", delta.CUDA), ("Triton", delta.PORTABLE)):
                layers.op = op
                errors = layers.error(b)
                assert max(errors) < 2e-3, errors
                took = graph_s(lambda layers=layers, b=b: layers.run(b)) / model.layers
                kept.say(
                    f"{shape} of {rows} rows, {name}: {took * 1e6:.2f} us a layer, "
                    f"errors {errors[0]:.1e} {errors[1]:.1e}",
                    f"{shape} {rows} {name}", context=9, batch=1, rows=rows, seconds_per_layer=took,
                    errors=errors,
                )  # fmt: skip


if __name__ == "__main__":
    main()
