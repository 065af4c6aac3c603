"""The contract of a recorded answer: a stored model gives the logits another implementation gave, however the
text is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from attrs import frozen
from torch import Tensor

from luce_core.contracts import Tap
from luce_core.model.batch import make_batch
from luce_core.testing.contract import Contract
from luce_core.testing.rig import ModelRig

TREE = (-1, 0, 1, 2, 2, 4, 4)
RIGHT = (0, 1, 2, 4, 6)
"""Rows of `TREE` that go on as the text does: three decided, then the second child twice."""


@frozen(eq=False)
class Recording:
    """A text and what was recorded of it."""

    ids: Sequence[int]
    logits: Tensor
    """f32[T, V]."""
    more: Mapping[str, Any]
    """embed_out, layer0_out [T, E]: the embedded text and the first layer's output, where recorded."""


class RecordedContract(Contract):
    """One model file and its recording, `NAME.npz` beside `NAME.gguf`: input_ids i64[T], logits [T, V].

    Logits are compared, never only their argmax: agreement of that survives gross errors.
    """

    hooks: str
    """The plugin's module of hooks."""
    file: Path
    """The model."""
    f16: float
    """Largest difference a cache in f16 may make, as a share of the largest logit."""
    bf16: float
    tolerance: float = 2e-5
    """Largest difference in full precision, as a share of the largest logit."""
    recording: Path | None = None
    """None: beside the file."""
    key: str = "logits"
    """What the recording calls them."""
    cuts: Sequence[Sequence[int]] = ((113, 150),)
    """Where a prompt is cut into chunks; what follows the last is decoded token by token. A window's edge
    belongs here.
    """
    singles: int | None = None
    """How much of the text is decoded from the first token on; None: all. Fewer where a model is slow."""
    tree_at: int = 100
    """Tokens before a tree; nine more are needed."""
    wrong: int = 40
    """Candidates that are all rejected: more than a window is wide."""
    starts: Sequence[int] = (1, 40, 97)
    """Lengths of prompts that run beside each other."""
    prefix: int = 88
    """Tokens of a cached prefix."""
    rounded: int = 120
    """Tokens that caches in half precision are tried on."""
    rounded_share: float = 1.0
    """Of their rows, how many stay near: a rounded router may take other experts, which is another answer."""
    block_tokens: int = 8
    """Tokens of a cache block."""

    def _rig(self, **more: Any) -> ModelRig:
        return ModelRig(self.file, self.hooks, block_tokens=self.block_tokens, **more)

    @pytest.fixture(name="rig")
    def _one_rig(self) -> Iterator[ModelRig]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
        yield self._rig()
        torch.set_num_threads(threads)

    @pytest.fixture(name="text")
    def _recording(self) -> Recording:
        with np.load(self.recording or self.file.with_suffix(".npz")) as stored:
            more = {name: stored[name] for name in stored.files}
        logits = torch.from_numpy(more[self.key]).float()
        return Recording(more["input_ids"].tolist(), logits, more)

    def _close(self, got: Tensor, wanted: Tensor, what: str, share: float | None = None) -> None:
        assert got.shape == wanted.shape, what
        worst = float((got - wanted).abs().max() / wanted.abs().max())
        allowed = self.tolerance if share is None else share
        assert worst <= allowed, f"{what}: logits differ by {worst:.2g} of the largest, allowed {allowed:.2g}"

    def _decode(self, rig: ModelRig, seq: Any, ids: Sequence[int]) -> Tensor:
        return torch.stack([rig.decode(seq, token) for token in ids])

    # --- one text, however it is cut

    def test_one_prefill_gives_what_was_recorded(self, rig: ModelRig, text: Recording) -> None:
        self._close(rig.fresh(text.ids), text.logits, "one prefill")

    def test_chunks_then_single_tokens_give_it(self, rig: ModelRig, text: Recording) -> None:
        for cuts in self.cuts:
            seq, parts = rig.open(), []
            for start, stop in pairwise((0, *cuts)):
                parts.append(rig.prefill({seq: text.ids[start:stop]})[seq])
            parts.append(self._decode(rig, seq, text.ids[cuts[-1] :]))
            self._close(torch.cat(parts), text.logits, f"cut at {list(cuts)}")
            rig.close_all([seq])

    def test_single_tokens_give_it(self, rig: ModelRig, text: Recording) -> None:
        ids = text.ids[: self.singles]
        self._close(self._decode(rig, rig.open(), ids), text.logits[: len(ids)], "token by token")

    def test_beside_other_sequences_at_other_places(self, rig: ModelRig, text: Recording) -> None:
        starts = {rig.open(): start for start in self.starts}
        chunks = {seq: text.ids[:start] for seq, start in starts.items()}
        for seq, got in rig.prefill(chunks).items():
            self._close(got, text.logits[: starts[seq]], f"{starts[seq]} tokens beside others")
        for step in range(4):
            held = rig.hold({seq: [text.ids[start + step]] for seq, start in starts.items()})
            for start, got in zip(starts.values(), held.logits, strict=True):
                place = start + step
                self._close(got, text.logits[place : place + 1], f"token {place} beside others")
            rig.commit(held, [[0]] * len(starts))

    # --- candidates

    def test_decided_rows_and_a_tree_behind_them(self, rig: ModelRig, text: Recording) -> None:
        """Three decided rows, then a wrong and the right continuation, twice; the right ones are accepted."""
        at, ids = self.tree_at, text.ids[self.tree_at :]
        wrong = [(token + 1) % rig.spec.vocab for token in ids]
        seq = rig.open()
        rig.prefill({seq: text.ids[:at]})
        tokens = [*ids[:3], wrong[3], ids[3], wrong[4], ids[4]]
        held = rig.hold({seq: tokens}, {seq: TREE}, sure=3)
        self._close(held.logits[0][list(RIGHT)], text.logits[at : at + 5], "rows of a tree")
        rig.commit(held, [RIGHT])
        self._close(self._decode(rig, seq, ids[5:9]), text.logits[at + 5 : at + 9], "behind the tree")

    def test_rejected_candidates_leave_nothing(self, rig: ModelRig, text: Recording) -> None:
        """What they could hide, or overwrite, is still there."""
        at, seq = self.tree_at, rig.open()
        rig.prefill({seq: text.ids[:at]})
        held = rig.hold({seq: [text.ids[at], *[7] * self.wrong]})
        self._close(held.logits[0][:1], text.logits[at : at + 1], "before candidates")
        rig.commit(held, [[0]])
        got = self._decode(rig, seq, text.ids[at + 1 : at + 4])
        self._close(got, text.logits[at + 1 : at + 4], "behind rejected candidates")

    # --- state

    def test_a_cached_prefix_gives_it(self, rig: ModelRig, text: Recording) -> None:
        first = rig.open(text.ids)
        rig.prefill({first: text.ids[: self.prefix]})
        rig.blocks.checkpoint(first)
        rig.close(first)
        elsewhere, again = rig.open(), rig.open(text.ids, reuse=True)
        kept = rig.blocks.length(again)
        assert kept == self.prefix, f"{self.prefix} tokens were cached, {kept} came back"
        got = rig.prefill({again: text.ids[kept:]})[again]
        self._close(got, text.logits[kept:], "behind a cached prefix")
        rig.close_all([elsewhere, again])

    @pytest.mark.parametrize("cache_type", ["f16", "bf16"])
    def test_rounded_caches_stay_near(self, text: Recording, cache_type: Literal["f16", "bf16"]) -> None:
        """Near, and not equal: it is the cache that is rounded."""
        rig, allowed = self._rig(cache_type=cache_type), getattr(self, cache_type)
        wanted, few = text.logits[: self.rounded], self.rounded // 3
        whole = rig.fresh(text.ids[: self.rounded])
        single = self._decode(rig, rig.open(), text.ids[:few])
        for got, right in ((whole, wanted), (single, wanted[:few])):
            rows = (got - right).abs().amax(1) / text.logits.abs().max()
            worst = float(rows.quantile(self.rounded_share))
            assert worst <= allowed, f"{cache_type}: logits differ by {worst:.2g}, allowed {allowed:.2g}"
            assert float(rows.max()) > self.tolerance, f"{cache_type}: nothing was rounded"

    # --- who else reads it

    def test_the_compiled_program_gives_the_same_bits(self, rig: ModelRig, text: Recording) -> None:
        compiled = self._rig(overlay={"*": lambda program, ops: program})
        ids = text.ids[:60]
        assert torch.equal(compiled.fresh(ids), rig.fresh(ids))
        seqs = {one: one.open() for one in (rig, compiled)}
        for token in ids[:4]:
            ours, theirs = (one.decode(seq, token) for one, seq in seqs.items())
            assert torch.equal(ours, theirs)

    def test_a_drafter_sees_what_was_recorded(self, rig: ModelRig, text: Recording) -> None:
        """Embeddings and the first layer's residual, where the recording has them; what the head gets."""
        spec, ids = rig.spec, text.ids
        first, final = Tap("residual", 0), Tap("final", spec.num_layers - 1)
        taps = {
            first: torch.zeros(len(ids), spec.tap_width),
            final: torch.zeros(len(ids), spec.final_width),
        }
        rows = [rig._rows(rig.open(), ids)]
        rig.backend.forward(make_batch("prefill", rows, axes=spec.position_axes, taps=taps))
        self._close(rig.backend.head(taps[final]), text.logits, "the head over the tap")
        some = torch.tensor([7, 0, spec.vocab - 1])
        self._close(rig.backend.head(taps[final], some), text.logits[:, some], "the head for three tokens")
        embedded = rig.backend.embed(torch.tensor(ids, dtype=torch.int32))
        for name, got in (("embed_out", embedded), ("layer0_out", taps[first])):
            if name in text.more:
                self._close(got, torch.from_numpy(text.more[name]), name)
