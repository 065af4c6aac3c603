"""What a long prompt allocates, what a long text remembers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from luce_core.model.batch import make_batch
from luce_core.ops.pages import SCORE_ELEMENTS
from luce_core.testing.rig import ModelRig

from .hugging_face import random_model, written
from .reference import Reference

FIXTURES = Path(__file__).parent / "fixtures"
HOOKS = "luce_arch_qwen35.hooks"


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
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "linear_num_value_heads": 2,
        "num_experts": 4,
        "vocab_size": 5000,
    }
    path = written(tmp_path / "m.gguf", random_model("qwen35moe", changes))
    rig = ModelRig(path, HOOKS, block_tokens=64, num_slots=1)
    seq = rig.open()
    batch = make_batch("prefill", [rig._rows(seq, [row % 5000 for row in range(4200)])], axes=3)
    assert SCORE_ELEMENTS < 4200 * 4200
    with Largest() as largest:
        result = rig.backend.forward(batch)
    assert result.logits is None
    assert largest.elements <= SCORE_ELEMENTS


@pytest.mark.parametrize("name", ["tiny-qwen35", "tiny-qwen35moe"])
def test_what_was_said_long_ago_is_remembered_as_by_the_recurrence(name):
    """300 tokens in chunks of odd sizes against the plain recurrence in float64."""
    ids = torch.randint(0, 300, (300,), generator=torch.Generator().manual_seed(4))
    path = FIXTURES / f"{name}.gguf"
    want = Reference(path).logits(ids)
    rig, got, at = ModelRig(path, HOOKS), [], 0
    seq = rig.open()
    for count in (1, 130, 63, 64, 5, 37):
        got.append(rig.prefill({seq: ids[at : at + count].tolist()})[seq])
        at += count
    assert at == 300
    assert float((torch.cat(got) - want).abs().max()) <= 5e-5 * float(want.abs().max())


def test_rows_verified_at_once_and_rolled_back_are_those_of_the_recurrence():
    """Eight rows held, one, three or all accepted: the state is made from the log, then goes on."""
    ids = torch.randint(0, 300, (60,), generator=torch.Generator().manual_seed(6))
    path = FIXTURES / "tiny-qwen35.gguf"
    want = Reference(path).logits(ids)
    for accepted in (0, 1, 3, 8):
        rig = ModelRig(path, HOOKS)
        seq = rig.open()
        rig.prefill({seq: ids[:40].tolist()})
        held = rig.hold({seq: ids[40:48].tolist()})
        got = [held.logits[0][:accepted]]
        rig.commit(held, [list(range(accepted))])
        got += [rig.decode(seq, token)[None] for token in ids[40 + accepted : 52].tolist()]
        got.append(rig.prefill({seq: ids[52:].tolist()})[seq])
        found = torch.cat(got)
        assert float((found - want[40:]).abs().max()) <= 5e-5 * float(want.abs().max()), accepted
