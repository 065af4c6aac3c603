"""What a long prompt allocates, and what a long text keeps."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from luce_core.model.batch import make_batch
from luce_core.ops.pages import SCORE_ELEMENTS
from luce_core.testing.rig import ModelRig

from .hugging_face import LOCAL, WHOLE, random_model, written

FIXTURES = Path(__file__).parent / "fixtures"
HOOKS = "luce_arch_laguna.hooks"


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
    """4200 tokens at once: a mask of all pairs has 17.6 M elements, all logits 21 M."""
    changes = {
        "num_hidden_layers": 2,
        "num_attention_heads_per_layer": [2, 2],
        "num_key_value_heads": 1,
        "layer_types": [WHOLE, LOCAL],
        "vocab_size": 5000,
        "max_position_embeddings": 8192,
    }
    config, model = random_model(changes)
    rig = ModelRig(written(tmp_path / "m.gguf", config, model), HOOKS, block_tokens=64, num_slots=1)
    batch = make_batch("prefill", [rig._rows(rig.open(), [row % 5000 for row in range(4200)])])
    assert SCORE_ELEMENTS < 4200 * 4200
    with Largest() as largest:
        result = rig.backend.forward(batch)
    assert result.logits is None
    assert largest.elements <= SCORE_ELEMENTS


def test_a_long_text_keeps_its_window_and_no_more():
    """Window 5, blocks of 8 tokens: what the next row sees lies in at most two blocks."""
    rig = ModelRig(FIXTURES / "tiny-laguna.gguf", HOOKS)
    seq = rig.open()
    for start in range(0, 400, 20):
        rig.prefill({seq: [start % 100] * 20})
    kept = {group: len(table.blocks) for group, table in rig.blocks.tables(seq).items()}
    assert kept["target/full"] == 50
    assert kept["target/window.5"] <= 2
