"""Random Hugging Face models as a second oracle: shapes and kinds of layers the fixtures do not have."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from luce_core.errors import ModelFormatError
from luce_core.testing.gguf_factory import write_gguf
from luce_core.testing.rig import ModelRig

from .hugging_face import PROPORTIONAL, metadata_of, random_model, tensors_of, written

HOOKS = "luce_arch_gemma.hooks"
TOLERANCE = 2e-5
LOCAL, WHOLE = "sliding_attention", "full_attention"
SHARING = {
    "num_hidden_layers": 7,
    "num_kv_shared_layers": 3,
    "layer_types": [LOCAL, LOCAL, WHOLE, LOCAL, WHOLE, LOCAL, WHOLE],
}
EXPERTS = {"enable_moe_block": True, "num_experts": 7, "top_k_experts": 3, "moe_intermediate_size": 20}
E_MODEL = {
    **SHARING,
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
    "hidden_size_per_layer_input": 12,
    "use_double_wide_mlp": True,
}


def ropes(whole, local=1e4):
    return {"rope_parameters": {WHOLE: whole, LOCAL: {"rope_type": "default", "rope_theta": local}}}


PLAIN = {"rope_type": "default", "rope_theta": 1e6}
CASES = {
    "one key head, wide heads": (
        "gemma3",
        {"num_key_value_heads": 1, "head_dim": 32, "query_pre_attn_scalar": 32},
    ),
    "as many key heads": ("gemma3", {"num_key_value_heads": 4}),
    "narrow window": ("gemma3", {"sliding_window": 3}),
    "window beyond the text": ("gemma3", {"sliding_window": 100}),
    "two global layers": ("gemma3", {"num_hidden_layers": 13}),
    "linear scaling of global layers": (
        "gemma3",
        ropes({"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}),
    ),
    "another local base": ("gemma3", ropes(PLAIN, 5e3)),
    "soft cap": ("gemma3", {"final_logit_softcapping": 7.0}),
    "K = V": ("gemma4", {}),
    "K = V, several heads": (
        "gemma4",
        {"num_attention_heads": 6, "num_key_value_heads": 3, "num_global_key_value_heads": 2},
    ),
    "K = V in every second layer": ("gemma4", {"layer_types": [LOCAL, WHOLE] * 3, "sliding_window": 5}),
    "values of their own": ("gemma4", {"attention_k_eq_v": False, "num_global_key_value_heads": None}),
    "narrow global heads": ("gemma4", {"head_dim": 24, "global_head_dim": 8, "sliding_window": 11}),
    "half of the pairs turn": ("gemma4", ropes({**PROPORTIONAL, "partial_rotary_factor": 0.5}, 3e4)),
    "7 experts": ("gemma4", EXPERTS),
    "13 experts, one used": ("gemma4", {**EXPERTS, "num_experts": 13, "top_k_experts": 1}),
    "every expert used": ("gemma4", {**EXPERTS, "num_experts": 5, "top_k_experts": 5}),
    "per-layer inputs, shared keys": ("gemma4", E_MODEL),
    "per-layer inputs alone": ("gemma4", {"hidden_size_per_layer_input": 8}),
    "shared keys, K = V": ("gemma4", SHARING),
    "everything at once": ("gemma4", {**SHARING, **EXPERTS, "hidden_size_per_layer_input": 10}),
}


def logits_of(model, ids):
    rows = torch.arange(len(ids))  # transformers 5.24 fails on `0`, all rows, for shared keys without inputs
    with torch.no_grad():
        return model(ids[None], logits_to_keep=rows).logits[0]


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
    rig = ModelRig(written(tmp_path / "tiny.gguf", arch, config, model), HOOKS)
    assert_close(rig.fresh(ids.tolist()), want)
    seq = rig.open()
    rig.prefill({seq: ids[:40].tolist()})
    rig.prefill({seq: ids[40:64].tolist()})
    assert_close(torch.stack([rig.decode(seq, token) for token in ids[64:].tolist()]), want[64:])


def test_keys_older_files_lack_mean_what_they_always_meant(tmp_path: Path):
    """No pattern: every sixth layer is global. No local base: 10000. No value length: that of keys."""
    config, model = random_model("gemma3", {"num_hidden_layers": 7})
    ids = text_for(config)
    absent = ("rope.freq_base_swa", "attention.value_length")
    path = written(
        tmp_path / "old.gguf", "gemma3", config, model, metadata={f"gemma3.{k}": None for k in absent}
    )
    assert_close(ModelRig(path, HOOKS).fresh(ids.tolist()), logits_of(model, ids))


@pytest.mark.parametrize("pattern", [[True, False, True, True, False, False], 2])
def test_a_pattern_in_the_file_is_followed(pattern, tmp_path: Path):
    local = pattern if isinstance(pattern, list) else [True, False] * 3
    config, model = random_model("gemma3", {"layer_types": [LOCAL if one else WHOLE for one in local]})
    ids = text_for(config)
    keys = {"gemma3.attention.sliding_window_pattern": pattern}
    path = written(tmp_path / "p.gguf", "gemma3", config, model, metadata=keys)
    assert_close(ModelRig(path, HOOKS).fresh(ids.tolist()), logits_of(model, ids))


def test_without_a_window_every_layer_is_global(tmp_path: Path):
    config, model = random_model("gemma3", {"layer_types": [WHOLE] * 6})
    ids = text_for(config)
    keys = {"gemma3.attention.sliding_window": None}
    rig = ModelRig(written(tmp_path / "w.gguf", "gemma3", config, model, metadata=keys), HOOKS)
    assert [group.window for group in rig.spec.layout.groups] == [None]
    assert_close(rig.fresh(ids.tolist()), logits_of(model, ids))


def test_the_27b_scales_its_attention_by_width_over_heads(tmp_path: Path):
    """62 layers: what no key says. Here width / heads is 6 and the head dimension 8."""
    changes = {
        "num_hidden_layers": 62,
        "hidden_size": 24,
        "intermediate_size": 16,
        "head_dim": 8,
        "query_pre_attn_scalar": 6,
    }
    config, model = random_model("gemma3", changes)
    ids = text_for(config, 30)
    rig = ModelRig(written(tmp_path / "deep.gguf", "gemma3", config, model), HOOKS)
    assert_close(rig.fresh(ids.tolist()), logits_of(model, ids))


def test_a_head_of_its_own_is_used(tmp_path: Path):
    config, model = random_model("gemma3", {"tie_word_embeddings": False})
    ids = text_for(config)
    tensors = tensors_of("gemma3", config, model)
    tensors["output.weight"] = model.lm_head.weight.detach().numpy()
    assert not np.array_equal(tensors["output.weight"], tensors["token_embd.weight"])
    path = write_gguf(tmp_path / "untied.gguf", metadata_of("gemma3", config), tensors)
    assert_close(ModelRig(path, HOOKS).fresh(ids.tolist()), logits_of(model, ids))


def test_experts_in_two_stacks_are_the_same_model(tmp_path: Path):
    config, model = random_model("gemma4", EXPERTS)
    ids = text_for(config)
    tensors = tensors_of("gemma4", config, model)
    for layer in range(config.num_hidden_layers):
        fused = tensors.pop(f"blk.{layer}.ffn_gate_up_exps.weight")
        half = fused.shape[1] // 2
        for name, part in (("gate", fused[:, :half]), ("up", fused[:, half:])):
            tensors[f"blk.{layer}.ffn_{name}_exps.weight"] = np.ascontiguousarray(part)
    path = write_gguf(tmp_path / "two.gguf", metadata_of("gemma4", config), tensors)
    assert_close(ModelRig(path, HOOKS).fresh(ids.tolist()), logits_of(model, ids))


def test_keys_of_sharing_layers_may_lie_in_the_file_unused(tmp_path: Path):
    config, model = random_model("gemma4", E_MODEL)
    ids = text_for(config)
    tensors = tensors_of("gemma4", config, model)
    for name in ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"):
        tensors[f"blk.6.{name}"] = tensors[f"blk.2.{name}"] * 3
    path = write_gguf(tmp_path / "more.gguf", metadata_of("gemma4", config), tensors)
    assert_close(ModelRig(path, HOOKS).fresh(ids.tolist()), logits_of(model, ids))


def test_a_value_matrix_some_global_layers_lack_is_missed(tmp_path: Path):
    config, model = random_model("gemma4", E_MODEL)
    tensors = tensors_of("gemma4", config, model)
    del tensors["blk.2.attn_v.weight"]
    tensors["blk.4.attn_v.weight"] = np.zeros((64, 48), np.float32)
    changes = {"gemma4.attention.shared_kv_layers": 1}
    path = write_gguf(tmp_path / "some.gguf", {**metadata_of("gemma4", config), **changes}, tensors)
    with pytest.raises(ModelFormatError, match=r"'blk.2.attn_v.weight' is missing"):
        ModelRig(path, HOOKS)


@pytest.mark.parametrize("name", ["K = V", "7 experts", "per-layer inputs, shared keys"])
def test_quantized_files_equal_hugging_face_on_the_dequantized_numbers(name, tmp_path: Path):
    arch, changes = CASES[name]
    wide = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    inputs = {"hidden_size_per_layer_input": 32} if "inputs" in name else {}
    config, model = random_model(arch, {**changes, **wide, **inputs})
    tensors = tensors_of(arch, config, model)
    quant = {key: "Q8_0" for key, value in tensors.items() if value.ndim > 1 and "gate_inp" not in key}
    path = write_gguf(tmp_path / "q8.gguf", metadata_of(arch, config), tensors, quant=quant)
    kind = gguf.GGMLQuantizationType.Q8_0
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "router" not in parameter_name:
                stored = gguf.quants.quantize(np.ascontiguousarray(parameter.numpy()), kind)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(stored, kind)))
    ids = text_for(config)
    assert_close(ModelRig(path, HOOKS).fresh(ids.tolist()), logits_of(model, ids))
