"""What a long prompt allocates, what a long text keeps, and spans in which rows see each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attrs import evolve
from torch.utils._python_dispatch import TorchDispatchMode

from luce_core.model.batch import make_batch
from luce_core.ops.pages import SCORE_ELEMENTS
from luce_core.testing.gguf_factory import write_gguf
from luce_core.testing.rig import ModelRig

from .hugging_face import metadata_of, random_model, tensors_of

FIXTURES = Path(__file__).parent / "fixtures"
HOOKS = "luce_arch_gemma.hooks"
NAMES = ["tiny-gemma3", "tiny-gemma4", "tiny-gemma4e", "tiny-gemma4moe"]


class Largest(TorchDispatchMode):
    """The most elements any tensor had that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(one, torch.Tensor) and not one._is_view():
                self.elements = max(self.elements, one.numel())
        return made


def test_a_long_prompt_makes_neither_a_square_mask_nor_all_logits(tmp_path):
    """4200 tokens at once: a mask of all pairs has 17.6 M elements, the scores of two heads twice as many."""
    changes = {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_size_per_layer_input": 8,
        "vocab_size": 5000,
        "vocab_size_per_layer_input": 5000,
    }
    config, model = random_model("gemma4", changes)
    path = write_gguf(tmp_path / "m.gguf", metadata_of("gemma4", config), tensors_of("gemma4", config, model))
    rig = ModelRig(path, HOOKS, block_tokens=64, num_slots=1)
    seq = rig.open()
    batch = make_batch("prefill", [rig._rows(seq, [row % 5000 for row in range(4200)])])
    assert SCORE_ELEMENTS < 4200 * 4200
    with Largest() as largest:
        result = rig.backend.forward(batch)
    assert result.logits is None
    assert largest.elements <= SCORE_ELEMENTS


@pytest.mark.parametrize("name", NAMES)
def test_a_long_text_keeps_its_window_and_no_more_in_local_layers(name):
    """Window 24, blocks of 8 tokens: what the next row sees lies in at most four blocks."""
    rig = ModelRig(FIXTURES / f"{name}.gguf", HOOKS)
    seq = rig.open()
    for start in range(0, 400, 20):
        rig.prefill({seq: [start % 300] * 20})
    kept = {group: len(table.blocks) for group, table in rig.blocks.tables(seq).items()}
    assert kept["target/full"] == 50
    assert kept["target/window.24"] <= 4


def masks(spans, window, local_both_ways, whole_both_ways):
    """Additive masks [1, 1, T, T], as Hugging Face's eager attention takes them, from the definition."""
    index = torch.arange(len(spans))
    causal = index[None] <= index[:, None]
    near = index[None] > index[:, None] - window
    same = (spans[None] == spans[:, None]) & (spans[None] >= 0)
    whole = causal | same if whole_both_ways else causal
    local = (causal | same if local_both_ways else causal) & near
    return {
        kind: torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]
        for kind, mask in (("full_attention", whole), ("sliding_attention", local))
    }


@pytest.mark.parametrize(
    ("arch", "changes", "local", "whole"),
    [
        ("gemma3", {}, True, True),
        ("gemma4", {}, True, False),
        ("gemma4", {"hidden_size_per_layer_input": 8}, False, False),
    ],
)
def test_rows_of_an_image_see_each_other_where_the_family_says(arch, changes, local, whole, tmp_path):
    config, model = random_model(arch, changes)
    ids = torch.randint(0, 101, (50,), generator=torch.Generator().manual_seed(3))
    spans = torch.full((50,), -1)
    spans[5:14], spans[30:45] = 0, 1
    with torch.no_grad():
        want = model(ids[None], attention_mask=masks(spans, 24, local, whole)).logits[0]
        causal = model(ids[None]).logits[0]
    path = write_gguf(tmp_path / "m.gguf", metadata_of(arch, config), tensors_of(arch, config, model))
    rig = ModelRig(path, HOOKS)
    seq = rig.open()
    rows = evolve(rig._rows(seq, ids.tolist()), wanted=range(50))
    batch = evolve(make_batch("prefill", [rows]), span=spans.to(torch.int32))
    got = rig.backend.head(rig.backend.forward(batch).final)
    assert float((got - want).abs().max()) <= 2e-5 * float(want.abs().max())
    assert (float((causal - want).abs().max()) > 0.1) == (local or whole)
