"""Random Hugging Face models as a second oracle: shapes the fixtures do not have.

They run token by token with their cache: in one shot Hugging Face is ten times farther from float64.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from luce_core.testing.gguf_factory import write_gguf
from luce_core.testing.rig import ModelRig

from .hugging_face import metadata_of, random_model, tensors_of, written

HOOKS = "luce_arch_bailing.hooks"
TOLERANCE = 1e-4
"""As a share of the largest logit."""
CASES = {
    "one matrix of queries": {},
    "two matrices of queries": {"q_lora_rank": 28},
    "one group, no renorm": {"n_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.5},
    "every group kept": {"topk_group": 2, "num_experts_per_tok": 5},
    "dense throughout": {"first_k_dense_replace": 3},
    "no dense layer, two shared experts": {"first_k_dense_replace": 0, "n_shared_experts": 2},
    "wide values": {"v_head_dim": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "rope_theta": 1e4},
    "short convolution, weak decay": {"short_conv_kernel_size": 2, "kda_lower_bound": -1.0},
    "attention in every layer": {"layer_group_size": 1, "num_attention_heads": 5},
    "three of four layers without positions": {"num_hidden_layers": 4, "layer_group_size": 4, "head_dim": 20},
}


def logits_of(model, ids):
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        rows = [model(token.view(1, 1), cache=cache, use_cache=True).logits[0, 0] for token in ids]
    return torch.stack(rows)


def assert_close(got, want):
    worst = float((got - want).abs().max() / want.abs().max())
    assert worst <= TOLERANCE, f"logits differ by {worst:.2g} of the largest"


def text_for(config, length=70):
    return torch.randint(0, config.vocab_size, (length,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_hugging_face(name, tmp_path):
    config, model = random_model(CASES[name])
    ids = text_for(config)
    want = logits_of(model, ids)
    rig = ModelRig(written(tmp_path / "tiny.gguf", config, model), HOOKS)
    assert_close(rig.fresh(ids.tolist()), want)
    seq = rig.open()
    rig.prefill({seq: ids[:64].tolist()})
    assert_close(torch.stack([rig.decode(seq, token) for token in ids[64:].tolist()]), want[64:])


def test_files_written_otherwise_are_the_same_model(tmp_path):
    """Dimensions of 1 dropped, gate and up of experts in one stack, a block that predicts further tokens."""
    config, model = random_model({})
    ids = text_for(config, 20)
    tensors, keys = tensors_of(config, model), metadata_of(config)
    want = ModelRig(write_gguf(tmp_path / "a.gguf", keys, tensors), HOOKS)
    for name in list(tensors):
        if "conv1d" in name or name.endswith("ssm_a"):
            tensors[name] = np.ascontiguousarray(np.squeeze(tensors[name]))
        if name.endswith("ffn_gate_exps.weight"):
            parts = (tensors.pop(name), tensors.pop(name.replace("gate", "up")))
            tensors[name.replace("gate", "gate_up")] = np.concatenate(parts, 1)
    tensors["blk.3.nextn.eh_proj.weight"] = np.ones((40, 80), np.float32)
    keys |= {"bailingmoe3.block_count": 4, "bailingmoe3.nextn_predict_layers": 1}
    keys["bailingmoe3.attention.head_count_kv"] = [0, 0, 1, 1]
    got = ModelRig(write_gguf(tmp_path / "b.gguf", keys, tensors), HOOKS)
    assert_close(got.fresh(ids.tolist()), want.fresh(ids.tolist()))
    sizes = [(s.num_layers, s.parameters, s.weight_bytes, s.active_bytes) for s in (got.spec, want.spec)]
    assert sizes[0] == sizes[1]
