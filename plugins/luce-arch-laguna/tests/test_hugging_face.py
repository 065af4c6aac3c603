"""Random Hugging Face models as a second oracle: shapes and kinds of layers the fixture does not have."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from luce_core.testing.gguf_factory import write_gguf
from luce_core.testing.rig import ModelRig

from .hugging_face import LOCAL, NO_WINDOW, WHOLE, metadata_of, random_model, ropes, tensors_of, written

HOOKS = "luce_arch_laguna.hooks"
TOLERANCE = 2e-5
CASES = {
    "as XS 2.1": {},
    "a gate per feature": {"gating": "per-element"},
    "no window": NO_WINDOW,
    "narrow window": {"sliding_window": 2},
    "window beyond the text": {"sliding_window": 100},
    "equal heads": {"num_attention_heads_per_layer": [4] * 6},
    "one key head": {"num_key_value_heads": 1, "num_attention_heads_per_layer": [3, 5, 5, 5, 3, 5]},
    "as many key heads": {"num_key_value_heads": 4, "num_attention_heads_per_layer": [4] * 6},
    "wide heads": {"head_dim": 32},
    "a quarter of the pairs turns": {"head_dim": 32, **ropes({"partial_rotary_factor": 0.25})},
    "half of the pairs turns in windows": ropes(local={"partial_rotary_factor": 0.5, "rope_theta": 3e4}),
    "no yarn": ropes({"rope_type": "default"}),
    "yarn with a factor on cos and sin": ropes({"attention_factor": 1.3}),
    "yarn with other ends": ropes({"beta_fast": 64.0, "beta_slow": 2.0, "factor": 32.0}),
    "13 experts, one used": {"num_experts": 13, "num_experts_per_tok": 1},
    "every expert used": {"num_experts": 5, "num_experts_per_tok": 5},
    "another scale": {"moe_routed_scaling_factor": 0.7},
    "three dense layers": {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 3},
    "dense throughout": {"mlp_layer_types": ["dense"] * 6},
    "capped router": {"moe_router_logit_softcapping": 0.8},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True},
}


def logits_of(model, ids):
    with torch.no_grad():
        return model(ids[None]).logits[0]


def assert_close(got, want):
    worst = float((got - want).abs().max() / want.abs().max())
    assert worst <= TOLERANCE, f"logits differ by {worst:.2g} of the largest"


def text_for(config, length=70):
    return torch.randint(0, config.vocab_size, (length,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_hugging_face(name, tmp_path: Path):
    config, model = random_model(CASES[name])
    ids = text_for(config)
    want = logits_of(model, ids)
    rig = ModelRig(written(tmp_path / "tiny.gguf", config, model), HOOKS)
    assert_close(rig.fresh(ids.tolist()), want)
    seq = rig.open()
    rig.prefill({seq: ids[:40].tolist()})
    rig.prefill({seq: ids[40:64].tolist()})
    assert_close(torch.stack([rig.decode(seq, token) for token in ids[64:].tolist()]), want[64:])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("laguna.rope.scaling.yarn_attn_factor", 1.0),  # what old converters wrote for none
        ("laguna.rope.scaling.yarn_ext_factor", 64.0),  # seen in the wild
        ("laguna.expert_gating_func", None),
        ("laguna.expert_weights_norm", None),
        ("laguna.rope.freq_base_swa", None),
        ("laguna.rope.dimension_count_swa", None),
        ("laguna.attention.value_length", None),
        ("laguna.expert_shared_count", 1),
        ("laguna.attention.sliding_window_pattern", 4),
        ("laguna.attention.sliding_window_pattern", [False, True, True, True, False, True]),
    ],
)
def test_keys_that_change_nothing(key, value, tmp_path: Path):
    config, model = random_model({})
    ids = text_for(config)
    path = written(tmp_path / "keys.gguf", config, model, metadata={key: value})
    assert_close(ModelRig(path, HOOKS).fresh(ids.tolist()), logits_of(model, ids))


@pytest.mark.parametrize("pattern", [[True, True, False, False, True, False], 2])
def test_a_pattern_in_the_file_is_followed(pattern, tmp_path: Path):
    local = pattern if isinstance(pattern, list) else [False, True] * 3
    config, model = random_model({"layer_types": [LOCAL if one else WHOLE for one in local]})
    ids = text_for(config)
    keys = {"laguna.attention.sliding_window_pattern": pattern}
    path = written(tmp_path / "p.gguf", config, model, metadata=keys)
    assert_close(ModelRig(path, HOOKS).fresh(ids.tolist()), logits_of(model, ids))


def test_a_shared_expert_is_as_wide_as_the_others_where_no_key_says_so(tmp_path: Path):
    config, model = random_model({"shared_expert_intermediate_size": 20})
    ids = text_for(config)
    keys = {"laguna.expert_shared_feed_forward_length": None}
    path = written(tmp_path / "s.gguf", config, model, metadata=keys)
    assert_close(ModelRig(path, HOOKS).fresh(ids.tolist()), logits_of(model, ids))


def test_experts_in_one_stack_are_the_same_model(tmp_path: Path):
    config, model = random_model({})
    ids = text_for(config)
    tensors = tensors_of(config, model)
    for layer in range(1, config.num_hidden_layers):
        parts = [tensors.pop(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up")]
        tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(parts, 1)
    path = write_gguf(tmp_path / "one.gguf", metadata_of(config), tensors)
    assert_close(ModelRig(path, HOOKS).fresh(ids.tolist()), logits_of(model, ids))


def test_quantized_files_equal_hugging_face_on_the_dequantized_numbers(tmp_path: Path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    config, model = random_model({**sizes, "shared_expert_intermediate_size": 64})
    tensors = tensors_of(config, model)
    quant = {key: "Q8_0" for key, value in tensors.items() if value.ndim > 1 and "gate_inp" not in key}
    path = write_gguf(tmp_path / "q8.gguf", metadata_of(config), tensors, quant=quant)
    kind = gguf.GGMLQuantizationType.Q8_0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not name.endswith("mlp.gate.weight"):
                stored = gguf.quants.quantize(np.ascontiguousarray(parameter.numpy()), kind)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(stored, kind)))
    ids = text_for(config)
    assert_close(ModelRig(path, HOOKS).fresh(ids.tolist()), logits_of(model, ids))
