"""Random Hugging Face models and the files converters would make of them."""

from __future__ import annotations

import numpy as np
import torch
import transformers

from luce_core.testing.gguf_factory import write_gguf

LOCAL, WHOLE = "sliding_attention", "full_attention"
NAMES = {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.g_proj.weight": "attn_gate.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.bias": "attn_output.bias",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e5,
    "partial_rotary_factor": 0.5,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 16.0,
    "beta_slow": 1.0,
}
PLAIN = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
BASE = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_attention_heads_per_layer": [4, 6, 6, 6, 4, 6],
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": [WHOLE, LOCAL, LOCAL, LOCAL, WHOLE, LOCAL],
    "sliding_window": 11,
    "rope_parameters": {WHOLE: YARN, LOCAL: PLAIN},
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_routed_scaling_factor": 2.5,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
NO_WINDOW = {
    "num_hidden_layers": 3,
    "num_attention_heads_per_layer": [4, 4, 4],
    "layer_types": [WHOLE] * 3,
    "mlp_layer_types": ["dense", "dense", "sparse"],
    "gating": "per-element",
}


def ropes(whole=None, local=None):
    return {"rope_parameters": {WHOLE: {**YARN, **(whole or {})}, LOCAL: {**PLAIN, **(local or {})}}}


def random_model(changes):
    """(config, model) with every weight random, norms and the bias of the choice included."""
    config = transformers.LagunaConfig(**{**BASE, **changes})
    model = transformers.LagunaForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif "embed" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(1.2 / parameter.shape[-1] ** 0.5 * noise)
    return config, model


def tensors_of(config, model):
    tensors = {}
    for name, parameter in model.state_dict().items():
        numbers = np.ascontiguousarray(parameter.numpy())
        if name == "model.embed_tokens.weight":
            tensors["token_embd.weight"] = numbers
        elif name == "model.norm.weight":
            tensors["output_norm.weight"] = numbers
        elif name == "lm_head.weight":
            if not config.tie_word_embeddings:
                tensors["output.weight"] = numbers
        else:
            _, _, layer, inner = name.split(".", 3)
            if inner == "mlp.experts.gate_up_proj":
                gate, up = np.split(numbers, 2, 1)
                tensors[f"blk.{layer}.ffn_gate_exps.weight"] = np.ascontiguousarray(gate)
                tensors[f"blk.{layer}.ffn_up_exps.weight"] = np.ascontiguousarray(up)
            else:
                tensors[f"blk.{layer}.{NAMES[inner]}"] = numbers
    return tensors


def metadata_of(config):
    whole, local = config.rope_parameters[WHOLE], config.rope_parameters[LOCAL]
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": list(config.num_attention_heads_per_layer),
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": whole["rope_theta"],
        "rope.freq_base_swa": local["rope_theta"],
        "rope.dimension_count": int(config.head_dim * whole["partial_rotary_factor"]),
        "rope.dimension_count_swa": int(config.head_dim * local["partial_rotary_factor"]),
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": config.moe_routed_scaling_factor,
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
    }
    if LOCAL in config.layer_types:
        found["attention.sliding_window"] = config.sliding_window
    if whole["rope_type"] == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": whole["factor"],
            "rope.scaling.original_context_length": whole["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": whole["beta_fast"],
            "rope.scaling.yarn_beta_slow": whole["beta_slow"],
        }
        if "attention_factor" in whole:
            found["rope.scaling.yarn_attn_factor"] = whole["attention_factor"]
    if config.moe_router_logit_softcapping:
        found["router_logit_softcapping"] = config.moe_router_logit_softcapping
    return {"general.architecture": "laguna", **{f"laguna.{key}": value for key, value in found.items()}}


def written(path, config, model, *, metadata=None, quant=None):
    """The model as a GGUF file; `metadata` adds keys, or takes those away whose value is None."""
    keys = {**metadata_of(config), **(metadata or {})}
    keys = {key: value for key, value in keys.items() if value is not None}
    return write_gguf(path, keys, tensors_of(config, model), quant=quant)
