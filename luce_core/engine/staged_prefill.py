"""`Programs.prefill` over static buffers: a chunk of one prompt, filled up to one of a few sizes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from luce_core.contracts import ForwardBatch, OpCall, Program
from luce_core.contracts.staged import Bucket, StageBuffers
from luce_core.engine.programs import Programs
from luce_core.engine.staged import StaticNumbers, fill_tables, static_tables, table_shapes, table_sizes
from luce_core.errors import PluginError
from luce_core.model.batch import RowSet
from luce_core.ops.record import VIEWS

ROW_BUCKETS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Rows of a chunk; those of a whole step stand beside them."""
ROW_WISE = frozenset(
    (
        *("embed", "norm_linear", "linear_out", "head_linear", "gated_mlp", "route", "experts", "head"),
        *("tap", "rms", "head_rms", "linear", "table_rows", "rope", "add", "mul", "scale", "act", "act_mul"),
        *("softcap", "cat", *VIEWS),
    )
)
"""Ops of which a row's result depends on that row alone, and which have no state."""


def is_paddable(trunk: Program, ops: Any) -> bool:
    """Whether every op leaves alone the rows behind the last sequence of a prompt."""
    return all(call.op in ROW_WISE or _takes_padding(call, ops) for call in trunk.calls)


def _takes_padding(call: OpCall, ops: Any) -> bool:
    check = getattr(getattr(ops, call.op).func, "takes_padding", None)
    return check is not None and bool(check(None, *call.args, **call.kwargs))


@frozen(eq=False)
class Stage:
    """Views of one bucket's buffers."""

    host: Mapping[str, np.ndarray]
    batch: ForwardBatch


class StagedPrefill:
    """A chunk of one sequence in buckets: (rows, blocks by group). Nothing is fetched, nothing to finish.

    Not staged: several prompts in a step, scores, embeddings, drafters that observe, and models with an op
    that cannot tell rows that are lacking.
    """

    fetch: tuple[str, ...] = ()

    def __init__(self, programs: Programs, most_rows: int) -> None:
        self.programs = programs
        self.device = torch.device(programs.table.device)
        self.sizes = sorted({size for size in ROW_BUCKETS if size < most_rows} | {most_rows})
        self._paddable: bool | None = None

    @property
    def generation(self) -> int:
        """Of the target."""
        return self.programs.generation

    def bucket(self, inputs: Mapping[str, Any]) -> Bucket | None:
        """None where it is not staged."""
        rows: Sequence[RowSet] = inputs["rows"]
        if len(rows) != 1 or self.programs.drafters or any(inputs["targets"]):
            return None
        (row,) = rows
        if row.wanted or row.embeds or len(row.tokens) > self.sizes[-1]:
            return None
        if self._paddable is None:
            self._paddable = self._takes_padding()
        if not self._paddable:
            return None
        blocks = table_sizes(rows, self.programs.least_blocks)
        return self.sizes[bisect_left(self.sizes, len(row.tokens))], blocks

    def _takes_padding(self) -> bool:
        """False for a network that is not made of ops alone too."""
        recorded = getattr(self.programs.backend, "programs", None)
        if recorded is None:
            return False
        try:
            trunk, _ = recorded()
        except PluginError:
            return False
        return is_paddable(trunk, self.programs.ops)

    def stage(self, bucket: Bucket) -> StageBuffers:
        """One buffer for all of a step's numbers."""
        count, blocks = bucket
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("token", "index"), (count,))
        shapes |= {"position": (self.programs.axes, count), "query_start": (2,)}
        shapes |= dict.fromkeys(("slot", "length", "sure"), (1,)) | table_shapes(1, blocks)
        numbers = StaticNumbers(shapes, self.device)
        there, every = numbers.there, torch.arange(count, dtype=torch.int32, device=self.device)
        batch = ForwardBatch(
            phase="prefill",
            token=there["token"],
            index=there["index"],
            position=there["position"],
            query_start=there["query_start"],
            slot=there["slot"],
            length=there["length"],
            seq=torch.zeros_like(every),
            sure=there["sure"],
            parent=every - 1,
            sees=torch.zeros(count, 0, dtype=torch.int64, device=self.device),
            table=static_tables(there, blocks),
            wanted=every[:0],
            padded=True,
        )
        return StageBuffers(bucket, numbers.host, numbers.device, Stage(numbers.on_host, batch))

    def fill(self, buffers: StageBuffers, inputs: Mapping[str, Any]) -> None:
        """Every number of the chunk; rows that are lacking are token 0 behind it."""
        host, (count, blocks) = buffers.view.host, buffers.bucket
        rows: Sequence[RowSet] = inputs["rows"]
        (row,) = rows
        used = len(row.tokens)
        host["token"][:used], host["token"][used:] = row.tokens, 0
        host["index"][:] = np.arange(row.length, row.length + count)
        host["position"][:] = host["index"]
        if row.positions is not None:
            host["position"][:, :used] = row.positions
        host["query_start"][:] = 0, used
        host["slot"][:], host["length"][:], host["sure"][:] = row.slot, row.length, used
        fill_tables(host, rows, blocks)

    def compute(self, buffers: StageBuffers) -> Mapping[str, Tensor]:
        """State is written; there are no results."""
        self.programs.backend.forward(buffers.view.batch)
        return {}

    def behind(
        self, buffers: StageBuffers, results: Mapping[str, Tensor], inputs: Mapping[str, Any]
    ) -> Mapping[str, Tensor]:
        """Nothing."""
        return results

    def can_follow(self, inputs: Mapping[str, Any]) -> bool:
        """No: its tokens are the prompt's."""
        return False

    def finish(
        self, buffers: StageBuffers, results: Mapping[str, Tensor], inputs: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """No scores."""
        return {"scores": [()]}
