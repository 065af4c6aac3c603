"""Random Hugging Face models as a second oracle: shapes and scalings the fixtures do not have."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

from luce_core.contracts import PromptLogprobs
from luce_core.testing.gguf_factory import write_gguf
from luce_core.testing.pipeline import TOY_HOOKS, EngineRig, make_pipeline
from luce_core.testing.rig import ModelRig
from luce_core.testing.toy_vocab import toy_vocabulary

HOOKS = "luce_arch_llama.hooks"
TOLERANCE = 2e-5
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
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
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
CASES = {
    "many heads": ("llama", {"num_key_value_heads": 6}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "wide heads": ("llama", {"head_dim": 16}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}},
    ),
    "llama3 rope": (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, **LLAMA3}},
    ),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied, yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
}


def random_model(arch, changes):
    config_type = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[arch]
    model_type = {"llama": transformers.LlamaForCausalLM, "qwen2": transformers.Qwen2ForCausalLM}[arch]
    config = config_type(**{**BASE, **changes}, attn_implementation="eager")
    model = model_type(config).float().eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.add_(0.3 * noise)
            elif name.endswith(".bias"):
                parameter.copy_(0.3 * noise)
            elif "embed" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(1.2 / parameter.shape[1] ** 0.5 * noise)
    return config, model


def permuted(rows, heads):
    """As converters store llama's queries and keys: halves of a head become adjacent pairs."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def tensors_of(arch, config, model):
    tensors = {}
    for name, parameter in model.state_dict().items():
        numbers, (stem, kind) = parameter.numpy(), name.rsplit(".", 1)
        parts = stem.split(".")
        if stem == "model.embed_tokens":
            tensors["token_embd.weight"] = numbers
        elif stem == "model.norm":
            tensors["output_norm.weight"] = numbers
        elif stem == "lm_head":
            if not config.tie_word_embeddings:
                tensors["output.weight"] = numbers
        else:
            ours = NAMES[".".join(parts[3:])]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(ours)
            if arch == "llama" and heads:
                numbers = permuted(numbers, heads)
            tensors[f"blk.{parts[2]}.{ours}.{kind}"] = np.ascontiguousarray(numbers)
    return tensors


