"""The contract of every op layer: the reference's logits, as closely as the layer says."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from luce_core.contracts import Equivalence
from luce_core.testing.contract import Contract
from luce_core.testing.rig import ModelRig


class OpLayerContract(Contract):
    """One layer under one small model, beside the reference."""

    hooks: str
    """The plugin's module of hooks."""
    layer: str
    arch_hooks: str
    """Hooks of an architecture whose model uses the layer's ops."""
    tolerance: float = 0.0
    """Largest difference from the reference, as a share of the largest logit. A BITS layer has none."""
    cache_type: str = "f32"

    def make_model(self, folder: Path) -> Path:
        """Write (or return) a small model."""
        raise NotImplementedError("a subclass of OpLayerContract writes a small model here")

    def _rig(self, folder: Path, *layers: str) -> ModelRig:
        return ModelRig(
            self.make_model(folder), self.arch_hooks, self.hooks, layers=layers, cache_type=self.cache_type
        )

    def _texts(self, rig: ModelRig) -> list[list[int]]:
        generator = torch.Generator().manual_seed(1)
        return [
            torch.randint(1, rig.spec.vocab, (length,), generator=generator).tolist() for length in (1, 5, 33)
        ]

    def _logits(self, rig: ModelRig, text: list[int]) -> tuple[Tensor, Tensor]:
        """(prefill of all but the last four, the last four held one by one)."""
        seq = rig.open()
        prompt, rest = text[:-4], text[-4:]
        prefill = rig.prefill({seq: prompt})[seq] if prompt else torch.empty(0, rig.spec.vocab)
        held = torch.stack([rig.decode(seq, token) for token in rest])
        rig.close(seq)
        return prefill, held

    def _equivalence(self, rig: ModelRig) -> Equivalence:
        return rig.registry.op_layer(self.layer).value.equivalence

    def test_logits_are_the_references(self, tmp_path: Path) -> None:
        plain, layered = self._rig(tmp_path), self._rig(tmp_path, self.layer)
        exact = self._equivalence(layered) is Equivalence.BITS
        for text in self._texts(plain):
            for got, wanted in zip(self._logits(layered, text), self._logits(plain, text), strict=True):
                if exact:
                    assert torch.equal(got, wanted), f"{self.layer!r} declares equal bits; they differ"
                elif wanted.numel():
                    worst = float((got - wanted).abs().max())
                    allowed = self.tolerance * float(wanted.abs().max())
                    assert worst <= allowed, f"logits differ by {worst:.3g}, allowed {allowed:.3g}"

    def test_a_row_invariant_layer_ignores_batch_mates(self, tmp_path: Path) -> None:
        rig = self._rig(tmp_path, self.layer)
        ops = rig.registry.op_layer(self.layer).value.ops
        if not all(op.row_invariant for op in ops):
            return
        texts = self._texts(rig)
        seqs = [rig.open() for _ in texts]
        together = rig.prefill(dict(zip(seqs, texts, strict=True)))
        nexts = {seq: [3 + place] for place, seq in enumerate(seqs)}
        held = rig.hold(nexts)
        for place, (seq, text) in enumerate(zip(seqs, texts, strict=True)):
            alone = rig.open()
            assert torch.equal(rig.prefill({alone: text})[alone], together[seq]), "prefill depends on others"
            assert torch.equal(rig.decode(alone, 3 + place), held.logits[place][0]), (
                "decode depends on others"
            )
