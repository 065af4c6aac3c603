"""What a chunk of a prompt takes of a card, by running the network on tensors without memory: a program.

    python traced_steps.py MODEL ARCH CASES   (JSON: [[rows, bytes of scratch], ...])

Prints JSON, for each case: `peak`, the most bytes alive at a time; `pool`, what torch's allocator would have
taken for a capture of them; `stated`, what the op layer says. Kernels do nothing here, none is compiled;
the tensors around them are those of a card.
"""

from __future__ import annotations

import json
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import torch
from attrs import define, evolve, field
from luce_backend_triton import attention, attention_cuts, delta, matrix, memory, normed, product
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import KernelInterface

from luce_core.contracts import CacheOptions, ModelPlan, ModelSpec, StateSizes
from luce_core.engine.staged_prefill import StagedPrefill
from luce_core.gguf import read_header
from luce_core.model.backend import NetworkBackend
from luce_core.model.loader import Loader
from luce_core.model.weights import FileWeights
from luce_core.registry import resolve
from luce_core.testing.pipeline import registry_of

MIB = 1 << 20
DEVICE = "meta"
H200 = attention_cuts.Room(132, 227 << 10, True)
HERE = ("rope_freqs", "rope_factors", "layer_output_scale")
"""Vectors whose numbers a network reads when it is built."""


# --- torch's allocator


@define(eq=False)
class Block:
    """A piece of a segment."""

    size: int
    small: bool
    used: bool = False
    before: Block | None = None
    behind: Block | None = None


@define
class Allocator:
    """The rules of torch's caching allocator: pieces up to 1 MiB from segments of 2, up to 10 MiB from
    segments of 20, larger ones from a segment of their own size; the smallest free piece that is large enough
    is cut. By them, what an H200 had reserved after loading three models came out to 1 MB, and the pools of
    their graphs to 3 MB (LOG.md 2026-11-30).
    """

    reserved: int = 0
    free: list[Block] = field(factory=list)
    blocks: dict[int, Block] = field(factory=dict)

    def take(self, key: int, num_bytes: int) -> None:
        size = max(512, -(-num_bytes // 512) * 512)
        small = size <= MIB
        fitting = [one for one in self.free if one.small == small and one.size >= size]
        if fitting:
            block = min(fitting, key=lambda one: one.size)
            self.free.remove(block)
        else:
            block = Block(
                2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB, small
            )
            self.reserved += block.size
        if block.size - size >= 512 if small else block.size - size > MIB:
            rest = Block(block.size - size, small, before=block, behind=block.behind)
            if rest.behind is not None:
                rest.behind.before = rest
            block.size, block.behind = size, rest
            self.free.append(rest)
        block.used = True
        self.blocks[key] = block

    def give(self, key: int) -> None:
        block = self.blocks.pop(key)
        block.used = False
        if block.before is not None and not block.before.used:
            self.free.remove(block.before)
            block = self._joined(block.before, block)
        if block.behind is not None and not block.behind.used:
            self.free.remove(block.behind)
            block = self._joined(block, block.behind)
        self.free.append(block)

    @staticmethod
    def _joined(first: Block, second: Block) -> Block:
        first.size += second.size
        first.behind = second.behind
        if first.behind is not None:
            first.behind.before = first
        return first


class Trace(TorchDispatchMode):
    """Notes when memory of tensors is taken and given back."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[int, int]] = {}
        self.events: list[tuple[int, int]] = []
        """(number of the memory, bytes, or -1 when it goes)."""
        self.now = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {id(one.untyped_storage()) for one in _tensors((args, kwargs))}
        for one in _tensors(result):
            if id(one.untyped_storage()) not in given:
                self._note(one.untyped_storage())
        return result

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        if key in self.alive or not storage.nbytes():
            return
        number = len(self.events)
        self.alive[key] = number, storage.nbytes()
        self.events.append((number, storage.nbytes()))
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        number, size = self.alive.pop(key)
        self.events.append((number, -1))
        self.now -= size


def _tensors(values: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(values)
    return [one for one in leaves if isinstance(one, torch.Tensor) and one.device.type == DEVICE]


# --- a model without memory


def stand_in() -> None:
    """Tensors without memory pass for those of a card, weights are not packed, kernels do nothing."""
    torch.Tensor.is_cuda = property(lambda self: self.device.type == DEVICE)  # type: ignore[assignment]
    KernelInterface.__getitem__ = lambda self, grid: lambda *args, **kwargs: None
    attention.room_of = delta.room_of = lambda device: H200
    normed.even = lambda *numbers: True  # there are none
    matrix._slices = lambda raw, device: ()
    vec = FileWeights.vec

    def readable(self: FileWeights, name: str) -> torch.Tensor:
        device = self._device
        self._device = "cpu" if name.startswith(HERE) or name.endswith(HERE) else device
        try:
            return vec(self, name)
        finally:
            self._device = device

    FileWeights.vec = readable  # type: ignore[method-assign]


def backend_of(path: str, arch: str) -> tuple[ModelSpec, NetworkBackend]:
    registry = registry_of(f"luce_arch_{arch}.hooks", "luce_backend_triton.hooks")
    header = read_header(path)
    known = registry.arch(header.family).value
    spec = evolve(resolve(known.describe, "it")(header, CacheOptions(0)), identity="none")
    groups = {f"target/{group.name}": 64 for group in spec.layout.groups}
    sizes = StateSizes(32, groups, 2, 8, "f16", "f16")
    ops = {one.op: resolve(one.fn, "it") for one in registry.op_layer("triton").value.ops}
    devices = (DEVICE,) * spec.num_layers
    plan = ModelPlan("target", "target", path, spec, "", devices, op_layers=("triton",))
    loader = Loader(lambda _: resolve(known.build, "it"), lambda _: ops, sizes)
    return spec, loader.load(plan).backend


def traced(spec: ModelSpec, backend: NetworkBackend, rows: int, scratch: int) -> dict[str, int]:
    memory.SCRATCH_BYTES = product.SCRATCH_BYTES = scratch
    product._scratch.cache_clear()
    table = SimpleNamespace(device=DEVICE, vocab=spec.vocab)
    programs: Any = SimpleNamespace(
        table=table, axes=spec.position_axes, backend=backend, ops=backend.ops, drafters=(), generation=0
    )
    staged = StagedPrefill(programs, rows)
    buffers = staged.stage((rows, tuple((group.name, 64) for group in spec.layout.groups)))
    staged.compute(buffers)  # what is kept for all steps is there then
    with Trace() as trace:
        staged.compute(buffers)
    pool = Allocator()
    pool.take(-1, memory.LIBRARY_BYTES)
    for number, size in trace.events:
        if size < 0:
            pool.give(number)
        else:
            pool.take(number, size)
    stated = memory.activations(spec, rows)
    working = stated.working - memory.LIBRARY_BYTES
    return {"peak": trace.peak, "stated": working, "pool": pool.reserved, "stated pool": stated.replayed}


def main() -> None:
    path, arch, cases = sys.argv[1:]
    stand_in()
    spec, backend = backend_of(path, arch)
    print(json.dumps([traced(spec, backend, *case) for case in json.loads(cases)]))


if __name__ == "__main__":
    main()
