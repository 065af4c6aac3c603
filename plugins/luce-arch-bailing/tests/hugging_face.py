"""Random Hugging Face models and the files converters would make of them."""

from __future__ import annotations

import numpy as np
import torch
import transformers

from luce_core.testing.gguf_factory import write_gguf

ARCH = "bailingmoe3"
NAMES = {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.forget_gate.f_proj.weight": "ssm_f_a.weight",
    "self_attn.forget_gate.dt_bias": "ssm_dt.bias",
    "self_attn.b_proj.weight": "ssm_beta.weight",
    "self_attn.o_norm.weight": "ssm_norm.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
BASE = {
    "vocab_size": 61,
    "hidden_size": 40,
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "head_dim": 16,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "layer_group_size": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-2,
    "pad_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
}


def random_model(changes):
    """(config, model) with every weight random. An eps of 1e-2 tells the norms that have it from others."""
    config = transformers.BailingHybridConfig(**{**BASE, **changes})
    config.num_key_value_heads = config.num_attention_heads
    model = transformers.BailingHybridForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif "conv1d" in name:
                parameter.copy_(0.6 * noise)
            elif "embed" in name:
                parameter.copy_(noise)
            elif parameter.dim() >= 2:
                parameter.copy_(1.2 / parameter.shape[-1] ** 0.5 * noise)
            else:  # A_log, dt_bias, the router's bias
                parameter.copy_(0.5 * noise)
    return config, model


def tensors_of(config, model):
    """As the converter's table has them: exp(A_log), three convolutions, kv_b in two, one transposed."""
    tensors = {}
    for name, parameter in model.state_dict().items():
        numbers = np.ascontiguousarray(parameter.numpy())
        if name in OUTER_NAMES:
            tensors[OUTER_NAMES[name]] = numbers
            continue
        _, _, layer, inner = name.split(".", 3)
        found = _tensors(config, int(layer), inner, numbers)
        tensors |= {f"blk.{layer}.{key}": np.ascontiguousarray(value) for key, value in found.items()}
    return tensors


def _tensors(config, layer, inner, numbers):
    if inner == "self_attn.conv1d.weight":
        parts = np.split(numbers, 3)
        return {
            f"ssm_conv1d_{n}.weight": part.transpose(1, 0, 2)[:, :, None]
            for n, part in zip("qkv", parts, strict=True)
        }
    if inner == "self_attn.forget_gate.A_log":
        return {"ssm_a": np.exp(numbers)[:, None]}
    if inner == "self_attn.kv_b_proj.weight":
        heads = numbers.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        nope = config.qk_nope_head_dim
        return {"attn_k_b.weight": heads[:, :nope].transpose(0, 2, 1), "attn_v_b.weight": heads[:, nope:]}
    if inner == "self_attn.g_proj.weight":
        latent = config.layer_types[layer] == "full_attention"
        return {"attn_gate.weight" if latent else "ssm_g_a.weight": numbers}
    if inner == "mlp.experts.gate_up_proj":
        gate, up = np.split(numbers, 2, axis=1)
        return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
    return {NAMES[inner]: numbers}


def metadata_of(config):
    heads, latent = config.num_attention_heads, config.kv_lora_rank + config.qk_rope_head_dim
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": heads,
        "attention.head_count_kv": [int(kind == "full_attention") for kind in config.layer_types],
        "attention.key_length": latent,
        "attention.value_length": config.linear_head_dim,
        "attention.key_length_mla": config.qk_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.qk_rope_head_dim,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "ssm.conv_kernel": config.short_conv_kernel_size,
        "kda.head_dim": config.linear_head_dim,
        "kda.safe_gate": True,
        "kda.gate_lower_bound": float(config.kda_lower_bound),
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_gating_func": 2,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "leading_dense_block_count": config.first_k_dense_replace,
    }
    if config.q_lora_rank:
        found["attention.q_lora_rank"] = config.q_lora_rank
    return {"general.architecture": ARCH, **{f"{ARCH}.{key}": value for key, value in found.items()}}


def written(path, config, model, **more):
    return write_gguf(path, {**metadata_of(config), **more}, tensors_of(config, model))
