"""What a long prompt allocates, and what a long text keeps."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from luce_core.model.batch import make_batch
from luce_core.ops.pages import SCORE_ELEMENTS
from luce_core.testing.rig import ModelRig

from . import models_v41 as v41
from .hugging_face import ALL, SELECTED, random_model, written
from .models_v41 import BASE, CANDIDATES, streams

TOKENS = 4200


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
    """Scores of all tokens and entries would have 70 M elements for the indexer's 16 heads, logits 21 M."""
    changes = {
        "num_hidden_layers": 2,
        "layer_types": [SELECTED, ALL],
        "compress_rates": {SELECTED: 4, ALL: 128},
        "num_attention_heads": 2,
        "vocab_size": 5000,
    }
    assert SCORE_ELEMENTS < TOKENS * TOKENS
    assert largest_of_prefill(written(tmp_path / "m.gguf", *random_model(changes))) <= SCORE_ELEMENTS


def largest_of_prefill(path):
    torch.set_num_threads(1)
    rig = ModelRig(path, "luce_arch_deepseek4.hooks", block_tokens=128, num_slots=1, num_blocks=36)
    batch = make_batch("prefill", [rig._rows(rig.open(), [row % 5000 for row in range(TOKENS)])])
    with Largest() as largest:
        result = rig.backend.forward(batch)
    assert result.logits is None
    return largest.elements


def test_an_entry_per_token_makes_no_square_either(tmp_path):
    """V4.1: scores of the indexer's heads, of blocks, of those within candidates."""
    keys = BASE | streams([1, 1], (0,), (1,), 0, **CANDIDATES)
    keys |= {"vocab_size": 5000, "attention.head_count": 2, "attention.indexer.head_count": 4}
    path = v41.written(tmp_path / "m.gguf", keys, v41.random_tensors(keys))
    assert largest_of_prefill(path) <= SCORE_ELEMENTS


def test_a_long_text_keeps_its_window_and_all_entries(tmp_path):
    """Window 6, blocks of 8 tokens: a chunk of 20 tokens and the five before it lie in at most four."""
    torch.set_num_threads(1)
    rig = ModelRig(written(tmp_path / "m.gguf", *random_model({})), "luce_arch_deepseek4.hooks")
    seq = rig.open()
    for start in range(0, 200, 20):
        rig.prefill({seq: [start % 61] * 20})
    kept = {group: len(table.blocks) for group, table in rig.blocks.tables(seq).items()}
    assert kept["target/every.4"] == kept["target/every.8"] == 25
    assert kept["target/near"] <= 4
