"""The contract of published sizes: what an architecture declares in `ArchSpec.geometries`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from luce_core import synth
from luce_core.contracts import CacheOptions, Geometry
from luce_core.model.batch import RowSet, make_batch
from luce_core.testing.contract import Contract
from luce_core.testing.plugin import registry_of
from luce_core.testing.rig import ModelRig, describe

MAX_RESIDUAL = 6e4
"""Where float16 ends, nearly."""
LOGIT_SPREAD = (0.05, 50.0)
"""Their deviation: neither all the same nor all decided."""


class GeometryContract(Contract):
    """Headers of every published size are described as they are; random weights give a sane forward."""

    hooks: str
    """The plugin's module of hooks."""
    quants: tuple[str, ...] = ("q4_k_m",)
    """Of the small models that are run."""

    def small(self) -> Sequence[Geometry]:
        """Small ones of each architecture: few columns, at least 300 tokens, as many layers as real ones."""
        raise NotImplementedError("a subclass of GeometryContract makes small geometries here")

    def test_every_header_is_described(self, tmp_path: Path) -> None:
        """Without weights: parameters, bytes, and a forward's share of them, in every quantization."""
        registry = registry_of(self.hooks)
        found = synth.geometries(registry)
        assert found, "no geometries are declared"
        for item in found:
            geometry = item.value
            for quant in synth.quants_of(geometry):
                (path,) = synth.write(
                    geometry,
                    quant,
                    tmp_path / "h.gguf",
                    header_only=True,
                    tokenizer=False,
                    overwrite=True,
                )
                spec = describe(registry, path, CacheOptions(0))
                subject = f"{geometry.name} in {quant}"
                stored = spec.stored.values()
                parameters = spec.parameters + sum(size.parameters for size in stored)
                weight_bytes = spec.weight_bytes + sum(size.num_bytes for size in stored)
                assert parameters == geometry.parameters, subject
                assert spec.vocab == geometry.vocab, subject
                assert weight_bytes == synth.num_bytes(geometry, quant), subject
                assert 0 < spec.active_bytes <= spec.weight_bytes, subject

    def test_names_and_aliases_are_of_one_geometry(self) -> None:
        synth.by_name(registry_of(self.hooks))

    def test_random_weights_give_a_sane_forward(self, tmp_path: Path) -> None:
        """No activation leaves float16 at any depth, no logit is NaN, and they tell tokens apart."""
        for geometry in self.small():
            for quant in self.quants:
                (path,) = synth.write(geometry, quant, tmp_path / "w.gguf", seed=5, overwrite=True)
                rig = ModelRig(path, self.hooks, num_slots=2, num_blocks=8, block_tokens=128)
                subject = f"{geometry.name} in {quant}"
                final, logits = _run(rig, 40)
                assert bool(torch.isfinite(final).all()), f"{subject}: not finite"
                assert float(final.abs().max()) < MAX_RESIDUAL, f"{subject}: beyond float16"
                assert bool(torch.isfinite(logits).all()), f"{subject}: logits are not finite"
                low, high = LOGIT_SPREAD
                assert low < float(logits.std()) < high, f"{subject}: logits deviate by {logits.std():.3g}"


def _run(rig: ModelRig, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(what goes into the head, logits) of every row of a text."""
    tokens = [(7 * place) % rig.spec.vocab for place in range(length)]
    seq = rig.open()
    assert rig.blocks.reserve(seq, length)
    tables = {key.partition("/")[2]: table for key, table in rig.blocks.tables(seq).items()}
    rows = RowSet(
        slot=rig.blocks.slot(seq),
        length=0,
        tokens=tokens,
        tables=tables,
        wanted=range(length),
    )
    batch = make_batch("prefill", [rows], axes=rig.spec.position_axes, device=rig.device)
    final = rig.backend.forward(batch).final
    return final, rig.backend.head(final)
