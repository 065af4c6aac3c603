"""Random Hugging Face models as a second oracle: shapes and ratios the fixture does not have."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from luce_core.errors import ModelFormatError
from luce_core.testing.gguf_factory import write_gguf
from luce_core.testing.rig import ModelRig

from .hugging_face import ALL, NEAR, SELECTED, metadata_of, random_model, tensors_of, written

HOOKS = "luce_arch_deepseek4.hooks"
TOLERANCE = 2e-5
"""As a share of the largest logit."""
YARN = {
    "rope_type": "yarn",
    "rope_theta": 16e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "attention_factor": 1.0,
    "partial_rotary_factor": 0.25,
}
CASES = {
    "a window alone": {"layer_types": [NEAR] * 3},
    "picked entries": {"layer_types": [SELECTED] * 3},
    "every entry": {"layer_types": [ALL] * 3, "compress_rates": {SELECTED: 4, ALL: 5}},
    "more entries picked than there are": {"layer_types": [NEAR, SELECTED, SELECTED], "index_topk": 40},
    "window beyond the text": {"sliding_window": 100},
    "one row in the window": {"sliding_window": 1},
    "yarn behind the window": {
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
            "compress": YARN,
        }
    },
    "two streams, three iterations": {"hc_mult": 2, "hc_sinkhorn_iters": 3},
    "one group of heads": {"o_groups": 1, "num_attention_heads": 3},
    "ids choose all experts": {"num_hash_layers": 3, "num_experts_per_tok": 2},
    "ids choose none": {"num_hash_layers": 0, "num_experts_per_tok": 1, "routed_scaling_factor": 2.5},
    "wide limits": {"swiglu_limit": 10.0},
}


def logits_of(model, ids):
    with torch.no_grad():
        return model(ids[None]).logits[0]


def assert_close(got, want):
    worst = float((got - want).abs().max() / want.abs().max())
    assert worst <= TOLERANCE, f"logits differ by {worst:.2g} of the largest"


def text_for(config, length=60):
    return torch.randint(0, config.vocab_size, (length,), generator=torch.Generator().manual_seed(1))


def rig_of(path, block_tokens=8):
    torch.set_num_threads(1)
    return ModelRig(path, HOOKS, block_tokens=block_tokens)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_hugging_face(name, tmp_path):
    config, model = random_model(CASES[name])
    ids = text_for(config)
    want = logits_of(model, ids)
    rig = rig_of(written(tmp_path / "tiny.gguf", config, model), 20 if name == "every entry" else 8)
    assert_close(rig.fresh(ids.tolist()), want)
    seq = rig.open()
    rig.prefill({seq: ids[:33].tolist()})
    rig.prefill({seq: ids[33:50].tolist()})
    assert_close(torch.stack([rig.decode(seq, token) for token in ids[50:].tolist()]), want[50:])


def test_files_written_otherwise_are_the_same_model(tmp_path):
    """Gate and up of experts in one stack, limits of the shared expert said, a width per layer, blocks that
    predict further tokens; and their key alone.
    """
    config, model = random_model({})
    ids = text_for(config, 20).tolist()
    tensors, keys = tensors_of(model), metadata_of(config)
    want = rig_of(write_gguf(tmp_path / "a.gguf", keys, tensors)).fresh(ids)
    alone = write_gguf(tmp_path / "b.gguf", keys | {"deepseek4.nextn_predict_layers": 1}, tensors)
    assert torch.equal(rig_of(alone).fresh(ids), want)
    for name in [name for name in tensors if name.endswith("ffn_gate_exps.weight")]:
        parts = (tensors.pop(name), tensors.pop(name.replace("gate", "up")))
        tensors[name.replace("gate", "gate_up")] = np.concatenate(parts, 1)
    tensors["blk.3.nextn.eh_proj.weight"] = np.ones((48, 96), np.float32)
    keys |= {"deepseek4.block_count": 4, "deepseek4.nextn_predict_layers": 1}
    keys |= {"deepseek4.expert_feed_forward_length": [24] * 4, "deepseek4.swiglu_clamp_shexp": [0.5] * 4}
    keys["deepseek4.attention.compress_ratios"] = [0, 4, 8, 0]
    rig = rig_of(write_gguf(tmp_path / "c.gguf", keys, tensors))
    assert rig.spec.num_layers == 3
    assert_close(rig.fresh(ids), want)


def test_experts_that_do_not_exist_are_refused(tmp_path):
    config, model = random_model({})
    tensors = tensors_of(model)
    tensors["blk.0.ffn_gate_tid2eid.weight"][5, 1] = 8
    path = write_gguf(tmp_path / "m.gguf", metadata_of(config), tensors)
    with pytest.raises(ModelFormatError, match=r"'blk.0.ffn_gate_tid2eid.weight' names experts 0 to 8"):
        rig_of(path)
