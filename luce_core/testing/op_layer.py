"""The contract of every op layer: the reference's logits, as closely as the layer says."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from luce_core.contracts import Equivalence
from luce_core.model.loader import REWRITE
from luce_core.ops import OpsNamespace, build_ops
from luce_core.registry import resolve
from luce_core.testing.contract import Contract
from luce_core.testing.op_cases import CASES, OpWorld
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
    op_formats: tuple[str, ...] = ("F32", "Q8_0")
    """Block formats of the matrices that single ops are called on."""
    device: str = "cpu"
    """Where the layer runs; the reference always runs on the CPU."""

    def make_model(self, folder: Path) -> Path:
        """Write (or return) a small model."""
        raise NotImplementedError("a subclass of OpLayerContract writes a small model here")

    def _rig(self, folder: Path, *layers: str) -> ModelRig:
        return ModelRig(
            self.make_model(folder),
            self.arch_hooks,
            self.hooks,
            layers=layers,
            cache_type=self.cache_type,
            device=self.device if layers else "cpu",
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
        return prefill.cpu(), held.cpu()

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

    def test_every_op_answers_like_the_reference(self, tmp_path: Path) -> None:
        rig = self._rig(tmp_path, self.layer)
        exact = self._equivalence(rig) is Equivalence.BITS
        own = {op.op: resolve(op.fn, f"op {op.op!r}") for op in rig.registry.op_layer(self.layer).value.ops}
        layered = build_ops({name: fn for name, fn in own.items() if name != REWRITE})
        for block_format in self.op_formats:
            for (what, got), (_, wanted) in zip(
                _run_cases(layered, block_format, self.device), _reference(block_format), strict=True
            ):
                for one, other in zip(got, wanted, strict=True):
                    self._same(one, other, exact, f"op {what!r} on {block_format}")

    def _same(self, got: Tensor, wanted: Tensor, exact: bool, what: str) -> None:
        assert got.shape == wanted.shape, f"{what}: {list(got.shape)}, wanted {list(wanted.shape)}"
        if exact or not wanted.dtype.is_floating_point:
            assert torch.equal(got, wanted), f"{what} differs from the reference"
        elif wanted.numel():
            worst = float((got.float() - wanted.float()).abs().max())
            allowed = self.tolerance * max(1.0, float(wanted.float().abs().max()))
            assert worst <= allowed, f"{what}: differs by {worst:.3g}, allowed {allowed:.3g}"

    def _row_invariant(self, rig: ModelRig) -> bool:
        return all(op.row_invariant for op in rig.registry.op_layer(self.layer).value.ops)

    def test_a_row_invariant_layer_ignores_batch_mates(self, tmp_path: Path) -> None:
        rig = self._rig(tmp_path, self.layer)
        if not self._row_invariant(rig):
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

    def test_a_row_invariant_layer_ignores_the_width_of_a_tree(self, tmp_path: Path) -> None:
        rig = self._rig(tmp_path, self.layer)
        if not self._row_invariant(rig):
            return
        text, tokens, path = self._texts(rig)[1], [3, 4, 5, 6, 7], [0, 2, 4]
        tree, alone = rig.open(), rig.open()
        for seq in (tree, alone):
            rig.prefill({seq: text})
        held = rig.hold({tree: tokens}, {tree: [-1, 0, 0, 1, 2]})
        for row in path:
            assert torch.equal(rig.decode(alone, tokens[row]), held.logits[0][row]), (
                f"row {row} of a tree differs from the row decoded alone"
            )
        rig.commit(held, [path])
        assert torch.equal(rig.decode(tree, 8), rig.decode(alone, 8)), "what was accepted differs"


def _run_cases(
    ops: OpsNamespace, block_format: str, device: str = "cpu"
) -> list[tuple[str, tuple[Tensor, ...]]]:
    """Results and state of every case of `op_cases`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
    try:
        ran = ((case.id, case.make(OpWorld(ops, block_format, device)).run(ops)) for case in CASES)
        return [(what, tuple(tensor.cpu() for tensor in got)) for what, got in ran]
    finally:
        torch.set_num_threads(threads)


@cache
def _reference(block_format: str) -> list[tuple[str, tuple[Tensor, ...]]]:
    return _run_cases(build_ops(), block_format)
