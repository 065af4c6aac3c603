"""Cases of ops around a residual of several streams: shared entries, chosen blocks, n-gram tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve, field, frozen

from luce_core.contracts import CompressSpec, NgramSpec, RecallSpec, RopeSpec, StreamsSpec
from luce_core.testing.op_cases.case import PHASES, OpRun, OpWorld, case, cases, plain

# --- entries, the keys they are found by, and blocks of them


def _shared_entries(w: OpWorld, phase: str, stride: int) -> OpRun:
    b, rope = w.batch(phase), RopeSpec(w.here(torch.ones(2)), "adjacent", part="last")
    spec = CompressSpec(stride, 32, None, w.norm(32), rope)
    out, keys = w.region({"k": (1, 32)}, stride, "pooled"), w.region({"key": (8,)}, stride, "pooled")
    matrix, norm = w.linear(8, 32), w.norm(8)
    tail = w.slot((stride, 64), "shift", row=(64,)) if stride > 1 else None
    gate = w.rows(b, 32) if stride > 1 else None

    def call(ops: Any, b: Any, kv: Any) -> Any:
        ops.compress(b, kv, gate, tail, out, spec, (keys, matrix, norm))
        return kv

    state = [one for region in (out, keys) for one in (*region.fields.values(), *region.log.values())]
    state += [] if tail is None else [tail.state, tail.log["row"]]
    return OpRun((b, w.rows(b, 32)), call, tuple(state))


def _select_within(w: OpWorld, phase: str, stride: int) -> OpRun:
    b, keys = w.batch(phase), w.region({"key": (8,)}, stride, "pooled")
    blocks = torch.tensor([[1, -1, 0]] * b.token.shape[0], dtype=torch.int32, device=w.device)
    inputs = (b, w.rows(b, 3, 8), w.rows(b, 3), blocks)
    return OpRun(
        inputs, lambda ops, b, q, weight, blocks: ops.select(b, q, weight, keys, 3, None, (blocks, 2))
    )


def _select_blocks(w: OpWorld, phase: str, stride: int) -> OpRun:
    b, keys = w.batch(phase), w.region({"key": (8,)}, stride, "pooled")
    rope = RopeSpec(w.here(torch.ones(2)))
    inputs = (b, w.rows(b, 3, 8), w.rows(b, 3))
    return OpRun(inputs, lambda ops, b, q, weight: ops.select_blocks(b, q, weight, keys, 3, 2, rope))


for _phase in PHASES:
    for _stride in (1, 2):
        _name = f"{_phase}, entry per {_stride}"
        cases("compress", _shared_entries, {f"{_name}, keys": (_phase, _stride)})
        cases("select", _select_within, {f"{_name}, within blocks": (_phase, _stride)})
        cases("select_blocks", _select_blocks, {_name: (_phase, _stride)})


# --- n-gram tables


def _ngram_rows(w: OpWorld, phase: str, size: int) -> OpRun:
    b, slot = w.batch(phase), w.slot((size - 1, 1), "shift", row=(1,))
    history = evolve(
        slot,
        state=(slot.state.abs() * 5).to(torch.int32),
        log={name: rows.to(torch.int32) for name, rows in slot.log.items()},
    )

    def large(*shape: int) -> torch.Tensor:
        return w.ids(1 << 30, *shape).long()

    spec = NgramSpec(w.ids(9, 16), 3, large(2, size) << 12, large(2, size - 1, 2) + 1, large(2, size - 1, 2))
    return OpRun((b,), lambda ops, b: ops.ngram_rows(b, history, spec), (history.state, history.log["row"]))


for _phase in PHASES:
    cases("ngram_rows", _ngram_rows, {f"{_phase}, up to {size}": (_phase, size) for size in (2, 4)})


@frozen(eq=False)
class _Table:
    numbers: npt.NDArray[np.float32]
    name: str = "table"
    num_rows: int = field(init=False)
    width: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "num_rows", self.numbers.shape[0])
        object.__setattr__(self, "width", self.numbers.shape[1])

    def read(self, rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """A copy of these rows."""
        found: npt.NDArray[np.float32] = self.numbers[rows]
        return found


@case("stored_rows")
def _stored_rows(w: OpWorld) -> OpRun:
    table = _Table(w.numbers(16, 8).cpu().numpy())
    return OpRun((w.ids(16, 3, 4),), lambda ops, rows: ops.stored_rows(table, rows))


# --- streams


def _streams_gates(w: OpWorld, pre_alone: bool) -> OpRun:
    rows, scales = (3, 1) if pre_alone else (3 * 5, 3)
    spec = StreamsSpec(3, w.numbers(rows, 3 * 8), w.numbers(rows), w.numbers(scales), 1e-20, iterations=4)
    return OpRun((w.numbers(5, 3, 8),), lambda ops, h: ops.streams_gates(h, spec))


cases("streams_gates", _streams_gates, {"with mix": (False,), "pre alone": (True,)})
plain("streams_collapse", lambda ops, h, pre: ops.streams_collapse(h, pre), (5, 3, 8), (5, 3))


def _streams_recall(w: OpWorld, given: bool) -> OpRun:
    b, spec = w.batch("prefill"), RecallSpec(w.numbers(3, 8), 1e-20)
    if given:
        rows = torch.tensor([1, 4], dtype=torch.int32, device=w.device)
        b = evolve(b, embed_rows=rows, embeds=w.numbers(2, 8))
    inputs = (b, w.rows(b, 3, 8), w.rows(b, 4 * 8))
    return OpRun(inputs, lambda ops, b, h, kv: ops.streams_recall(b, h, kv, spec))


cases("streams_recall", _streams_recall, {"text": (False,), "with given rows": (True,)})
