"""The contract of every drafter: it may change the speed of a text, never the text."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from luce_core.contracts import Round, SamplingParams, TokenTree
from luce_core.speculation.tree import check_tree, read_tree
from luce_core.testing.contract import Contract
from luce_core.testing.pipeline import TOY_HOOKS, EngineRig, make_pipeline
from luce_core.testing.toy import write_toy_model

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.9, seed=3, top_p=0.9),
    "penalties": SamplingParams(temperature=0.7, seed=4, repetition=1.3, frequency=0.2),
}


class DrafterContract(Contract):
    """One drafter before a small target, by default the toy."""

    hooks: str
    """The plugin's module of hooks."""
    name: str
    """The drafter's name in its `PartSpec`."""
    model_hooks: tuple[str, ...] = (TOY_HOOKS,)
    options: Mapping[str, Any] = {}
    """Options the drafter needs, as on the command line."""

    def make_model(self, folder: Path) -> Path:
        """Write (or return) a small target the drafter can draft for."""
        return write_toy_model(folder / "target.gguf")

    def make_options(self, folder: Path) -> Mapping[str, Any]:
        """`options`, and what is only known in `folder`: the file of a draft model, say."""
        return self.options

    def _rig(self, folder: Path, nodes: int) -> EngineRig:
        options = {**self.make_options(folder), "draft_nodes": nodes, "drafter": (self.name,)}
        if not nodes:
            options = {"drafter": ("none",)}
        return EngineRig(
            make_pipeline(self.make_model(folder), *self.model_hooks, self.hooks, options=options)
        )

    def _prompts(self) -> list[list[int]]:
        dice = Random(5)
        once = [dice.randrange(1, 250) for _ in range(9)]
        return [[7], once, once * 4, [dice.randrange(1, 250) for _ in range(40)]]

    @classmethod
    @cache
    def _plain_texts(cls, kind: str) -> list[list[int]]:
        """Of all prompts without the drafter, once for any number of candidates."""
        suite = cls()
        with TemporaryDirectory() as folder:
            rig = suite._rig(Path(folder), 0)
            return rig.generate(*suite._prompts(), max_tokens=30, params=KINDS[kind])

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("nodes", [1, 5, 12])
    def test_texts_are_those_of_plain_decoding(self, tmp_path: Path, kind: str, nodes: int) -> None:
        rig = self._rig(tmp_path, nodes)
        drafted = rig.generate(*self._prompts(), max_tokens=30, params=KINDS[kind])
        assert drafted == self._plain_texts(kind)

    @pytest.mark.parametrize("nodes", [1, 5, 12])
    def test_every_proposal_is_a_tree_within_its_capacity(self, tmp_path: Path, nodes: int) -> None:
        rig = self._rig(tmp_path, nodes)
        (drafter,) = rig.pipeline.drafters
        vocab = rig.pipeline.target.backend.spec.vocab
        propose = drafter.propose
        problems: list[str] = []

        def watched(round: Round) -> TokenTree:
            tree = propose(round)
            if int(tree.count.max()) > round.capacity:
                problems.append(f"{int(tree.count.max())} nodes where {round.capacity} were asked for")
            problems.extend(found for one in read_tree(tree, 0) if (found := check_tree(one, vocab)))
            return tree

        drafter.propose = watched  # type: ignore[method-assign]
        for prompt in self._prompts():
            rig.submit(prompt, 20)
        rig.run()
        assert not problems, problems[:3]

    def test_a_slot_taken_again_owes_nothing_to_the_sequence_before(self, tmp_path: Path) -> None:
        plain, drafted = self._rig(tmp_path, 0), self._rig(tmp_path, 5)
        for _ in range(2):
            for prompt in self._prompts():
                assert drafted.generate(prompt, max_tokens=12) == plain.generate(prompt, max_tokens=12)
