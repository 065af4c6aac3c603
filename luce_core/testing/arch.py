"""The contract of an architecture plugin: one model, however it is cut into batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from luce_core.cache.layout import state_bytes
from luce_core.errors import ModelFormatError
from luce_core.gguf import GgufFile
from luce_core.model.batch import RowSet, make_batch
from luce_core.ops import replay
from luce_core.testing.contract import Contract
from luce_core.testing.fresh import run_fresh
from luce_core.testing.gguf_factory import write_gguf
from luce_core.testing.rig import ModelRig
from luce_core.testing.trees import paths, tree_shapes

TREES_AT_ONCE = 64

_DESCRIBE = """
import sys
from pathlib import Path
from luce_core.contracts import CacheOptions
from luce_core.gguf import read_header
from luce_core.registry import resolve
resolve(sys.argv[1], "describe")(read_header(Path(sys.argv[2])), CacheOptions(0))
print("torch" in sys.modules)
"""


class ArchContract(Contract):
    """Prefill, chunks, decode, trees, batch-mates, forks and snapshots of one small model all agree.

    Logits are compared, never only their argmax: gross errors keep most of it right.
    """

    hooks: str
    """The plugin's module of hooks."""
    more_hooks: tuple[str, ...] = ()
    """Further modules the model needs, e.g. for an op layer."""
    layers: tuple[str, ...] = ()
    """Op layers to run with; none: the reference."""
    tolerance: float = 2e-5
    """Largest difference allowed, as a share of the largest logit; 0 = equal bits."""
    ops_only: bool = True
    """The network is written with ops and views alone, so that its recording is complete."""
    tree_nodes: int = 8
    """Candidates in the largest trees; fewer for a model that is slow even when small."""
    block_tokens: int = 8
    """Tokens of a cache block; a multiple of every group's stride."""

    def make_model(self, folder: Path) -> Path:
        """Write (or return) a small random model of the architecture."""
        raise NotImplementedError("a subclass of ArchContract writes a small model here")

    @pytest.fixture(name="rig")
    def _rig(self, tmp_path: Path) -> Iterator[ModelRig]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
        yield ModelRig(
            self.make_model(tmp_path),
            self.hooks,
            *self.more_hooks,
            layers=self.layers,
            num_slots=TREES_AT_ONCE + 2,
            num_blocks=4 * TREES_AT_ONCE,
            block_tokens=self.block_tokens,
        )
        torch.set_num_threads(threads)

    def _text(self, rig: ModelRig, length: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(1, rig.spec.vocab, (length,), generator=generator).tolist()

    def _close(self, got: Tensor, wanted: Tensor, what: str) -> None:
        worst = float((got - wanted).abs().max())
        allowed = self.tolerance * float(wanted.abs().max())
        assert worst <= allowed, f"{what}: logits differ by {worst:.3g}, allowed {allowed:.3g}"

    # --- one text, however it is cut

    @pytest.mark.parametrize("cut", [1, 7, 8, 20, 36])
    def test_chunks_of_a_prompt_give_the_logits_of_the_whole(self, rig: ModelRig, cut: int) -> None:
        text = self._text(rig, 37)
        whole = rig.fresh(text)
        seq = rig.open()
        got = torch.cat([rig.prefill({seq: text[:cut]})[seq], rig.prefill({seq: text[cut:]})[seq]])
        self._close(got, whole, f"chunks of {cut} and {37 - cut} tokens")

    def test_decoding_one_by_one_gives_the_logits_of_the_whole(self, rig: ModelRig) -> None:
        text = self._text(rig, 30)
        whole = rig.fresh(text)
        seq = rig.open()
        rig.prefill({seq: text[:11]})
        got = torch.stack([rig.decode(seq, token) for token in text[11:]])
        self._close(got, whole[11:], "prefill 11, then decode")
        from_nothing = rig.open()
        got = torch.stack([rig.decode(from_nothing, token) for token in text])
        self._close(got, whole, "decode from the first token")

    def test_batch_mates_change_nothing(self, rig: ModelRig) -> None:
        texts = [self._text(rig, length, seed=length) for length in (5, 19, 33)]
        seqs = [rig.open() for _ in texts]
        together = rig.prefill(dict(zip(seqs, texts, strict=True)))
        for seq, text in zip(seqs, texts, strict=True):
            self._close(together[seq], rig.fresh(text), f"prefill of {len(text)} tokens beside others")
        nexts = self._text(rig, 3, seed=9)
        held = rig.hold({seq: [token] for seq, token in zip(seqs, nexts, strict=True)})
        for text, token, logits in zip(texts, nexts, held.logits, strict=True):
            self._close(logits[0], rig.fresh([*text, token])[-1], "decode beside others")

    # --- trees

    def test_every_tree_and_every_accepted_path_continues_like_a_fresh_run(self, rig: ModelRig) -> None:
        if rig.spec.tree == "none":
            return
        prefix, follow = self._text(rig, 13), self._text(rig, 1, seed=5)[0]
        base = rig.open()
        rig.prefill({base: prefix})
        known: dict[tuple[int, ...], Tensor] = {}
        cases = [
            (parents, path)
            for parents in tree_shapes(self.tree_nodes + 1)
            if rig.spec.tree == "any" or list(parents) == list(range(-1, len(parents) - 1))
            for path in paths(parents)
        ]
        for start in range(0, len(cases), TREES_AT_ONCE):
            self._check_trees(rig, base, prefix, follow, cases[start : start + TREES_AT_ONCE], known)
        rig.close_all([base])

    def _check_trees(
        self,
        rig: ModelRig,
        base: Any,
        prefix: list[int],
        follow: int,
        cases: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
        known: dict[tuple[int, ...], Tensor],
    ) -> None:
        forks = [rig.blocks.fork(base) for _ in cases]
        trees = [_tree_tokens(parents, rig.spec.vocab) for parents, _ in cases]
        shapes = {seq: parents for seq, (parents, _) in zip(forks, cases, strict=True)}
        held = rig.hold(dict(zip(forks, trees, strict=True)), shapes)
        rig.commit(held, [path for _, path in cases])
        after = rig.hold({seq: [follow] for seq in forks})
        for place, (parents, path) in enumerate(cases):
            text = tuple(trees[place][row] for row in path)
            if text not in known:
                known[text] = rig.fresh([*prefix, *text, follow])[-2:]
            what = f"tree {parents}, path {path}"
            self._close(held.logits[place][path[-1]], known[text][0], f"{what}: row")
            self._close(after.logits[place][0], known[text][1], f"{what}: continuation")
        rig.close(*forks)

    def test_a_discarded_batch_leaves_no_trace(self, rig: ModelRig) -> None:
        text = self._text(rig, 21)
        seq = rig.open()
        rig.prefill({seq: text[:-1]})
        for tokens in ([5, 6, 7], [9]):
            rig.commit(rig.hold({seq: tokens}), [[]])
        self._close(rig.decode(seq, text[-1]), rig.fresh(text)[-1], "decode after two discarded batches")

    # --- state

    def test_forks_go_their_own_ways(self, rig: ModelRig) -> None:
        text = self._text(rig, 18)
        one = rig.open()
        rig.prefill({one: text})
        other = rig.blocks.fork(one)
        ways = {one: self._text(rig, 9, seed=1), other: self._text(rig, 9, seed=2)}
        for step in range(9):
            held = rig.hold({seq: [way[step]] for seq, way in ways.items()})
            rig.commit(held, [[0], [0]])
            for seq, logits in zip(ways, held.logits, strict=True):
                self._close(logits[0], rig.fresh([*text, *ways[seq][: step + 1]])[-1], f"fork, step {step}")
        rig.close_all([one, other])

    def test_a_cached_prefix_gives_the_logits_of_a_fresh_run(self, rig: ModelRig) -> None:
        text = self._text(rig, 29)
        first = rig.open(text)
        rig.prefill({first: text[:24]})
        rig.blocks.checkpoint(first)
        rig.close(first)
        elsewhere = rig.open()  # takes the slot that was just freed: the snapshot must come back into another
        again = rig.open(text, reuse=True)
        kept = rig.blocks.length(again)
        assert kept >= 24, f"24 tokens were cached at a checkpoint, {kept} came back"
        got = rig.prefill({again: text[kept:]})[again]
        self._close(got, rig.fresh(text)[kept:], "after a prefix hit")
        rig.close_all([again, elsewhere])

    def test_the_state_takes_the_bytes_the_plan_says(self, rig: ModelRig) -> None:
        planned = state_bytes(rig.plan.name, rig.spec.layout, rig.sizes)
        taken = sum(tensor.numel() * tensor.element_size() for tensor in rig.model.state.tensors())
        assert taken == planned

    # --- how it is written

    def test_describing_a_file_imports_no_torch(self, rig: ModelRig) -> None:
        spec = rig.registry.arch(rig.header.arch).value
        imported = run_fresh(_DESCRIBE, spec.describe, rig.plan.path).strip()
        assert imported == "False", f"{spec.describe!r} imported torch"

    def test_the_recorded_program_replays_bit_for_bit(self, rig: ModelRig) -> None:
        if not self.ops_only:
            return
        text = self._text(rig, 15)
        for phase, tokens in (("prefill", text[:12]), ("held", text[12:])):
            trunk, logits = rig.backend.programs()
            seq = rig.open()
            assert rig.blocks.reserve(seq, len(tokens))
            tables = {key.partition("/")[2]: table for key, table in rig.blocks.tables(seq).items()}
            row = RowSet(slot=rig.blocks.slot(seq), length=0, tokens=tokens, tables=tables)
            batch = make_batch(cast("Any", phase), [row], axes=rig.spec.position_axes)
            for slot in rig.model.state.slots.values():
                slot.state.zero_()
            direct = rig.backend._running().network.trunk(batch)
            for slot in rig.model.state.slots.values():
                slot.state.zero_()
            replayed = _only(replay(trunk, rig.backend.ops, {"batch": batch}))
            assert torch.equal(direct, replayed), f"{phase}: replay differs from the direct call"
            head = rig.backend._running().network.logits(direct)
            assert torch.equal(head, _only(replay(logits, rig.backend.ops, {"final": direct})))
            rig.close(seq)

    # --- bad files

    def test_a_missing_tensor_is_named(self, rig: ModelRig, tmp_path: Path) -> None:
        for name in self._required(rig):
            broken = _rewrite(Path(rig.plan.path), tmp_path / "missing.gguf", drop=name)
            with pytest.raises(ModelFormatError) as caught:
                ModelRig(broken, self.hooks, *self.more_hooks, layers=self.layers)
            assert name in str(caught.value), f"{name!r} is missing; the error says: {caught.value}"

    def test_a_misshapen_tensor_is_named(self, rig: ModelRig, tmp_path: Path) -> None:
        for name in self._required(rig):
            broken = _rewrite(Path(rig.plan.path), tmp_path / "shape.gguf", grow=name)
            with pytest.raises(ModelFormatError) as caught:
                ModelRig(broken, self.hooks, *self.more_hooks, layers=self.layers)
            assert name in str(caught.value), f"{name!r} is misshapen; the error says: {caught.value}"

    optional_tensors: frozenset[str] = frozenset()
    """Tensors the architecture can do without (a tied head, a bias)."""

    def _required(self, rig: ModelRig) -> Sequence[str]:
        """One tensor of every role in the first layer, and those outside layers."""
        names = [n for n in rig.header.tensors if not n.startswith("blk.") or n.startswith("blk.0.")]
        return [name for name in names if name not in self.optional_tensors]


def _only(outputs: Any) -> Tensor:
    found: Tensor = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
    return found


def _tree_tokens(parents: tuple[int, ...], vocab: int) -> list[int]:
    """A token per node, by its depth and its place among its siblings: equal paths in different trees are
    equal texts.
    """
    tokens: list[int] = []
    depth: list[int] = []
    born: dict[int, int] = {}
    for parent in parents:
        rank = born[parent] = born.get(parent, -1) + 1
        depth.append(depth[parent] + 1 if parent >= 0 else 0)
        tokens.append(1 + (depth[-1] * 31 + rank * 7) % (vocab - 1))
    return tokens


def _rewrite(source: Path, target: Path, *, drop: str = "", grow: str = "") -> Path:
    """The same model without one tensor, or with one row too many in it."""
    with GgufFile.open(source) as file:
        tensors = {name: np.array(file.dequantize(name)) for name in file.header.tensors if name != drop}
        if grow:
            tensors[grow] = np.concatenate([tensors[grow], tensors[grow][:1]])
        return write_gguf(target, dict(file.header.metadata), tensors)
