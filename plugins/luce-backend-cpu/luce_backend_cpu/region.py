"""Runs of op calls that the library does in one go, and how a program is cut into them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_void_p
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from luce_backend_cpu import native
from luce_backend_cpu.lowering import LOWER, Step
from luce_core.contracts import ForwardBatch, OpCall, Program, Ref
from luce_core.ops.record import used_values

GEMM_ROWS = 17
"""From how many rows on weights are dequantized into panels. int8 against panels: 36 ms and 38 at 16 rows, 46
and 35 at 24 (SmolLM2 135M Q4_1, 2 cores with AVX-512 VNNI and AMX; benchmarks/cpu/rows.py). The default tree
of 16 candidates behind one decided row is the first that takes panels.
"""


@frozen(eq=False)
class Cut:
    """A run of calls: what it reads from outside, and which of its values are wanted outside."""

    calls: tuple[OpCall, ...]
    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    """Numbers of values, the batch not among them."""
    outputs: tuple[int, ...]
    batch: int | None


def cut_program(program: Program) -> list[OpCall | Cut]:
    """The program's calls in order, maximal runs the library can do put together."""
    pieces: list[OpCall | list[tuple[OpCall, Step]]] = []
    batch: int | None = None
    for call in program.calls:
        step = LOWER[call.op](*call.args, **call.kwargs) if call.op in LOWER else None
        if step is None:
            pieces.append(call)
            continue
        if step.batch is not None:
            batch = step.batch.value
        if pieces and isinstance(pieces[-1], list):
            pieces[-1].append((call, step))
        else:
            pieces.append([(call, step)])
    done = []
    for place, piece in enumerate(pieces):
        later = {*program.outputs, *_read_by(pieces[place + 1 :])}
        done.append(piece if isinstance(piece, OpCall) else _cut(piece, later, batch))
    return done


def _read_by(pieces: Sequence[OpCall | list[tuple[OpCall, Step]]]) -> set[int]:
    read: set[int] = set()
    for piece in pieces:
        for call in [piece] if isinstance(piece, OpCall) else [call for call, _ in piece]:
            read |= used_values(call)
    return read


def _cut(piece: list[tuple[OpCall, Step]], later: set[int], batch: int | None) -> Cut:
    calls, steps = zip(*piece, strict=True)
    made = [number for call in calls for number in call.outs]
    reads = {value.value for step in steps for value in step.reads.values() if value is not None}
    needs_batch = any(step.batch is not None for step in steps)
    return Cut(
        calls=calls,
        steps=steps,
        inputs=tuple(sorted(reads - set(made))),
        outputs=tuple(number for number in made if number in later),
        batch=batch if needs_batch else None,
    )


