"""Random Hugging Face models as a second oracle: shapes the fixtures do not have, positions of images."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from luce_core.model.batch import make_batch
from luce_core.testing.gguf_factory import write_gguf
from luce_core.testing.rig import ModelRig

from .hugging_face import metadata_of, random_model, rope, tensors_of, written

HOOKS = "luce_arch_qwen35.hooks"
TOLERANCE = 2e-5
"""Of the largest logit. Measured: up to 7e-6, where Hugging Face itself is 5e-6 from float64."""
LINEAR, FULL = "linear_attention", "full_attention"
CASES = {
    "a value head per key head": ("qwen35", {"linear_num_key_heads": 3, "linear_num_value_heads": 3}),
    "two per key head": ("qwen35", {"linear_num_key_heads": 3, "linear_num_value_heads": 6}),
    "three per key head": ("qwen35", {}),
    "values wider than keys": ("qwen35", {"linear_key_head_dim": 8, "linear_value_head_dim": 24}),
    "heads as wide as published": (
        "qwen35",
        {
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "head_dim": 256,
            "rope_parameters": rope(0.25, (11, 11, 10)),
        },
    ),
    "as many key as query heads, tied": ("qwen35", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "one key head": ("qwen35", {"num_attention_heads": 6, "num_key_value_heads": 1}),
    "attention first": ("qwen35", {"layer_types": [FULL, LINEAR, LINEAR, FULL]}),
    "all features turn": ("qwen35", {"head_dim": 16, "rope_parameters": rope(1.0, (4, 2, 2), 1e4)}),
    "kernel of two": ("qwen35", {"linear_conv_kernel_dim": 2}),
    "experts": ("qwen35moe", {}),
    "three of seven experts": ("qwen35moe", {"num_experts": 7, "num_experts_per_tok": 3}),
    "one of five experts, two value heads": (
        "qwen35moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 1,
            "linear_num_value_heads": 4,
            "tie_word_embeddings": True,
        },
    ),
}


def assert_close(got, want, tolerance=TOLERANCE):
    assert got.shape == want.shape
    worst = float((got - want).abs().max() / want.abs().max())
    assert worst <= tolerance, f"logits differ by {worst:.2g} of the largest"


def ids_of(config, count):
    return torch.randint(0, config.vocab_size, (count,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_hugging_face(name, tmp_path: Path):
    arch, changes = CASES[name]
    random = random_model(arch, changes)
    ids = ids_of(random.config, 80)
    with torch.no_grad():
        want = random.model(ids[None]).logits[0]
    rig = ModelRig(written(tmp_path / "tiny.gguf", random), HOOKS)
    assert_close(rig.fresh(ids.tolist()), want)
    seq = rig.open()
    parts = [rig.prefill({seq: ids[:66].tolist()})[seq], rig.prefill({seq: ids[66:75].tolist()})[seq]]
    parts.append(torch.stack([rig.decode(seq, token) for token in ids[75:].tolist()]))
    assert_close(torch.cat(parts), want)


def test_positions_of_an_image_turn_as_in_hugging_face(tmp_path: Path):
    """Ten tokens of text, a grid of 4 x 5, then text that goes on behind the grid's longer side."""
    random = random_model("qwen35", {"rope_parameters": rope(0.5, (4, 2, 2), 1e2)})
    text = torch.arange(10).expand(3, -1)
    row, column = torch.meshgrid(torch.arange(4), torch.arange(5), indexing="ij")
    grid = 10 + torch.stack((torch.zeros(20).long(), row.reshape(-1), column.reshape(-1)))
    after = torch.arange(12).expand(3, -1) + 10 + 5
    positions = torch.cat((text, grid, after), 1)
    ids = ids_of(random.config, positions.shape[1])
    with torch.no_grad():
        want = random.model(ids[None], position_ids=positions[:, None]).logits[0]
        plain = random.model(ids[None]).logits[0]
    assert float((plain - want).abs().max()) > 0.01
    rig = ModelRig(written(tmp_path / "tiny.gguf", random), HOOKS)
    seq, cut = rig.open(), 38
    rows = rig._rows(seq, ids[:cut].tolist(), wanted=range(cut), positions=positions[:, :cut].tolist())
    got = rig.backend.head(rig.backend.forward(make_batch("prefill", [rows], axes=3)).final)
    assert_close(got, want[:cut])
    rig.blocks.advance(seq, ids[:cut].tolist())
    rows = rig._rows(seq, ids[cut:].tolist(), positions=positions[:, cut:].tolist())
    assert_close(rig.backend.forward(make_batch("held", [rows], axes=3)).logits, want[cut:])


