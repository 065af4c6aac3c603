"""Random Hugging Face models, with an MTP block beside them, and the files converters would make of them."""

from __future__ import annotations

import numpy as np
import torch
import transformers
from attrs import frozen
from torch import nn
from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as moe

from luce_core.testing.gguf_factory import write_gguf

NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "fc.weight": "nextn.eh_proj.weight",
    "pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "norm.weight": "nextn.shared_head_norm.weight",
}
OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
BASE = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
DENSE = {"intermediate_size": 72}
MOE = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def rope(share=0.25, sections=(2, 1, 1), theta=1e7):
    return {
        "rope_type": "default",
        "rope_theta": theta,
        "partial_rotary_factor": share,
        "mrope_section": list(sections),
        "mrope_interleaved": True,
    }


class Mtp(nn.Module):
    """The block Hugging Face does not run: written from the layers it has."""

    def __init__(self, arch, config):
        super().__init__()
        source, prefix = (dense, "Qwen3_5") if arch == "qwen35" else (moe, "Qwen3_5Moe")
        norm = getattr(source, f"{prefix}RMSNorm")
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.pre_fc_norm_embedding = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm = norm(config.hidden_size, eps=config.rms_norm_eps)
        layer = getattr(source, f"{prefix}DecoderLayer")
        self.layer = layer(config, config.layer_types.index("full_attention"))

    def forward(self, model, ids, hidden):
        """ids [T], hidden [T, E] after its norm, of the token before each -> after the last norm, [T, E]."""
        embedded = self.pre_fc_norm_embedding(model.model.embed_tokens(ids))
        x = self.fc(torch.cat((embedded, self.pre_fc_norm_hidden(hidden)), -1))[None]
        count = len(ids)
        places = torch.arange(count).expand(3, 1, -1)
        mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
        turning = model.model.rotary_emb(x, places)
        return self.norm(self.layer(x, position_embeddings=turning, attention_mask=mask)[0])


@frozen(eq=False)
class Random:
    """A random model of one geometry."""

    arch: str
    config: transformers.PretrainedConfig
    model: nn.Module
    mtp: Mtp


def random_model(arch, changes):
    """Every weight random: norms, biases and decays too."""
    given = {**BASE, **(DENSE if arch == "qwen35" else MOE), "rope_parameters": rope(), **changes}
    if arch == "qwen35":
        config = transformers.Qwen3_5TextConfig(**given)
        model = transformers.Qwen3_5ForCausalLM(config)
    else:
        config = transformers.Qwen3_5MoeTextConfig(**given)
        model = transformers.Qwen3_5MoeForCausalLM(config)
    mtp = Mtp(arch, config)
    generator = torch.Generator().manual_seed(23)
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *mtp.named_parameters()]:
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                parameter.copy_(noise.clamp(-1.5, 1.5) * 0.7 - 0.5)
            elif name.endswith("dt_bias"):
                parameter.copy_(0.7 * noise - 1)
            elif "norm" in name:
                parameter.copy_(0.3 * noise + ("linear_attn.norm" in name))
            elif "embed" in name:
                parameter.copy_(noise)
            elif "conv1d" in name:
                parameter.copy_(noise / 2)
            else:
                parameter.copy_(1.2 / parameter.shape[-1] ** 0.5 * noise)
    return Random(arch, config, model.float().eval(), mtp.float().eval())


def tiled(config, numbers, axis, block):
    """Value heads as converters order them: HF's head key · r + n comes to place n · (key heads) + key."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    moved = np.moveaxis(numbers, axis, 0)
    order = np.arange(values).reshape(keys, values // keys).T.reshape(-1)
    return np.moveaxis(moved.reshape(values, block, -1)[order].reshape(moved.shape), 0, axis)


def stored(config, name, numbers):
    """What a file has of this parameter."""
    width, keys = config.linear_value_head_dim, 2 * config.linear_num_key_heads * config.linear_key_head_dim
    kind = name.removeprefix("linear_attn.").removesuffix(".weight")
    if kind in ("in_proj_qkv", "conv1d"):
        numbers = numbers.reshape(numbers.shape[0], -1)
        return np.concatenate((numbers[:keys], tiled(config, numbers[keys:], 0, width)))
    if kind == "in_proj_z":
        return tiled(config, numbers, 0, width)
    if kind in ("in_proj_a", "in_proj_b", "dt_bias"):
        return tiled(config, numbers, 0, 1)
    if kind == "A_log":
        return -np.exp(tiled(config, numbers, 0, 1))
    if kind == "out_proj":
        return tiled(config, numbers, 1, width)
    return numbers + 1 if "norm" in name and "linear_attn" not in name else numbers


def tensors_of(random, *, nextn=False):
    tensors, config = {}, random.config
    blocks = [
        (int(name.split(".")[2]), name.split(".", 3)[3], value)
        for name, value in random.model.state_dict().items()
        if name.startswith("model.layers.")
    ]
    if nextn:
        blocks += [
            (config.num_hidden_layers, name.removeprefix("layer."), value)
            for name, value in random.mtp.state_dict().items()
        ]
    for layer, name, value in blocks:
        tensors[f"blk.{layer}.{NAMES[name]}"] = stored(config, name, value.numpy())
    for name, ours in OUTER_NAMES.items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            tensors[ours] = stored(config, name, random.model.state_dict()[name].numpy())
    return {name: np.ascontiguousarray(numbers, np.float32) for name, numbers in tensors.items()}


def metadata_of(random, *, nextn=False):
    config, turning = random.config, random.config.rope_parameters
    found = {
        "block_count": config.num_hidden_layers + nextn,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
        "rope.freq_base": turning["rope_theta"],
        "rope.dimension_count": int(config.head_dim * turning["partial_rotary_factor"]),
        "rope.dimension_sections": [*turning["mrope_section"], 0],
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "vocab_size": config.vocab_size,
    }
    if nextn:
        found["nextn_predict_layers"] = 1
        found["attention.recurrent_layers"].append(False)
    if random.arch == "qwen35":
        found["feed_forward_length"] = config.intermediate_size
    else:
        found |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }
    keys = {f"{random.arch}.{key}": value for key, value in found.items()}
    return {"general.architecture": random.arch, **keys}


def written(path, random, *, nextn=False, drop=(), **more):
    """The model as a GGUF file, with `more` tensors and without those in `drop`."""
    tensors = {**tensors_of(random, nextn=nextn), **more}
    kept = {name: numbers for name, numbers in tensors.items() if name not in drop}
    return write_gguf(path, metadata_of(random, nextn=nextn), kept)
