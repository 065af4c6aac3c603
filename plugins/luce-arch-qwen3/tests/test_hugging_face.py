"""Random Hugging Face models as a second oracle: shapes and scalings the fixtures do not have."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from luce_core.testing.gguf_factory import write_gguf
from luce_core.testing.rig import ModelRig

from .hugging_face import metadata_of, random_model, tensors_of, written

HOOKS = "luce_arch_qwen3.hooks"
TOLERANCE = 2e-5
YARN = {"rope_type": "yarn", "rope_theta": 1e5, "factor": 4.0, "original_max_position_embeddings": 32}
CASES = {
    "as many key heads": ("qwen3", {"num_key_value_heads": 6}),
    "one key head": ("qwen3", {"num_key_value_heads": 1}),
    "heads of width / heads": ("qwen3", {"head_dim": 8}),
    "wide heads": ("qwen3", {"head_dim": 64, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "biases": ("qwen3", {"attention_bias": True}),
    "linear rope": (
        "qwen3",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}},
    ),
    "yarn": ("qwen3", {"rope_parameters": YARN}),
    "another epsilon": ("qwen3", {"rms_norm_eps": 1e-2}),
    "7 experts": ("qwen3moe", {}),
    "13 experts, one used": ("qwen3moe", {"num_experts": 13, "num_experts_per_tok": 1}),
    "every expert used": ("qwen3moe", {"num_experts": 5, "num_experts_per_tok": 5}),
    "64 narrow experts": (
        "qwen3moe",
        {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 3},
    ),
    "experts, tied, biases, yarn": (
        "qwen3moe",
        {"tie_word_embeddings": True, "attention_bias": True, "rope_parameters": YARN},
    ),
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
    arch, changes = CASES[name]
    config, model = random_model(arch, changes)
    ids = text_for(config)
    want = logits_of(model, ids)
    rig = ModelRig(written(tmp_path / "tiny.gguf", config, model), HOOKS)
    assert_close(rig.fresh(ids.tolist()), want)
    seq = rig.open()
    rig.prefill({seq: ids[:40].tolist()})
    rig.prefill({seq: ids[40:64].tolist()})
    assert_close(torch.stack([rig.decode(seq, token) for token in ids[64:].tolist()]), want[64:])


@pytest.mark.parametrize("name", ["biases", "experts, tied, biases, yarn"])
def test_fused_matrices_are_the_same_model(name, tmp_path: Path):
    arch, changes = CASES[name]
    config, model = random_model(arch, changes)
    ids = text_for(config)
    tensors = tensors_of(config, model)
    for layer in range(config.num_hidden_layers):
        blk = f"blk.{layer}."
        for kind in ("weight", "bias"):
            tensors[f"{blk}attn_qkv.{kind}"] = np.concatenate(
                [tensors.pop(f"{blk}attn_{part}.{kind}") for part in "qkv"]
            )
        if arch == "qwen3moe":
            gate_up = [tensors.pop(f"{blk}ffn_{part}_exps.weight") for part in ("gate", "up")]
            tensors[f"{blk}ffn_gate_up_exps.weight"] = np.concatenate(gate_up, 1)
    path = write_gguf(tmp_path / "fused.gguf", metadata_of(config), tensors)
    assert_close(ModelRig(path, HOOKS).fresh(ids.tolist()), logits_of(model, ids))


def test_without_a_key_experts_together_are_as_wide_as_the_dense_mlp(tmp_path: Path):
    config, model = random_model("qwen3moe", {"moe_intermediate_size": 80 // 3})
    ids = text_for(config)
    metadata = metadata_of(config)
    del metadata["qwen3moe.expert_feed_forward_length"]
    path = write_gguf(tmp_path / "old.gguf", metadata, tensors_of(config, model))
    assert_close(ModelRig(path, HOOKS).fresh(ids.tolist()), logits_of(model, ids))


@pytest.mark.parametrize("arch", ["qwen3", "qwen3moe"])
def test_quantized_files_equal_hugging_face_on_the_dequantized_numbers(arch, tmp_path: Path):
    config, model = random_model(
        arch, {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    )
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
