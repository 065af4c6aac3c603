"""Random Hugging Face models and the files converters would make of them."""

from __future__ import annotations

import numpy as np
import torch
import transformers

from luce_core.testing.gguf_factory import write_gguf

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
BASE = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
EXPERTS = {"moe_intermediate_size": 20, "num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True}


def random_model(arch, changes):
    """(config, model) with every weight random, norms and biases included."""
    if arch == "qwen3":
        config = transformers.Qwen3Config(**{**BASE, **changes})
        model = transformers.Qwen3ForCausalLM(config)
    else:
        config = transformers.Qwen3MoeConfig(**{**BASE, **EXPERTS, **changes})
        model = transformers.Qwen3MoeForCausalLM(config)
    model = model.float().eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith(".bias"):
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
            tensors |= {f"blk.{layer}.{ours}": own for ours, own in _of_layer(inner, numbers).items()}
    return tensors


def _of_layer(inner, numbers):
    if inner == "mlp.experts.down_proj":
        return {"ffn_down_exps.weight": numbers}
    if inner == "mlp.experts.gate_up_proj":
        gate, up = np.split(numbers, 2, 1)
        return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
    stem, kind = inner.rsplit(".", 1)
    return {f"{NAMES[stem]}.{kind}": numbers}


def metadata_of(config):
    rope = config.rope_parameters
    arch = config.model_type.replace("_", "")
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": rope["rope_theta"],
    }
    if rope["rope_type"] != "default":
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if arch == "qwen3moe":
        found |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    return {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in found.items()}}


def written(path, config, model, quant=None):
    """The model as a GGUF file."""
    return write_gguf(path, metadata_of(config), tensors_of(config, model), quant=quant)
