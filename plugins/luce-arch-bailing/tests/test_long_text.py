"""What a long prompt allocates."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from luce_core.model.batch import make_batch
from luce_core.ops.pages import SCORE_ELEMENTS
from luce_core.testing.rig import ModelRig

from .hugging_face import random_model, written

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
    """A mask of all pairs has 17.6 M elements, all logits 21 M, all experts' hidden rows 25 M."""
    changes = {
        "num_hidden_layers": 2,
        "layer_group_size": 2,
        "num_attention_heads": 2,
        "vocab_size": 5000,
        "num_local_experts": 250,
        "n_group": 1,
    }
    path = written(tmp_path / "m.gguf", *random_model(changes))
    rig = ModelRig(path, "luce_arch_bailing.hooks", block_tokens=64, num_slots=1)
    batch = make_batch("prefill", [rig._rows(rig.open(), [row % 5000 for row in range(TOKENS)])])
    with Largest() as largest:
        result = rig.backend.forward(batch)
    assert result.logits is None
    assert SCORE_ELEMENTS < TOKENS * TOKENS
    assert largest.elements <= SCORE_ELEMENTS
