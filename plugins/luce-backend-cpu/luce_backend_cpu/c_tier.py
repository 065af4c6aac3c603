"""Op layers `cpu-c` and `cpu-c-rows`: the reference's signatures over the compiled library.

A model runs as a recorded program, in which whole layers become one call (`rewrite`); an op called by itself
is one call of its own. What the library cannot run (a mask, an attention variant) goes to the reference op.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from luce_backend_cpu import lowering, native
from luce_backend_cpu.lowering import Packed
from luce_backend_cpu.region import Cut, Region, cut_program, fits, region_call, single
from luce_core.contracts import ForwardBatch, Linear, Program, RawLinear
from luce_core.gguf import FORMATS
from luce_core.ops import attention, coarse
from luce_core.ops.record import replay

log = logging.getLogger(__name__)


class CTier:
    """The ops of one layer. row_invariant: every row is computed by itself, whatever else is in the batch."""

    def __init__(self, row_invariant: bool) -> None:
        self.row_invariant = row_invariant

    # --- weights

    def pack_linear(self, ops: Any, raw: RawLinear) -> Packed:
        """The file's own bytes; formats the library does not know become f32, and the log says so."""
        lib = native.native()
        rows, cols = raw.shape
        if raw.format in native.FORMATS:
            return Packed.from_file(lib, raw.data, raw.format, rows, cols)
        log.warning(
            "Tensor %r is stored as %s, which the C tier does not read; kept as f32, %.1f MiB for %.1f.",
            raw.name, raw.format, rows * cols * 4 / 2**20, raw.data.nbytes / 2**20,
        )  # fmt: skip
        floats = np.ascontiguousarray(FORMATS.by_name(raw.format).dequantize(raw.data))
        return Packed(floats.view(np.uint8).reshape(rows, -1), "F32", rows, cols)

    def table_rows(self, ops: Any, table: Linear, ids: Tensor) -> Tensor:
        """Rows `ids` i32[...] of the matrix, times its scale -> f32[..., in]; no others are dequantized."""
        wanted = ids.to(torch.int32).contiguous()
        low, high = (int(wanted.min()), int(wanted.max())) if wanted.numel() else (0, 0)
        if low < 0 or high >= table.out_features:
            raise IndexError(f"rows {low}..{high} of {table.name!r}, which has {table.out_features}")
        out = torch.empty(*ids.shape, table.in_features)
        matrix = table.packed.bind(table)
        lib = native.native()
        lib.check(lib.dequantize(matrix, wanted.data_ptr(), wanted.numel(), out.data_ptr()))
        return out if table.scale is None else out.mul_(table.scale)

    # --- ops called by themselves

    def linear(self, ops: Any, x: Tensor, w: Linear) -> Tensor:
        flat = x.reshape(-1, w.in_features).float()
        step = lowering.linear(flat, w)
        assert step is not None, w.name
        return self._single("linear", step)[0].view(*x.shape[:-1], w.out_features)

    def embed(self, ops: Any, *args: Any, **kwargs: Any) -> Tensor:
        step = lowering.embed(*args, **kwargs)
        return self._single("embed", step)[0] if step else coarse.embed(ops, *args, **kwargs)

    def norm_linear(self, ops: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        step = lowering.norm_linear(*args, **kwargs)
        return self._single("norm_linear", step) if step else coarse.norm_linear(ops, *args, **kwargs)

    def linear_out(self, ops: Any, *args: Any, **kwargs: Any) -> Tensor:
        step = lowering.linear_out(*args, **kwargs)
        return self._single("linear_out", step)[0] if step else coarse.linear_out(ops, *args, **kwargs)

    def gated_mlp(self, ops: Any, *args: Any, **kwargs: Any) -> Tensor:
        step = lowering.gated_mlp(*args, **kwargs)
        return self._single("gated_mlp", step)[0] if step else coarse.gated_mlp(ops, *args, **kwargs)

    def head(self, ops: Any, *args: Any, **kwargs: Any) -> Tensor:
        step = lowering.head(*args, **kwargs)
        return self._single("head", step)[0] if step else coarse.head(ops, *args, **kwargs)

    def attention(self, ops: Any, b: ForwardBatch, *args: Any, **kwargs: Any) -> Tensor:
        step = lowering.attention(b, *args, **kwargs) if fits(b, False) else None
        return self._single("attention", step)[0] if step else attention.attention(ops, b, *args, **kwargs)

    def _single(self, op: str, step: lowering.Step) -> tuple[Tensor, ...]:
        return single(op, step, native.native(), self.row_invariant)

    # --- programs

    def rewrite(self, program: Program, ops: Any) -> Program:
        """Every run of calls the library can do becomes one call."""
        calls = []
        for piece in cut_program(program):
            if isinstance(piece, Cut):
                calls.append(region_call(piece, Region(piece, native.native(), self.row_invariant)))
            else:
                calls.append(piece)
        return Program(tuple(calls), program.inputs, program.outputs)

    def region(self, ops: Any, region: Region, batch: ForwardBatch | None, *inputs: Tensor) -> Any:
        """Run one region; call by call where the batch is one the library cannot do."""
        if batch is None or fits(batch, bool(batch.taps)):
            outputs = region.run(batch, inputs)
        else:
            outputs = call_by_call(region.cut, ops, batch, inputs)
        return outputs if len(outputs) != 1 else outputs[0]


def call_by_call(cut: Cut, ops: Any, batch: ForwardBatch, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What the region stands for."""
    assert cut.batch is not None
    names = {cut.batch: "batch", **{number: str(number) for number in cut.inputs}}
    highest = max(names) + 1
    program = Program(
        cut.calls, tuple(names.get(number, f"unused {number}") for number in range(highest)), cut.outputs,
    )
    given = {"batch": batch, **{str(number): value for number, value in zip(cut.inputs, inputs, strict=True)}}
    unused = {name: None for name in program.inputs if name not in given}
    return replay(program, ops, {**unused, **given})


FAST = CTier(row_invariant=False)
ROWS = CTier(row_invariant=True)

__all__ = ["FAST", "ROWS", "CTier"]