class Region:
    """A cut, ready to run. Holds a workspace for the values only it sees, grown when more rows come."""

    def __init__(self, cut: Cut, lib: native.Native, row_invariant: bool) -> None:
        self.cut = cut
        self._lib = lib
        self._row_invariant = row_invariant
        self._place = {number: i for i, number in enumerate((*cut.inputs, *cut.outputs))}
        self._widths = [0] * len(self._place)
        self._offset: dict[int, int] = {}
        """Place of an inner value -> floats per row before it in the workspace."""
        self._floats_per_row = 0
        self._ops = (native.Op * len(cut.steps))()
        self._keep = [step.keep for step in cut.steps]
        self._groups = tuple(dict.fromkeys(step.group for step in cut.steps if step.group))
        self._taps = [(place, step.layer) for place, step in enumerate(cut.steps) if step.layer >= 0]
        self._assign()
        self._values = (c_void_p * len(self._widths))()
        self._workspace = torch.empty(0)
        self._rows = -1

    # --- once

    def _assign(self) -> None:
        """Give every value a place; inner ones share the workspace where their lives do not overlap."""
        last_use = self._last_uses()
        free: dict[int, list[int]] = {}
        for number, (call, step) in enumerate(zip(self.cut.calls, self.cut.steps, strict=True)):
            for out, width in zip(call.outs, step.widths, strict=True):
                self._add(out, width, free)
            self._fill(self._ops[number], call, step)
            read = {value.value for value in step.reads.values() if value is not None}
            for dead in (read | set(call.outs)) - set(self.cut.inputs) - set(self.cut.outputs):
                if last_use.get(dead, number) == number:
                    place = self._place[dead]
                    free.setdefault(self._widths[place], []).append(self._offset[place])

    def _last_uses(self) -> dict[int, int]:
        last: dict[int, int] = {}
        for number, step in enumerate(self.cut.steps):
            last.update({value.value: number for value in step.reads.values() if value is not None})
        return last

    def _add(self, value: int, width: int, free: dict[int, list[int]]) -> None:
        if value in self._place:
            self._widths[self._place[value]] = width
            return
        self._place[value] = len(self._widths)
        self._widths.append(width)
        if free.get(width):
            self._offset[self._place[value]] = free[width].pop()
        else:
            self._offset[self._place[value]] = self._floats_per_row
            self._floats_per_row += -(-width // 16) * 16

    def _fill(self, op: native.Op, call: OpCall, step: Step) -> None:
        ctypes.memmove(ctypes.addressof(op), ctypes.addressof(step.op), ctypes.sizeof(native.Op))
        place = {name: self._place[ref.value] for name, ref in step.reads.items() if ref is not None}
        op.x = place.get("x", -1)
        op.residual = place.get("residual", -1)
        op.gate = place.get("gate", -1)
        for i, out in enumerate(call.outs):
            op.out[i] = self._place[out]
        if step.group:
            op.out[1], op.out[2] = place.get("k", -1), place.get("v", -1)
            detail = step.keep[0]
            detail.table = self._groups.index(step.group)
        if step.layer >= 0:
            op.out[1] = self._widths[op.x]

    # --- every time

    def run(self, batch: ForwardBatch | None, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """inputs f32 [rows, width] -> outputs, fresh tensors."""
        rows = batch.token.shape[0] if batch is not None else inputs[0].shape[0]
        if rows != self._rows:
            self._resize(rows)
        values = self._values
        kept = [tensor.float().contiguous() for tensor in inputs]
        for place, tensor in enumerate(kept):
            values[place] = tensor.data_ptr()
        outputs = []
        for place in range(len(kept), len(kept) + len(self.cut.outputs)):
            out = torch.empty(rows, self._widths[place])
            values[place] = out.data_ptr()
            outputs.append(out)
        given, alive = self._batch(batch, rows)
        taps = self._tap_buffers(batch) if self._taps and batch is not None and batch.taps else None
        code = self._lib.run(
            self._ops, len(self._ops), ctypes.byref(given), values, taps, torch.get_num_threads(), GEMM_ROWS
        )
        self._lib.check(code)
        del alive
        return tuple(outputs)

    def _resize(self, rows: int) -> None:
        needed = rows * self._floats_per_row
        if self._workspace.numel() < needed:
            self._workspace = torch.empty(needed)
        base = self._workspace.data_ptr()
        for place, offset in self._offset.items():
            self._values[place] = base + 4 * rows * offset
        self._rows = rows

    def _batch(self, b: ForwardBatch | None, rows: int) -> tuple[native.Batch, list[Tensor]]:
        if b is None:
            return native.Batch(rows=rows, row_invariant=self._row_invariant), []
        return batch_of(b, self._groups, self._row_invariant)

    def _tap_buffers(self, b: ForwardBatch) -> Any:
        buffers = (c_void_p * len(self._ops))()
        for place, layer in self._taps:
            for where, buffer in b.taps.items():
                if where.kind == "residual" and where.layer == layer:
                    buffers[place] = buffer.data_ptr()
        return buffers


def batch_of(
    b: ForwardBatch, groups: Sequence[str], row_invariant: bool,
) -> tuple[native.Batch, list[Tensor]]:
    """The batch for the library, and tensors that must live until it has run."""
    alive: list[Tensor] = []

    def pointer(tensor: Tensor) -> int:
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
            alive.append(tensor)
        return tensor.data_ptr()

    given = native.Batch(
        b.token.shape[0], b.length.shape[0], b.phase == "held", b.sees.shape[1], row_invariant, 0,
        pointer(b.token), pointer(b.index), pointer(b.position), pointer(b.seq), pointer(b.query_start),
        pointer(b.length), pointer(b.parent), pointer(b.sees),
    )  # fmt: skip
    for number, group in enumerate(groups):
        table = b.table[group]
        entry = given.table[number]
        entry.block, entry.first = pointer(table.block), pointer(table.first)
        entry.count = pointer(table.count)
        entry.columns = table.block.shape[1]
    if b.embeds is not None and b.embed_rows is not None:
        alive.append(b.embeds.float())
        given.embeds, given.embed_rows = pointer(alive[-1]), pointer(b.embed_rows)
        given.embed_count = b.embed_rows.shape[0]
    return given, alive


def fits(b: ForwardBatch, taps: bool) -> bool:
    """Whether the library can run this batch: no bidirectional spans, tap buffers as in the contract."""
    if b.span is not None:
        return False
    return not taps or all(
        buffer.dtype == torch.bfloat16 and buffer.is_contiguous() for buffer in b.taps.values()
    )


def region_call(cut: Cut, region: Region) -> OpCall:
    """The one call that stands for the cut in the rewritten program."""
    batch = None if cut.batch is None else Ref(cut.batch)
    return OpCall("cpu.region", (region, batch, *(Ref(number) for number in cut.inputs)), {}, cut.outputs)


def single(op: str, step: Step, lib: native.Native, row_invariant: bool) -> tuple[Tensor, ...]:
    """One op called directly: its values are tensors."""
    values: dict[str, Tensor] = {name: value for name, value in step.reads.items() if value is not None}
    refs: Mapping[str, Any] = {name: Ref(i) for i, name in enumerate(values)}
    outs = tuple(range(len(values), len(values) + len(step.widths)))
    bare = Step(step.op, refs, step.widths, step.keep, group=step.group, layer=step.layer)
    cut = Cut((OpCall(op, (), {}, outs),), (bare,), tuple(range(len(values))), outs, None)
    return Region(cut, lib, row_invariant).run(step.batch, list(values.values()))
