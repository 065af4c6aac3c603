"""One model with its state, driven by hand: what the contracts test architectures and op layers with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from luce_core.cache.layout import joined
from luce_core.cache.manager import PagedBlockManager
from luce_core.contracts import (
    CacheOptions,
    Commit,
    Fence,
    ForwardBatch,
    Hit,
    ModelPlan,
    ModelSpec,
    SeqId,
    StateSizes,
)
from luce_core.gguf import read_header
from luce_core.model.batch import RowSet, make_batch
from luce_core.model.loader import Loader, Model
from luce_core.model.state import TorchStateStore
from luce_core.registry import Registry, resolve
from luce_core.testing.plugin import registry_of

MODEL = "target"


@frozen(eq=False)
class Held:
    """A held batch that was run and is not committed yet."""

    batch: ForwardBatch
    seqs: tuple[SeqId, ...]
    tokens: tuple[tuple[int, ...], ...]
    logits: tuple[Tensor, ...]
    """Per sequence f32[rows, V]."""


class ModelRig:
    """A loaded model, its block manager and its state store. No engine, no scheduler, no text."""

    def __init__(
        self,
        path: Path,
        *hooks: str,
        layers: Sequence[str] = (),
        overlay: Mapping[str, Callable[..., Any]] | None = None,
        num_slots: int = 8,
        num_blocks: int = 96,
        block_tokens: int = 8,
        max_held_rows: int = 64,
        cache_type: str = "f32",
        v_type: str | None = None,
        device: str = "cpu",
        nextn: bool = False,
    ) -> None:
        """nextn: with the state of the model's MTP block, as for a drafter that runs it. cache_type: of keys,
        and of values unless `v_type` is another.
        """
        v_type = v_type or cache_type
        self.device = device
        self.registry = registry_of(*hooks)
        self.header = read_header(path)
        self.spec = describe(self.registry, path, CacheOptions(0, cache_type, v_type))
        if nextn and self.spec.nextn_layout is not None:
            self.spec = evolve(self.spec, layout=joined(self.spec.layout, self.spec.nextn_layout))
        self.sizes = StateSizes(
            block_tokens=block_tokens,
            num_blocks={f"{MODEL}/{group.name}": num_blocks for group in self.spec.layout.groups},
            num_slots=num_slots,
            max_held_rows=max_held_rows,
            k_type=cache_type,
            v_type=v_type,
        )
        self.plan = ModelPlan(
            name=MODEL,
            role="target",
            path=str(path),
            spec=self.spec,
            arch_plugin="",
            layer_device=(device,) * self.spec.num_layers,
            op_layers=tuple(layers),
        )
        self.model = self._load(overlay)
        self.backend = self.model.backend
        self.store = TorchStateStore(self.sizes, [self.model.state])
        self.blocks = PagedBlockManager(
            self.store, {MODEL: self.spec.layout}, identity=self.backend.spec.identity, cache_bytes=1 << 24
        )

    def _load(self, overlay: Mapping[str, Callable[..., Any]] | None) -> Model:
        def layer_of(name: str) -> dict[str, Callable[..., Any]]:
            return {op.op: resolve(op.fn, f"op {op.op!r}") for op in self.registry.op_layer(name).value.ops}

        def build_of(arch: str) -> Callable[..., Any]:
            return resolve(self.registry.arch(arch).value.build, f"architecture {arch!r}")

        return Loader(build_of, layer_of, self.sizes).load(self.plan, overlay)

    # --- sequences

    def open(self, prompt: Sequence[int] = (), *, reuse: bool = False) -> SeqId:
        """A new sequence; with `reuse`, over the longest cached prefix of `prompt`."""
        hit = self.blocks.match(prompt) if reuse and prompt else Hit(0, None)
        return self.blocks.open(prompt, hit)

    def close(self, *seqs: SeqId) -> None:
        """Close sequences; nothing is in flight here, so their blocks are free at once."""
        for seq in seqs:
            self.blocks.close(seq, Fence(0))
        self.blocks.retire(Fence(0))

    def close_all(self, seqs: Sequence[SeqId]) -> None:
        """`close` for a list, then the block manager's own check."""
        self.close(*seqs)
        self.blocks.check_integrity()

    def _rows(self, seq: SeqId, tokens: Sequence[int], **more: Any) -> RowSet:
        if not self.blocks.reserve(seq, len(tokens)):
            raise AssertionError(f"the rig has no room for {len(tokens)} more rows; give it more blocks")
        tables = {key.partition("/")[2]: table for key, table in self.blocks.tables(seq).items()}
        return RowSet(
            slot=self.blocks.slot(seq), length=self.blocks.length(seq), tokens=tokens, tables=tables, **more
        )

    # --- forwards

    def prefill(self, work: Mapping[SeqId, Sequence[int]]) -> dict[SeqId, Tensor]:
        """Write the state of these tokens in one batch -> logits of every row, f32[rows, V] per sequence."""
        rows = [self._rows(seq, tokens, wanted=range(len(tokens))) for seq, tokens in work.items()]
        batch = make_batch("prefill", rows, axes=self.spec.position_axes, device=self.device)
        final = self.backend.forward(batch).final
        logits = torch.split(self.backend.head(final), [len(tokens) for tokens in work.values()])
        for seq, tokens in work.items():
            self.blocks.advance(seq, tokens)
        return dict(zip(work, logits, strict=True))

    def hold(
        self,
        work: Mapping[SeqId, Sequence[int]],
        parents: Mapping[SeqId, Sequence[int]] | None = None,
        sure: int = 1,
    ) -> Held:
        """Run held rows of every sequence in one batch. parents: rows, per sequence; without, one chain."""
        rows = [
            self._rows(seq, tokens, sure=sure, parents=parents[seq] if parents else None)
            for seq, tokens in work.items()
        ]
        batch = make_batch("held", rows, axes=self.spec.position_axes, device=self.device)
        logits = self.backend.forward(batch).logits
        if logits is None:
            raise AssertionError("a held batch returned no logits")
        split = torch.split(logits, [len(tokens) for tokens in work.values()])
        return Held(batch, tuple(work), tuple(tuple(tokens) for tokens in work.values()), split)

    def commit(self, held: Held, paths: Sequence[Sequence[int]]) -> None:
        """Accept these rows of every sequence of a held batch, in its order; an empty path discards."""
        longest = max(1, *(len(path) for path in paths))
        rows = [[*path, *[0] * (longest - len(path))] for path in paths]
        padded = torch.tensor(rows, dtype=torch.int32, device=self.device)
        count = torch.tensor([len(path) for path in paths], dtype=torch.int32, device=self.device)
        self.backend.commit(held.batch, Commit(padded, count))
        for seq, tokens, path in zip(held.seqs, held.tokens, paths, strict=True):
            if path:
                self.blocks.advance(seq, [tokens[row] for row in path])

    def decode(self, seq: SeqId, token: int) -> Tensor:
        """One plain decode step -> logits f32[V]."""
        held = self.hold({seq: [token]})
        self.commit(held, [[0]])
        return held.logits[0][0]

    def fresh(self, tokens: Sequence[int]) -> Tensor:
        """Logits of every row of a fresh run, f32[rows, V]; leaves nothing behind."""
        seq = self.open()
        logits = self.prefill({seq: tokens})[seq]
        self.close(seq)
        return logits


def describe(registry: Registry, path: Path, cache: CacheOptions) -> ModelSpec:
    """The spec its architecture plugin makes of a file's header."""
    header = read_header(path)
    found: ModelSpec = resolve(registry.arch(header.arch).value.describe, f"architecture {header.arch!r}")(
        header, cache
    )
    return found
