"""Random Hugging Face models and the files converters would make of them."""

from __future__ import annotations

import numpy as np
import torch
import transformers

from luce_core.testing.gguf_factory import write_gguf

NAMES = {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
}
OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}
BASE = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 24,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "attn_implementation": "eager",
}
GEMMA4 = {
    "num_key_value_heads": 2,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e6}


def random_model(arch, changes):
    """(config, model) with every weight random, buffers and scalars included."""
    if arch == "gemma3":
        config = transformers.Gemma3TextConfig(**{**BASE, "query_pre_attn_scalar": 16, **changes})
        model = transformers.Gemma3ForCausalLM(config)
    else:
        config = transformers.Gemma4TextConfig(
            **{**BASE, **GEMMA4, "vocab_size_per_layer_input": BASE["vocab_size"], **changes}
        )
        model = transformers.Gemma4ForCausalLM(config)
    model = model.float().eval()
    generator = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:  # gemma3 adds the one itself
                parameter.copy_(0.3 * noise + (arch == "gemma4"))
            elif name.endswith(("scale", "layer_scalar")) and "embed_" not in name:
                parameter.copy_(1.0 + 0.2 * noise)
            elif "embed_tokens" in name and parameter.dim() == 2:
                parameter.copy_(0.5 * noise)
            elif parameter.dim() >= 2:
                parameter.copy_(1.2 / parameter.shape[-1] ** 0.5 * noise)
    return config, model


def tensors_of(arch, config, model):
    tensors = {}
    for name, parameter in model.state_dict().items():
        numbers = np.ascontiguousarray(parameter.numpy())
        if arch == "gemma3" and "norm" in name:
            numbers = numbers + 1
        if name in OUTER_NAMES:
            tensors[OUTER_NAMES[name]] = numbers
        elif name.startswith("model.layers."):
            _, _, layer, inner = name.split(".", 3)
            tensors[f"blk.{layer}.{NAMES[inner]}"] = numbers
        else:
            assert name == "lm_head.weight", name
    if arch == "gemma4":
        dim = config.per_layer_config[_first(config, "full_attention")].head_dim
        turning = int(config.rope_parameters["full_attention"].get("partial_rotary_factor", 1.0) * dim / 2)
        factors = np.full(dim // 2, 1e30, np.float32)
        factors[:turning] = 1
        tensors["rope_freqs.weight"] = factors
    return tensors


def metadata_of(arch, config):
    rope = config.rope_parameters
    found = {
        "general.architecture": arch,
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": config.sliding_window,
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
        "vocab_size": config.vocab_size,
    }
    if config.final_logit_softcapping:
        found["final_logit_softcapping"] = config.final_logit_softcapping
    found |= _gemma3_keys(config) if arch == "gemma3" else _gemma4_keys(config)
    return {key if key == "general.architecture" else f"{arch}.{key}": value for key, value in found.items()}


def _gemma3_keys(config):
    found = {
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
    }
    rope = config.rope_parameters["full_attention"]
    if rope["rope_type"] == "linear":
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    return found


def _gemma4_keys(config):
    local, whole = (
        config.per_layer_config[_first(config, kind)] for kind in ("sliding_attention", "full_attention")
    )
    kinds = config.layer_types
    heads = {"sliding_attention": local.num_key_value_heads, "full_attention": whole.num_key_value_heads}
    first_shared = config.num_hidden_layers - config.num_kv_shared_layers
    found = {
        "attention.head_count_kv": [heads[kind] for kind in kinds],
        "attention.key_length": whole.head_dim,
        "attention.value_length": whole.head_dim,
        "attention.key_length_swa": local.head_dim,
        "attention.value_length_swa": local.head_dim,
        "rope.dimension_count": whole.head_dim,
        "rope.dimension_count_swa": local.head_dim,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds],
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
    }
    if config.use_double_wide_mlp:
        wide = config.intermediate_size
        found["feed_forward_length"] = [
            wide * (2 if layer >= first_shared else 1) for layer in range(config.num_hidden_layers)
        ]
    if config.enable_moe_block:
        found |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.top_k_experts,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    return found


def _first(config, kind):
    return config.layer_types.index(kind)


def written(path, arch, config, model, *, metadata=None, quant=None):
    """The model as a GGUF file; `metadata` adds keys, or takes those away whose value is None."""
    keys = {**metadata_of(arch, config), **(metadata or {})}
    keys = {key: value for key, value in keys.items() if value is not None}
    return write_gguf(path, keys, tensors_of(arch, config, model), quant=quant)
