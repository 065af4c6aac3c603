"""Random Hugging Face models and the files converters would make of them."""

from __future__ import annotations

import numpy as np
import torch
import transformers

from luce_core.testing.gguf_factory import write_gguf

ARCH = "deepseek4"
NEAR, SELECTED, ALL = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
NAMES = {
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_norm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_proj.weight": "attn_kv.weight",
    "self_attn.kv_norm.weight": "attn_kv_a_norm.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.o_a_proj.weight": "attn_output_a.weight",
    "self_attn.o_b_proj.weight": "attn_output_b.weight",
    "self_attn.compressor.kv_proj.weight": "attn_compressor_kv.weight",
    "self_attn.compressor.gate_proj.weight": "attn_compressor_gate.weight",
    "self_attn.compressor.position_bias": "attn_compressor_ape.weight",
    "self_attn.compressor.kv_norm.weight": "attn_compressor_norm.weight",
    "self_attn.compressor.indexer.q_b_proj.weight": "indexer.attn_q_b.weight",
    "self_attn.compressor.indexer.scorer.weights_proj.weight": "indexer.proj.weight",
    "self_attn.compressor.indexer.kv_proj.weight": "indexer_compressor_kv.weight",
    "self_attn.compressor.indexer.gate_proj.weight": "indexer_compressor_gate.weight",
    "self_attn.compressor.indexer.position_bias": "indexer_compressor_ape.weight",
    "self_attn.compressor.indexer.kv_norm.weight": "indexer_compressor_norm.weight",
    "attn_hc.fn": "hc_attn_fn.weight",
    "attn_hc.base": "hc_attn_base.weight",
    "attn_hc.scale": "hc_attn_scale.weight",
    "ffn_hc.fn": "hc_ffn_fn.weight",
    "ffn_hc.base": "hc_ffn_base.weight",
    "ffn_hc.scale": "hc_ffn_scale.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate.tid2eid": "ffn_gate_tid2eid.weight",
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
    "model.hc_head.hc_fn": "output_hc_fn.weight",
    "model.hc_head.hc_base": "output_hc_base.weight",
    "model.hc_head.hc_scale": "output_hc_scale.weight",
    "lm_head.weight": "output.weight",
}
BASE = {
    "vocab_size": 61,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "layer_types": [NEAR, SELECTED, ALL],
    "compress_rates": {SELECTED: 4, ALL: 8},
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "num_hash_layers": 1,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 3,
    "sliding_window": 6,
    "swiglu_limit": 0.5,
    "moe_intermediate_size": 24,
    "max_position_embeddings": 256,
    "qk_rope_head_dim": 8,
    "pad_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
}


def random_model(changes):
    """(config, model) with every weight random, buffers and scalars included."""
    config = transformers.DeepseekV4Config(**{**BASE, **changes})
    model = transformers.DeepseekV4ForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            if name.endswith("tid2eid"):
                chosen = torch.rand(config.vocab_size, config.n_routed_experts, generator=generator)
                parameter.copy_(chosen.topk(config.num_experts_per_tok).indices)
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif "embed" in name or "position_bias" in name:
                parameter.copy_(noise)
            elif "hc" in name and name.endswith("scale"):
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.dim() >= 2:
                parameter.copy_(1.2 / parameter.shape[-1] ** 0.5 * noise)
            else:  # sinks, the router's bias, the base of streams
                parameter.copy_(0.5 * noise)
    return config, model


def tensors_of(model):
    tensors = {}
    for name, parameter in model.state_dict().items():
        numbers = np.ascontiguousarray(parameter.numpy())
        if name in OUTER_NAMES:
            tensors[OUTER_NAMES[name]] = numbers
            continue
        _, _, layer, inner = name.split(".", 3)
        if inner == "mlp.experts.gate_up_proj":
            for key, part in zip(("gate", "up"), np.split(numbers, 2, axis=1), strict=True):
                tensors[f"blk.{layer}.ffn_{key}_exps.weight"] = np.ascontiguousarray(part)
        else:
            stored = numbers.astype(np.int32) if inner.endswith("tid2eid") else numbers
            tensors[f"blk.{layer}.{NAMES[inner]}"] = stored
    return tensors


def metadata_of(config):
    layers, limit = config.num_hidden_layers, float(config.swiglu_limit)
    rates = {NEAR: 0, **config.compress_rates}
    main, far = config.rope_parameters["main"], config.rope_parameters["compress"]
    found = {
        "block_count": layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": 1,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.sliding_window": config.sliding_window,
        "attention.compress_ratios": [rates[kind] for kind in config.layer_types],
        "attention.compress_rope_freq_base": float(far["rope_theta"]),
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.output_group_count": config.o_groups,
        "attention.output_lora_rank": config.o_lora_rank,
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.top_k": config.index_topk,
        "rope.dimension_count": config.qk_rope_head_dim,
        "rope.freq_base": float(main["rope_theta"]),
        "hyper_connection.count": config.hc_mult,
        "hyper_connection.sinkhorn_iterations": config.hc_sinkhorn_iters,
        "hyper_connection.epsilon": config.hc_eps,
        "hash_layer_count": config.mlp_layer_types.count("hash_moe"),
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_gating_func": 4,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "swiglu_clamp_exp": [limit] * layers,
    }
    if far["rope_type"] == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(far["factor"]),
            "rope.scaling.original_context_length": far["original_max_position_embeddings"],
        }
    return {"general.architecture": ARCH, **{f"{ARCH}.{key}": value for key, value in found.items()}}


def written(path, config, model, **more):
    return write_gguf(path, {**metadata_of(config), **more}, tensors_of(model))
