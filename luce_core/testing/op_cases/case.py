"""Small calls of every op, the same whoever answers them: what op layers are compared on, op by op.

A case makes its handles with the ops it is given, so weights are packed by the layer under test. Its call
runs on tensors or, to be recorded, on opaque values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from luce_core.contracts import (
    ForwardBatch,
    Linear,
    LinearGroup,
    Norm,
    RawLinear,
    Region,
    SeqTable,
    SlotState,
)
from luce_core.model.batch import RowSet, make_batch
from luce_core.testing.quantize import quantize

WIDTH = 64
"""Of the residual: rows that Q8_0 divides."""
BLOCK, BLOCKS, SLOTS, HELD = 8, 12, 3, 8
TREE = [-1, 0, 0, 1, 3]
PROMPT = 9


@frozen(eq=False)
class OpRun:
    """One call, ready: `call(ops, *inputs)` gives a tensor or a tuple of them."""

    inputs: tuple[Any, ...]
    call: Callable[..., Any]
    state: tuple[Tensor, ...] = ()
    """What it writes to."""

    def run(self, ops: Any) -> tuple[Tensor, ...]:
        """Results, then the state behind them."""
        result = self.call(ops, *self.inputs)
        results = result if isinstance(result, tuple) else (result,)
        return (*results, *(tensor.clone() for tensor in self.state))


@frozen(eq=False)
class OpCase:
    """A call of `op`."""

    op: str
    name: str
    make: Callable[[OpWorld], OpRun]

    @property
    def id(self) -> str:
        """For parametrized tests."""
        return f"{self.op}-{self.name}" if self.name else self.op


class OpWorld:
    """Numbers, handles and batches of one case. Two worlds of equal cases hold equal numbers."""

    def __init__(self, ops: Any, block_format: str = "F32", device: str = "cpu") -> None:
        self.ops = ops
        self.block_format = block_format
        self.device = device
        self._rng = np.random.default_rng(7)

    def here(self, tensor: Tensor) -> Tensor:
        """The tensor on the world's device."""
        return tensor.to(self.device)

    def numbers(self, *shape: int) -> Tensor:
        """Standard normal f32."""
        return self.here(torch.from_numpy(self._rng.standard_normal(shape).astype(np.float32)))

    def ids(self, high: int, *shape: int) -> Tensor:
        """i32 in [0, high)."""
        return self.here(torch.from_numpy(self._rng.integers(0, high, shape).astype(np.int32)))

    def norm(self, width: int = WIDTH) -> Norm:
        """Weights around 1."""
        return Norm(1.0 + 0.2 * self.numbers(width), 1e-6)

    def linear(self, out: int, width: int = WIDTH, *, bias: bool = False, rows: int | None = None) -> Linear:
        """Packed by the ops. Widths that no block divides stay F32."""
        name = self.block_format if width % 32 == 0 else "F32"
        weights = (self.numbers(out, width) / width**0.5).cpu().numpy()
        data = np.ascontiguousarray(quantize(weights, name)).view(np.uint8).reshape(out, -1)
        packed = self.ops.pack_linear(RawLinear("w", name, (out, width), data, self.device))
        return Linear("w", out, width, name, packed, self.numbers(out) if bias else None)

    def group(self, *outs: int, width: int = WIDTH) -> LinearGroup:
        """Linears on one input."""
        members = tuple(self.linear(out, width) for out in outs)
        return LinearGroup(members, self.ops.pack_group(members))

    def region(self, shapes: Mapping[str, tuple[int, ...]], stride: int = 1, group: str = "full") -> Region:
        """Pages full of numbers nobody wrote, by field and shape of an entry."""
        entries = BLOCK // stride
        fields = {name: self.numbers(BLOCKS, entries, *shape) for name, shape in shapes.items()}
        log = {name: self.numbers(SLOTS, HELD, *shape) for name, shape in shapes.items()}
        return Region("region", group, fields, entries, stride, log=log if stride > 1 else {})

    def slot(self, shape: tuple[int, ...], fold: str, **log: tuple[int, ...]) -> SlotState:
        """A state and log full of numbers."""
        rows = {name: self.numbers(SLOTS, HELD, *one) for name, one in log.items()}
        return SlotState("slot", self.numbers(SLOTS, *shape), rows, fold)

    def batch(self, phase: str) -> ForwardBatch:
        """Two sequences: prefill behind earlier tokens, or a tree and a chain."""
        first, second = ((5, 1, 7, 3), (0, 10, 2, 8))
        firsts = tuple(range(0, 4 * BLOCK, BLOCK))
        tables = [
            {name: SeqTable(blocks, firsts) for name in ("full", "pooled")} for blocks in (first, second)
        ]
        if phase == "prefill":
            tokens = self._rng.integers(0, 16, 2 * PROMPT).tolist()
            rows = [
                RowSet(2, 4, tokens[:PROMPT], tables[0]),
                RowSet(0, 0, tokens[PROMPT:], tables[1]),
            ]
            return make_batch("prefill", rows, device=self.device)
        tokens = self._rng.integers(0, 16, len(TREE) + 2).tolist()
        rows = [
            RowSet(1, 11, tokens[: len(TREE)], tables[0], parents=TREE),
            RowSet(0, 6, tokens[len(TREE) :], tables[1]),
        ]
        return make_batch("held", rows, device=self.device)

    def rows(self, b: ForwardBatch, *shape: int) -> Tensor:
        """Numbers for every row of the batch."""
        return self.numbers(b.token.shape[0], *shape)


Make = Callable[[OpWorld], OpRun]
CASES: list[OpCase] = []
PHASES = ("prefill", "held")


def case(op: str, name: str = "") -> Callable[[Make], Make]:
    """Register what makes a case."""

    def add(make: Make) -> Make:
        CASES.append(OpCase(op, name, make))
        return make

    return add


def cases(op: str, make: Callable[..., OpRun], variants: Mapping[str, tuple[Any, ...]]) -> None:
    """One case per variant: `make(world, *arguments)`."""
    for name, arguments in variants.items():
        CASES.append(OpCase(op, name, _with(make, arguments)))


def _with(make: Callable[..., OpRun], arguments: tuple[Any, ...]) -> Make:
    return lambda world: make(world, *arguments)


def plain(op: str, call: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
    """An op on numbers alone."""
    CASES.append(OpCase(op, "", lambda w: OpRun(tuple(w.numbers(*shape) for shape in shapes), call)))