def metadata_of(arch, config):
    rope = config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found = {
        "general.architecture": arch,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": rope["rope_theta"],
    }
    if head_dim * config.num_attention_heads != config.hidden_size:
        found |= {f"{arch}.attention.key_length": head_dim, f"{arch}.attention.value_length": head_dim}
        found |= {f"{arch}.rope.dimension_count": head_dim}
    if config.num_key_value_heads == config.num_attention_heads:
        del found[f"{arch}.attention.head_count_kv"]  # absent means: as many as query heads
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {f"{arch}.rope.scaling.type": rope["rope_type"]}
        found |= {f"{arch}.rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        original = rope["original_max_position_embeddings"]
        found |= {f"{arch}.rope.scaling.original_context_length": original}
    return found


def llama3_factors(config):
    """The rope_freqs tensor converters write for Llama 3.x, by its published definition."""
    rope = config.rope_parameters
    half = config.hidden_size // config.num_attention_heads // 2
    factors = []
    for j in range(half):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (j / half)
        turns = rope["original_max_position_embeddings"] / wavelength
        smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        smooth = min(max(smooth, 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def written(path, arch, config, model, **more):
    tensors = {**tensors_of(arch, config, model), **more}
    if config.rope_parameters["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(config)
    return write_gguf(path, metadata_of(arch, config), tensors)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_hugging_face(name, tmp_path: Path):
    arch, changes = CASES[name]
    config, model = random_model(arch, changes)
    ids = torch.randint(0, config.vocab_size, (100,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = model(ids[None]).logits[0]
    rig = ModelRig(written(tmp_path / "tiny.gguf", arch, config, model), HOOKS)
    got = rig.fresh(ids.tolist())
    assert float((got - want).abs().max()) <= TOLERANCE * float(want.abs().max())
    seq = rig.open()
    rig.prefill({seq: ids[:90].tolist()})
    decoded = torch.stack([rig.decode(seq, token) for token in ids[90:].tolist()])
    assert float((decoded - want[90:]).abs().max()) <= TOLERANCE * float(want.abs().max())


@pytest.mark.parametrize("name", ["biases", "qwen2", "wide heads"])
def test_a_fused_qkv_matrix_is_the_same_model(name, tmp_path: Path):
    arch, changes = CASES[name]
    config, model = random_model(arch, changes)
    plain = written(tmp_path / "plain.gguf", arch, config, model)
    tensors = tensors_of(arch, config, model)
    for layer in range(config.num_hidden_layers):
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"blk.{layer}.attn_{part}.{kind}", None) for part in "qkv"]
            if parts[0] is not None:
                tensors[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate(parts)
    fused = write_gguf(tmp_path / "fused.gguf", metadata_of(arch, config), tensors)
    ids = list(range(1, 30))
    assert torch.equal(ModelRig(fused, HOOKS).fresh(ids), ModelRig(plain, HOOKS).fresh(ids))


def test_a_scale_tensor_multiplies_its_matrix(tmp_path: Path):
    config, model = random_model("llama", {})
    ids = list(range(1, 30))
    plain = written(tmp_path / "plain.gguf", "llama", config, model)
    tensors = tensors_of("llama", config, model)
    tensors["blk.1.ffn_down.weight"] = tensors["blk.1.ffn_down.weight"] / 4
    tensors["blk.1.ffn_down.scale"] = np.array([4.0], np.float32)
    scaled = write_gguf(tmp_path / "scaled.gguf", metadata_of("llama", config), tensors)
    torch.testing.assert_close(ModelRig(scaled, HOOKS).fresh(ids), ModelRig(plain, HOOKS).fresh(ids))


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0"])
def test_quantized_files_equal_hugging_face_on_the_dequantized_numbers(quant, tmp_path: Path):
    config, model = random_model("llama", {"hidden_size": 96, "intermediate_size": 64, "vocab_size": 64})
    path = write_gguf(
        tmp_path / "q.gguf", metadata_of("llama", config), tensors_of("llama", config, model), quant=quant
    )
    kind = gguf.GGMLQuantizationType[quant]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                stored = parameter.numpy()
                count = heads.get(name.split(".")[-2])
                rows = permuted(stored, count) if count else stored
                rows = gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind)
                if count:  # back to halves
                    rows = rows.reshape(count, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
                parameter.copy_(torch.from_numpy(np.ascontiguousarray(rows)))
        ids = torch.arange(1, 60)
        want = model(ids[None]).logits[0]
    got = ModelRig(path, HOOKS).fresh(ids.tolist())
    assert float((got - want).abs().max()) <= TOLERANCE * float(want.abs().max())


@pytest.mark.parametrize("chunk", [11, 512])
def test_a_scored_prompt_has_the_log_probabilities_of_hugging_face(chunk, tmp_path: Path):
    vocabulary = toy_vocabulary("bpe")
    size = len(vocabulary["tokenizer.ggml.tokens"])
    config, model = random_model("llama", {"vocab_size": size})
    metadata = {**metadata_of("llama", config), **vocabulary}
    path = write_gguf(tmp_path / "tiny.gguf", metadata, tensors_of("llama", config, model))
    ids = torch.randint(0, size, (80,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = model(ids[None]).logits[0].double().log_softmax(-1)[:-1]
    options = {"chunk": chunk, "cache_type_k": "f32", "cache_type_v": "f32"}
    rig = EngineRig(make_pipeline(path, TOY_HOOKS, HOOKS, options=options))
    answer = rig.submit(ids.tolist(), 0, prompt_logprobs=4)
    rig.run()
    entries = [e for event in answer.events if isinstance(event, PromptLogprobs) for e in event.tokens]
    assert [entry.token for entry in entries] == ids.tolist()[1:]
    own = want.gather(1, ids[1:, None])
    assert [entry.logprob for entry in entries] == pytest.approx(own[:, 0].tolist(), abs=2e-4)
    assert [entry.rank for entry in entries] == ((want > own).sum(-1) + 1).tolist()
    best = want.topk(4)
    assert [[token for token, _ in entry.top] for entry in entries] == best.indices.tolist()
