"""The tensors of one model file as handles: found by GGUF name, packed once, shared where names coincide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from luce_core.contracts import (
    ExpertBank,
    ExpertStack,
    Linear,
    LinearGroup,
    Norm,
    RawLinear,
    Region,
    SlotState,
    StoredTable,
)
from luce_core.errors import ModelFormatError
from luce_core.gguf import GgufFile
from luce_core.gguf.complaint import RECONVERT, bad, quote
from luce_core.model.state import ModelState
from luce_core.ops import OpsNamespace

Progress = Callable[[int, int], None]
"""(bytes packed so far, bytes of the file's tensors)."""


@frozen(eq=False)
class ResidentExperts:
    """`ExpertBank` with every expert of a layer in memory."""

    lut: Tensor
    stack: ExpertStack
    mailbox: None = None


class FileWeights:
    """`Weights` of a GGUF file on one device. Start-up thread only.

    A tensor is packed when it is first asked for; asked for again, by a second layer or as a tied head, the
    same handle comes back, even after the file was closed.
    """

    def __init__(
        self,
        file: GgufFile,
        ops: OpsNamespace,
        state: ModelState,
        device: str = "cpu",
        progress: Progress | None = None,
    ) -> None:
        self._file = file
        self._ops = ops
        self._state = state
        self._device = device
        self._progress = progress
        self._vecs: dict[str, Tensor] = {}
        self._linears: dict[tuple[str, int, int], Linear] = {}
        self._groups: dict[tuple[str, ...], LinearGroup] = {}
        self._stored: dict[str, StoredTable] = {}
        self._packed_bytes = 0
        self._total_bytes = sum(info.num_bytes for info in file.header.tensors.values())

    def has(self, name: str) -> bool:
        """Whether the file holds `name.weight`, or `name` itself."""
        return self._found(name) is not None

    def linear(self, *names: str, split: Literal["", "out", "in"] = "", heads: int = 0) -> Linear:
        """The first of `names` present, with `.bias` and `.scale` where the file has them."""
        del split, heads  # one device: nothing is cut
        name = self._first(names)
        rows, _ = self._matrix(name)
        return self._linear(name, 0, rows)

    def group(
        self,
        prefix: str,
        *names: str,
        fused: str = "",
        rows: tuple[int, ...] = (),
        split: Literal["", "out", "in"] = "",
    ) -> LinearGroup:
        """`prefix + name` each, or row slices of `prefix + fused` when the file has that."""
        del split
        if fused and self.has(prefix + fused):
            members = self._slices(prefix + fused, rows)
        else:
            members = tuple(self.linear(prefix + name) for name in names)
        key = tuple(member.name for member in members)
        if key not in self._groups:
            self._groups[key] = LinearGroup(members, self._ops.pack_group(members))
        return self._groups[key]

    def vec(self, name: str) -> Tensor:
        """A small tensor as f32 on the device."""
        found = self._first((name,))
        if found not in self._vecs:
            self._vecs[found] = torch.from_numpy(self._file.dequantize(found)).to(self._device)
        return self._vecs[found]

    def norm(self, name: str, eps: float) -> Norm:
        """`vec(name)` with its epsilon."""
        weight = self.vec(name)
        if weight.dim() != 1:
            raise self._wrong(self._first((name,)), f"has the shape {list(weight.shape)}", "one dimension")
        return Norm(weight, eps)

    def experts(self, layer: int) -> ExpertBank:
        """Every expert of `layer`, resident."""
        prefix = f"blk.{layer}.ffn_"
        down, fused = f"{prefix}down_exps", f"{prefix}gate_up_exps"
        count, width, ffn = self._stack_shape(down)
        names = (fused,) if self.has(fused) else (f"{prefix}gate_exps", f"{prefix}up_exps")
        for name in names:
            wanted = (count, ffn * (3 - len(names)), width)
            if (got := self._stack_shape(name)) != wanted:
                fitting = f"{list(wanted)}, to fit {quote(self._first((down,)))}"
                raise self._wrong(self._first((name,)), f"has the shape {list(got)}", fitting)
        stack = ExpertStack(
            count, tuple(self._stack(name, count) for name in names), self._stack(down, count)
        )
        return ResidentExperts(torch.arange(count, dtype=torch.int32, device=self._device), stack)

    def _stack_shape(self, name: str) -> tuple[int, int, int]:
        full = self._first((name,))
        shape = self._file.header.tensor(full).shape
        if len(shape) != 3:
            raise self._wrong(full, f"has the shape {list(shape)}", "three dimensions, experts outermost")
        return shape[0], shape[1], shape[2]

    def _stack(self, name: str, count: int) -> Linear:
        full = self._first((name,))
        return self._linear(full, 0, self._matrix(full)[0], experts=count)

    def stored(self, name: str) -> StoredTable:
        """The matrix `name`, left in the file and read by row."""
        full = self._first((name,))
        if full not in self._stored:
            self._stored[full] = self._file.rows(full)
            self._report(self._file.header.tensor(full).num_bytes)
        return self._stored[full]

    def region(self, name: str) -> Region:
        """The allocated Pages called `name` in the layout."""
        return self._state.regions[name]

    def slot(self, name: str) -> SlotState:
        """The allocated Slot called `name` in the layout."""
        return self._state.slots[name]

    # --- names and shapes

    def _found(self, name: str) -> str | None:
        tensors = self._file.header.tensors
        return next((full for full in (f"{name}.weight", name) if full in tensors), None)

    def _first(self, names: tuple[str, ...]) -> str:
        for name in names:
            found = self._found(name)
            if found is not None:
                return found
        self._file.header.tensor(f"{names[0]}.weight")  # raises: missing
        raise AssertionError(names)

    def _matrix(self, full: str) -> tuple[int, int]:
        """(out, in). Expert or grouped stacks [G, out, in] count as [G · out, in]."""
        shape = self._file.header.tensor(full).shape
        if len(shape) < 2:
            raise self._wrong(full, f"has the shape {list(shape)}", "two dimensions or more")
        return int(np.prod(shape[:-1])), shape[-1]

    def _wrong(self, full: str, got: str, wanted: str) -> ModelFormatError:
        return bad(self._file.header.path, f"tensor {quote(full)}", got, wanted, RECONVERT)

    # --- packing

    def _slices(self, name: str, rows: tuple[int, ...]) -> tuple[Linear, ...]:
        full = self._first((name,))
        have, _ = self._matrix(full)
        if sum(rows) != have:
            raise self._wrong(full, f"has {have} rows", f"{' + '.join(map(str, rows))} rows")
        starts = np.cumsum((0, *rows))[:-1].tolist()
        return tuple(self._linear(full, at, at + count) for at, count in zip(starts, rows, strict=True))

    def _linear(self, full: str, start: int, stop: int, experts: int = 1) -> Linear:
        """Rows start..stop of the matrix `full`, packed once."""
        key = (full, start, stop)
        if key not in self._linears:
            info = self._file.header.tensor(full)
            have, width = self._matrix(full)
            data = self._file.raw(full).reshape(have, -1)[start:stop]
            name = full if stop - start == have else f"{full}[{start}:{stop}]"
            raw = RawLinear(name, info.format.name, (stop - start, width), data, self._device)
            stem = full.removesuffix(".weight")
            self._linears[key] = Linear(
                name=name,
                out_features=stop - start,
                in_features=width,
                format=info.format.name,
                packed=self._ops.pack_linear(raw),
                bias=self._bias(stem, have, start, stop, experts),
                scale=self._scale(stem, experts),
            )
            self._report(data.nbytes)
        return self._linears[key]

    def _bias(self, stem: str, rows: int, start: int, stop: int, experts: int) -> Tensor | None:
        if not self.has(f"{stem}.bias"):
            return None
        bias = self.vec(f"{stem}.bias")
        wanted = (rows,) if experts == 1 else (experts, rows // experts)
        if bias.shape != wanted:
            raise self._wrong(f"{stem}.bias", f"has the shape {list(bias.shape)}", str(list(wanted)))
        return bias.reshape(-1)[start:stop].contiguous()

    def _scale(self, stem: str, experts: int) -> Tensor | None:
        if not self.has(f"{stem}.scale"):
            return None
        scale = self.vec(f"{stem}.scale")
        if scale.numel() == 1:
            return scale.reshape(())
        if scale.numel() != experts:
            wanted = "one" if experts == 1 else f"one, or one per expert ({experts})"
            raise self._wrong(f"{stem}.scale", f"has {scale.numel()} elements", wanted)
        return scale.reshape(-1)

    def _report(self, num_bytes: int) -> None:
        self._packed_bytes += num_bytes
        if self._progress is not None:
            self._progress(self._packed_bytes, self._total_bytes)