def test_fused_matrices_are_the_same_model(tmp_path: Path):
    for arch, parts, fused in (
        ("qwen35", ("attn_q", "attn_k", "attn_v"), "attn_qkv"),
        ("qwen35moe", ("ffn_gate_exps", "ffn_up_exps"), "ffn_gate_up_exps"),
    ):
        random, ids = random_model(arch, {}), list(range(1, 30))
        tensors = tensors_of(random)
        for name in [name for name in tensors if fused == "ffn_gate_up_exps" and fused in name]:
            gate, up = np.split(tensors.pop(name), 2, axis=1)
            tensors |= {name.replace(fused, "ffn_gate_exps"): gate, name.replace(fused, "ffn_up_exps"): up}
        plain = write_gguf(tmp_path / f"{arch}-plain.gguf", metadata_of(random), tensors)
        for layer in range(random.config.num_hidden_layers):
            found = [tensors.pop(f"blk.{layer}.{part}.weight", None) for part in parts]
            if found[0] is not None:
                tensors[f"blk.{layer}.{fused}.weight"] = np.concatenate(found, -2)
        joined = write_gguf(tmp_path / f"{arch}-fused.gguf", metadata_of(random), tensors)
        assert_close(ModelRig(joined, HOOKS).fresh(ids), ModelRig(plain, HOOKS).fresh(ids))


def test_a_gate_of_the_shared_expert_may_be_a_vector(tmp_path: Path):
    random, ids = random_model("qwen35moe", {}), list(range(1, 30))
    matrix = written(tmp_path / "matrix.gguf", random)
    flat = {name: numbers.reshape(-1) for name, numbers in tensors_of(random).items() if "inp_shexp" in name}
    assert len(flat) == 4
    vector = written(tmp_path / "vector.gguf", random, **flat)
    assert torch.equal(ModelRig(vector, HOOKS).fresh(ids), ModelRig(matrix, HOOKS).fresh(ids))


@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe"])
def test_quantized_files_equal_the_model_on_the_dequantized_numbers(arch, tmp_path: Path):
    """Q8_0 for every matrix but those converters keep in f32; rows of ssm_alpha, ssm_beta included."""
    changes = {"hidden_size": 64, "linear_num_value_heads": 4, "intermediate_size": 96}
    if arch == "qwen35moe":
        changes = {
            "hidden_size": 64,
            "linear_num_value_heads": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        }
    random = random_model(arch, changes)
    tensors, kind = tensors_of(random), gguf.GGMLQuantizationType.Q8_0
    kept = ("ssm_conv1d", "ffn_gate_inp")
    quant = [name for name, x in tensors.items() if x.ndim > 1 and not any(part in name for part in kept)]
    packed = write_gguf(tmp_path / "q.gguf", metadata_of(random), tensors, quant=dict.fromkeys(quant, "Q8_0"))
    plain = {
        name: gguf.quants.dequantize(gguf.quants.quantize(numbers, kind), kind) if name in quant else numbers
        for name, numbers in tensors.items()
    }
    same = write_gguf(tmp_path / "plain.gguf", metadata_of(random), plain)
    ids = list(range(1, 60))
    assert_close(ModelRig(packed, HOOKS).fresh(ids), ModelRig(same, HOOKS).fresh(ids))
