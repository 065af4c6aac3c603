"""`luce-core doctor --kernels` of the invariant layers: right, and a row's bits the same in any company."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from luce_backend_triton import selfcheck as plain
from luce_backend_triton.formats import FORMATS
from luce_backend_triton.invariant import attention, delta, mixtures, ops
from luce_core.contracts import (
    AttentionSpec,
    DeltaSpec,
    ForwardBatch,
    KernelCheck,
    LinearGroup,
    Norm,
    Region,
    SeqTable,
    SlotState,
)
from luce_core.model.batch import RowSet, make_batch
from luce_core.ops import build_ops

ROWS = 300
"""Of x, beside which single ones are multiplied again."""
LENGTH, COUNT, BLOCK = 700, 20, 32
"""Of a text with two parts, behind which a tree is held; of it, what is run as a prompt."""
TREE, PATH = [-1, 0, 0, 1, 2, 4], [0, 2, 4, 5]


@frozen
class Checks:
    """Those of one layer, in parts that stand alone."""

    layer: ops.Layer
    mixture: mixtures.Experts

    def products(self, device: str) -> Iterator[KernelCheck]:
        """Of every format."""
        torch.manual_seed(0)
        names = (*FORMATS, *plain.FLOATS)
        yield from plain.products(self.layer, device, names, plain.ROWS)
        yield from same_products(self.layer, device, names)

    def sequences(self, device: str) -> Iterator[KernelCheck]:
        """Everything that multiplies no packed weights."""
        torch.manual_seed(0)
        yield from plain.sequences(device, attention.attention, delta.delta)
        yield from plain.routes(device, mixtures.route)
        yield from same_sequences(device, LENGTH)

    def experts(self, device: str) -> Iterator[KernelCheck]:
        """Of every block format."""
        torch.manual_seed(0)
        names = tuple(FORMATS)
        yield from plain.experts(self.layer, device, names, plain.EXPERT_ROWS, self.mixture.experts)


CUDA, PORTABLE = Checks(ops.CUDA, mixtures.CUDA), Checks(ops.PORTABLE, mixtures.PORTABLE)


def _same(what: str, pairs: Iterable[tuple[Tensor, Tensor]], op: str) -> KernelCheck:
    """No bit may differ."""
    worst = max(float((one.float() - other.float()).abs().max()) for one, other in pairs)
    return KernelCheck(f"{what}: the same bits", worst, 0.0, (op,))


def same_products(
    layer: ops.Layer, device: str, names: Iterable[str], rows: int = ROWS
) -> Iterator[KernelCheck]:
    """Rows of a normed group beside many others, a few, none."""
    names_of = ("pack_linear", "pack_group", "linear", "norm_linear", "linear_out")
    namespace, width = build_ops({name: getattr(layer, name) for name in names_of}), 768
    norm = Norm(torch.rand(width, device=device) + 0.5, 1e-6)
    x = torch.randn(rows, width, device=device)
    for name in names:
        pairs = [plain.matrix(namespace, name, out, width, device) for out in (176, 40)]
        members = tuple(w for w, _ in pairs)
        group = LinearGroup(members, namespace.pack_group(members))
        every = namespace.norm_linear(x, norm, group)
        found = []
        for first, count in ((0, 1), (17, 1), (rows - 1, 1), (3, 2), (0, 33), (rows // 3, rows // 2)):
            some = namespace.norm_linear(x[first : first + count], norm, group)
            found += [(y[first : first + count], got) for y, got in zip(every, some, strict=True)]
        yield _same(f"{name}, 1 to {rows} rows of x", found, "linear")


Run = Callable[[str, Sequence[RowSet], Sequence[Sequence[int]]], list[Tensor]]
"""(phase, sequences, which rows of the inputs each has) -> what each gives."""


def same_sequences(device: str, length: int) -> Iterator[KernelCheck]:
    """Prompts whole and in chunks; trees, their paths, and both beside others."""
    for name, op, make in (("attention", "attention", _attention), ("Gated DeltaNet", "delta", _delta)):
        run, state, restore = make(device, length)
        mine, other = _tables(0, length + 8), _tables(length // BLOCK + 1, 100)
        start = length - COUNT

        def row(first: int, count: int, tables: Any = mine, slot: int = 1, **more: Any) -> RowSet:
            return RowSet(slot, first, [1] * count, tables, **more)

        mate = row(60, 5, other, 2)
        (whole,) = run("prefill", [row(start, COUNT)], [range(COUNT)])
        after = state()
        restore()
        parts = [
            run("prefill", [mate, row(start + a, b - a)], [range(5), range(a, b)])[1]
            for a, b in ((0, 3), (3, 4), (4, COUNT))
        ]
        pairs = [(torch.cat(parts), whole), *zip(state(), after, strict=True)]
        yield _same(f"{name}, a prompt in chunks, beside another", pairs, op)
        held = [COUNT + place for place in range(6)]
        (tree,) = run("held", [row(length, 6, parents=TREE)], [held])
        _, among = run("held", [mate, row(length, 6, parents=TREE)], [range(5), held])
        (path,) = run("held", [row(length, 4)], [[held[place] for place in PATH]])
        (alone,) = run("held", [row(length, 1)], [held[:1]])
        pairs = [(among, tree), (path, tree[PATH]), (alone, tree[:1])]
        yield _same(f"{name}, a tree, its path, one row", pairs, op)


def _tables(first: int, tokens: int) -> dict[str, SeqTable]:
    count = -(-tokens // BLOCK)
    blocks = tuple(range(first, first + count))
    return {"full": SeqTable(blocks, tuple(range(0, BLOCK * count, BLOCK)))}


def _runner(device: str, widths: Sequence[int], op: Callable[[ForwardBatch, list[Tensor]], Tensor]) -> Run:
    given = [torch.randn(COUNT + 6, width, device=device) for width in widths]

    def run(phase: str, rows: Sequence[RowSet], which: Sequence[Sequence[int]]) -> list[Tensor]:
        batch = make_batch(phase, rows, device=device)  # type: ignore[arg-type]
        at = torch.cat([torch.as_tensor(list(one)) for one in which]).to(device)
        y = op(batch, [x[at] for x in given])
        return list(y.split([len(one) for one in which]))

    return run


def _attention(device: str, length: int) -> tuple[Run, Callable[[], list[Tensor]], Callable[[], None]]:
    heads, kv_heads, dim = 8, 2, 128
    shape = (length // BLOCK + 8, BLOCK, kv_heads, dim)
    fields = {name: torch.randn(shape, device=device).half() for name in ("k", "v")}
    region = Region("pages", "full", fields, BLOCK)
    spec = AttentionSpec(0, heads, kv_heads, dim, dim, dim**-0.5, None)
    kept = [page.clone() for page in fields.values()]

    def op(batch: ForwardBatch, given: list[Tensor]) -> Tensor:
        return attention.attention(build_ops(), batch, *given, region, spec)

    def restore() -> None:
        for page, old in zip(fields.values(), kept, strict=True):
            page.copy_(old)

    run = _runner(device, (heads * dim, kv_heads * dim, kv_heads * dim), op)
    return run, lambda: [page[: length // BLOCK + 1].clone() for page in fields.values()], restore


def _delta(device: str, length: int) -> tuple[Run, Callable[[], list[Tensor]], Callable[[], None]]:
    key_heads, heads, dim = 2, 4, 128
    channels = (2 * key_heads + heads) * dim

    def slot(shape: tuple[int, ...], fold: str, **log: tuple[int, ...]) -> SlotState:
        rows = {name: torch.zeros(3, 8, *one, device=device) for name, one in log.items()}
        return SlotState("slot", 0.1 * torch.randn(3, *shape, device=device), rows, fold)

    conv = slot((3, channels), "shift", row=(channels,))
    memory = slot((heads, dim, dim), "delta_fold", k=(key_heads, dim), u=(heads, dim), g=(heads,))
    taps, weight = torch.randn(channels, 4, device=device), torch.rand(dim, device=device)
    decay, shift = -torch.rand(heads, device=device), torch.randn(heads, device=device)
    spec = DeltaSpec(0, key_heads, heads, dim, dim, Norm(weight, 1e-6), taps, decay, shift)
    slots = (conv, memory)
    kept = [evolve(one, state=one.state.clone()) for one in slots]

    def op(batch: ForwardBatch, given: list[Tensor]) -> Tensor:
        return delta.delta(build_ops(), batch, *given, conv, memory, spec)

    def restore() -> None:
        for one, old in zip(slots, kept, strict=True):
            one.state.copy_(old.state)

    run = _runner(device, (channels, heads * dim, heads, heads), op)
    return run, lambda: [one.state[1].clone() for one in slots], restore


__all__ = ["CUDA", "PORTABLE", "same_products", "same_sequences"]
