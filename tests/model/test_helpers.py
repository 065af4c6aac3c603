"""Rotary frequencies against transformers' own, and common metadata."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from luce_core.contracts import LayerWidths, StoredSize
from luce_core.errors import ModelFormatError
from luce_core.gguf import read_header
from luce_core.model.helpers import rope_spec, unit_norm
from luce_core.model.metadata import (
    RopeParams,
    attention_shapes,
    check_ends,
    check_tensors,
    full_attention_layout,
    layer_widths,
    long_factors,
    mlp_shapes,
    model_spec,
    read_decoder,
    read_rope,
    read_window_rope,
    special_tokens,
    vocab_size,
    weight_totals,
)
from luce_core.testing.gguf_factory import write_gguf

HEAD_DIM = 64
COMMON = {
    "general.architecture": "any",
    "any.block_count": 3,
    "any.context_length": 2048,
    "any.embedding_length": 128,
    "any.attention.head_count": 2,
    "any.attention.layer_norm_rms_epsilon": 1e-6,
}


def header_of(folder, metadata=None, tensors=None):
    found = {"token_embd.weight": np.zeros((10, 128), np.float32), **(tensors or {})}
    return read_header(write_gguf(folder / "h.gguf", {**COMMON, **(metadata or {})}, found))


def reference(**rope):
    """(inv_freq, factor on cos and sin) of transformers."""
    config = LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 1e4, **rope},
    )
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")


def test_plain_frequencies():
    spec = rope_spec(RopeParams(1e4, HEAD_DIM), pairs="halves")
    want = [1e4 ** (-2 * j / HEAD_DIM) for j in range(HEAD_DIM // 2)]
    np.testing.assert_allclose(spec.inv_freq, want, rtol=1e-6)
    assert (spec.pairs, spec.magnitude) == ("halves", 1.0)


def test_linear_scaling_equals_transformers():
    want, _ = reference(rope_type="linear", factor=4.0)
    spec = rope_spec(RopeParams(1e4, HEAD_DIM, "linear", 4.0), pairs="adjacent")
    torch.testing.assert_close(spec.inv_freq, want, rtol=1e-6, atol=0)
    assert spec.pairs == "adjacent"


@pytest.mark.parametrize("factor", [2.0, 16.0, 40.0])
@pytest.mark.parametrize(("fast", "slow"), [(32.0, 1.0), (16.0, 2.0)])
@pytest.mark.parametrize("original", [256, 4096])
def test_yarn_equals_transformers(factor, fast, slow, original):
    want, magnitude = reference(
        rope_type="yarn",
        factor=factor,
        beta_fast=fast,
        beta_slow=slow,
        original_max_position_embeddings=original,
    )
    params = RopeParams(1e4, HEAD_DIM, "yarn", factor, original, beta_fast=fast, beta_slow=slow)
    spec = rope_spec(params, pairs="halves")
    torch.testing.assert_close(spec.inv_freq, want, rtol=1e-5, atol=0)
    assert spec.magnitude == pytest.approx(magnitude)


def test_factors_divide_the_frequencies():
    factors = torch.linspace(1, 8, HEAD_DIM // 2)
    plain = rope_spec(RopeParams(1e4, HEAD_DIM), pairs="halves").inv_freq
    scaled = rope_spec(RopeParams(1e4, HEAD_DIM), pairs="halves", factors=factors).inv_freq
    torch.testing.assert_close(scaled * factors, plain)


@pytest.mark.parametrize("context", [256, 1024])
def test_longrope_equals_transformers(context):
    short, long = [1.0 + j / 32 for j in range(32)], [2.0 + j for j in range(32)]
    config = LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        max_position_embeddings=1024,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": 512,
            "factor": 2.0,
        },
    )
    want, magnitude = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=context)
    params = RopeParams(1e4, HEAD_DIM, "longrope", 2.0, 512, attention_factor=magnitude)
    name = long_factors(params, context)
    factors = torch.tensor({"rope_factors_short": short, "rope_factors_long": long}[name])
    spec = rope_spec(params, pairs="halves", factors=factors)
    torch.testing.assert_close(spec.inv_freq, want, rtol=1e-6, atol=0)
    assert spec.magnitude == magnitude


def test_a_magnitude_can_be_given_and_the_rest_of_the_spec_is_passed_on():
    params = RopeParams(1e4, HEAD_DIM, "yarn", 16.0, 65536)
    spec = rope_spec(
        params, pairs="adjacent", magnitude=1.0, part="last", sections=(16, 8, 8), interleaved_sections=True
    )
    assert (spec.magnitude, spec.part, spec.sections, spec.interleaved_sections) == (
        1.0,
        "last",
        (16, 8, 8),
        True,
    )
    assert rope_spec(params, pairs="halves").magnitude == pytest.approx(1.0 + 0.1 * np.log(16))


def test_proportional_factors_leave_pairs_still():
    factors = torch.cat([torch.ones(8), torch.full((24,), 1e30)])
    spec = rope_spec(RopeParams(1e6, HEAD_DIM), pairs="halves", factors=factors)
    angle = spec.inv_freq * 262144
    assert bool((angle[8:] < 1e-20).all())
    np.testing.assert_allclose(spec.inv_freq[:8], [1e6 ** (-2 * j / HEAD_DIM) for j in range(8)], rtol=1e-6)


def test_a_norm_without_weight_changes_no_bit():
    x = torch.randn(3, 8)
    norm = unit_norm(8, 1e-6)
    assert torch.nn.functional.rms_norm(x, (8,), norm.weight, 1e-6).equal(
        torch.nn.functional.rms_norm(x, (8,), None, 1e-6)
    )


def test_factors_of_the_wrong_number_are_refused():
    with pytest.raises(ModelFormatError, match=r"'rope_freqs.weight' has the shape \[3\]; wanted \[32\]"):
        rope_spec(RopeParams(1e4, HEAD_DIM), pairs="halves", factors=torch.ones(3))


# --- metadata


def test_rope_keys(tmp_path):
    keys = {
        "any.rope.freq_base": 5e5,
        "any.rope.dimension_count": 32,
        "any.rope.scaling.type": "yarn",
        "any.rope.scaling.factor": 4.0,
        "any.rope.scaling.original_context_length": 512,
        "any.rope.scaling.yarn_beta_fast": 20.0,
        "any.rope.scaling.yarn_beta_slow": 2.0,
        "any.rope.scaling.yarn_attn_factor": 0.5,
        "any.rope.scaling.yarn_ext_factor": 0.25,
    }
    params = read_rope(header_of(tmp_path, keys), HEAD_DIM)
    assert params == RopeParams(5e5, 32, "yarn", 4.0, 512, 0.5, 0.25, 20.0, 2.0)


@pytest.mark.parametrize(
    ("keys", "scaling", "factor"),
    [
        ({}, "none", 1.0),
        ({"any.rope.scaling.factor": 2.0}, "linear", 2.0),
        ({"any.rope.scale_linear": 2.0}, "linear", 2.0),
        ({"any.rope.scaling.type": "none", "any.rope.scaling.factor": 2.0}, "none", 1.0),
        ({"any.rope.scaling.type": "yarn", "any.rope.scaling.factor": 1.0}, "none", 1.0),
    ],
)
def test_rope_scaling_old_and_new(tmp_path, keys, scaling, factor):
    params = read_rope(header_of(tmp_path, keys), HEAD_DIM)
    assert (params.scaling, params.factor) == (scaling, factor)


def test_longrope_is_read_by_those_who_ask_for_it(tmp_path):
    keys = {"any.rope.scaling.type": "longrope", "any.rope.scaling.original_context_length": 512}
    header = header_of(tmp_path, {**keys, "any.rope.scaling.attn_factor": 1.19})
    params = read_rope(header, HEAD_DIM, longrope=True)
    assert (params.scaling, params.original_context) == ("longrope", 512)
    assert params.attention_factor == pytest.approx(1.19)
    with pytest.raises(ModelFormatError, match=r"'longrope'; wanted one of 'none', 'linear', 'yarn'"):
        read_rope(header, HEAD_DIM)


def test_layers_with_a_window_have_keys_of_their_own(tmp_path):
    keys = {"any.rope.freq_base": 1e6, "any.rope.scaling.factor": 8.0}
    assert read_window_rope(header_of(tmp_path, keys), HEAD_DIM) == RopeParams(1e4, HEAD_DIM)
    keys |= {"any.rope.freq_base_swa": 5e3, "any.rope.dimension_count_swa": 32}
    assert read_window_rope(header_of(tmp_path, keys), HEAD_DIM) == RopeParams(5e3, 32)
    for key, value in (("any.rope.freq_base_swa", 0.0), ("any.rope.dimension_count_swa", 31)):
        with pytest.raises(ModelFormatError, match=key):
            read_window_rope(header_of(tmp_path, {key: value}), HEAD_DIM)


def test_yarn_without_an_original_context_takes_the_context(tmp_path):
    keys = {"any.rope.scaling.type": "yarn", "any.rope.scaling.factor": 2.0}
    assert read_rope(header_of(tmp_path, keys), HEAD_DIM).original_context == 2048


def test_the_trunk_leaves_out_mtp_blocks(tmp_path):
    keys = {"any.nextn_predict_layers": 1, "any.feed_forward_length": [4, 5, 6]}
    params = read_decoder(header_of(tmp_path, {**keys, "any.attention.head_count": [2, 4, 8]}))
    assert params.num_layers == 2
    assert params.ffn == (4, 5)
    assert params.heads == params.kv_heads == (2, 4)


def test_the_layout_follows_the_params(tmp_path):
    params = read_decoder(header_of(tmp_path, {"any.attention.value_length": 16}))
    layout = full_attention_layout(params)
    assert [pages.name for pages in layout.pages] == ["blk.0.kv", "blk.1.kv", "blk.2.kv"]
    assert layout.pages[2].fields["k"].shape == (2, 64)
    assert layout.pages[2].fields["v"].shape == (2, 16)
    assert layout.groups[0].window is None


def test_layers_with_one_window_share_a_group(tmp_path):
    layout = full_attention_layout(read_decoder(header_of(tmp_path)), (16, None, 16))
    assert {(group.name, group.window) for group in layout.groups} == {("window.16", 16), ("full", None)}
    assert [pages.group for pages in layout.pages] == ["window.16", "full", "window.16"]


def test_the_spec_of_a_header(tmp_path):
    header = header_of(tmp_path, {"tokenizer.ggml.eos_token_id": 4})
    params = read_decoder(header)
    layout = full_attention_layout(params)
    spec = model_spec(header, params, layout, details={"more": 1}, streams=4, position_axes=3)
    assert (spec.arch, spec.num_layers, spec.hidden, spec.vocab, spec.context) == ("any", 3, 128, 10, 2048)
    assert (spec.tap_width, spec.final_width, spec.position_axes, spec.tree) == (512, 512, 3, "any")
    assert spec.details == {"decoder": params, "more": 1}
    assert spec.layout is layout
    assert spec.tokens == {"eos": (4,)}
    assert (spec.parameters, spec.weight_bytes, spec.active_bytes) == (1280, 5120, 5120)


def test_experts_that_a_token_does_not_use_are_not_active(tmp_path):
    tensors = {
        "blk.0.ffn_up_exps.weight": np.zeros((8, 3, 4), np.float32),
        "blk.0.ffn_up_shexp.weight": np.zeros((3, 4), np.float32),
        "output.weight": np.zeros((10, 128), np.float32),
    }
    totals = weight_totals(header_of(tmp_path, tensors=tensors), experts_used=2)
    assert totals.weight_bytes == 2 * 5120 + 8 * 48 + 48
    assert totals.active_bytes == 5120 + 2 * 48 + 48
    assert totals.prompt_parameters == 2 * 12 + 12, "neither the table nor the head"


def test_widths_of_layers_are_read_from_the_names_of_their_matrices(tmp_path):
    shapes = {
        "blk.0.attn_q": (6, 4), "blk.0.attn_k": (2, 4), "blk.0.attn_v": (3, 4), "blk.0.attn_output": (4, 9),
        "blk.0.ffn_gate": (5, 4), "blk.0.ffn_up": (5, 4), "blk.0.ffn_down": (4, 5), "blk.0.attn_norm": (4,),
        "blk.0.post_ffw_norm": (4,), "blk.1.attn_qkv": (11, 4), "blk.1.attn_gate": (7, 4),
        "blk.1.ssm_conv1d": (99, 4), "blk.1.ssm_out": (4, 7), "blk.1.ffn_gate_inp": (8, 4),
        "blk.1.ffn_gate_up_exps": (8, 6, 4), "blk.1.ffn_down_exps": (8, 4, 3), "blk.1.ffn_up_shexp": (2, 4),
        "blk.1.ffn_gate_shexp": (2, 4), "blk.1.ffn_down_shexp": (4, 2), "blk.1.ffn_gate_inp_shexp": (1, 4),
        "blk.3.attn_q": (88, 4),
    }  # fmt: skip
    tensors = {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    header = header_of(tmp_path, tensors=tensors)
    assert layer_widths(header, 3, experts_used=2) == (
        LayerWidths(mixer_in=11, mixer_out=9, ffn_in=10, ffn_out=5, norm_behind=4),
        LayerWidths(18, 7, ffn_in=4, ffn_out=2, expert_in=6, expert_out=3, experts=8, experts_used=2),
        LayerWidths(),
    )
    spec = model_spec(header, read_decoder(header), full_attention_layout(read_decoder(header)))
    assert [one.experts_used for one in spec.widths] == [0, 0, 0]


def test_shapes_of_a_layer_and_their_check(tmp_path):
    params = read_decoder(
        header_of(tmp_path, {"any.attention.head_count_kv": 1, "any.attention.value_length": 16})
    )
    assert attention_shapes(params, 2) == {
        "attn_q": (128, 128), "attn_k": (64, 128), "attn_v": (16, 128), "attn_output": (128, 32),
    }  # fmt: skip
    assert mlp_shapes(8, 3, "_exps", 5) == {
        "ffn_gate_exps": (5, 3, 8), "ffn_up_exps": (5, 3, 8), "ffn_down_exps": (5, 8, 3),
    }  # fmt: skip
    weights = {
        f"blk.2.{name}.weight": np.zeros(shape, np.float32) for name, shape in mlp_shapes(8, 3).items()
    }
    check_tensors(header_of(tmp_path, tensors=weights), mlp_shapes(8, 3), "blk.2.")
    for changes, wrong in (
        ({"blk.2.ffn_up.weight": np.zeros((4, 8), np.float32)}, "'blk.2.ffn_up.weight'"),
        ({"blk.2.ffn_up.bias": np.zeros(4, np.float32)}, "'blk.2.ffn_up.bias'"),
    ):
        with pytest.raises(ModelFormatError, match=wrong):
            check_tensors(header_of(tmp_path, tensors={**weights, **changes}), mlp_shapes(8, 3), "blk.2.")


def test_both_ends_of_a_model_are_checked(tmp_path):
    norm = {"output_norm.weight": np.zeros(128, np.float32)}
    params = read_decoder(header_of(tmp_path))
    check_ends(header_of(tmp_path, tensors=norm), params)
    with pytest.raises(ModelFormatError, match=r"'output_norm.weight' is missing"):
        check_ends(header_of(tmp_path), params)
    head = {"output.weight": np.zeros((9, 128), np.float32)}
    with pytest.raises(ModelFormatError, match=r"'output.weight' has the shape"):
        check_ends(header_of(tmp_path, tensors={**norm, **head}), params)


def test_the_vocabulary_counts_tokens_then_the_key_then_rows(tmp_path):
    assert vocab_size(header_of(tmp_path)) == 10
    assert vocab_size(header_of(tmp_path, {"any.vocab_size": 9})) == 9
    tokens = ["a", "b", "c"]
    assert vocab_size(header_of(tmp_path, {"any.vocab_size": 9, "tokenizer.ggml.tokens": tokens})) == 3


def test_special_tokens(tmp_path):
    ids = {"bos": 1, "eot": 7, "padding": 0, "unknown": 3}
    keys = {f"tokenizer.ggml.{name}_token_id": token for name, token in ids.items()}
    found = special_tokens(header_of(tmp_path, keys))
    assert found == {"bos": (1,), "eot": (7,), "pad": (0,), "unk": (3,)}


def test_weight_totals_of_tied_and_untied_models(tmp_path):
    tied = weight_totals(header_of(tmp_path, tensors={"x.weight": np.zeros((4, 4), np.float32)}))
    assert (tied.parameters, tied.weight_bytes, tied.active_bytes) == (1296, 5184, 5184)
    assert tied.prompt_parameters == 16
    head = {"output.weight": np.zeros((10, 128), np.float16)}
    untied = weight_totals(header_of(tmp_path, tensors=head))
    assert (untied.parameters, untied.weight_bytes, untied.active_bytes) == (2560, 5120 + 2560, 2560)
    tensors = {"x.weight": np.zeros((4, 4), np.float32)}
    some = weight_totals(header_of(tmp_path, tensors=tensors), ["x.weight"])
    assert some.parameters == 16


def test_reading_metadata_imports_no_torch():
    probe = "import sys, luce_core.model.metadata, luce_core.ops; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_weight_totals_leave_out_what_stays_in_the_file(tmp_path):
    tensors = {"x.weight": np.zeros((4, 4), np.float32), "t.weight": np.zeros((5, 4), np.float32)}
    header = header_of(tmp_path, tensors=tensors)
    plain, totals = weight_totals(header), weight_totals(header, stored=["t.weight"])
    assert totals.stored == {"t.weight": StoredSize(20, 80)}
    assert plain.parameters - totals.parameters == 20
    assert plain.weight_bytes - totals.weight_bytes == plain.active_bytes - totals.active_bytes == 80
    assert not plain.stored
    with pytest.raises(ModelFormatError, match="'absent' is missing"):
        weight_totals(header, stored=["absent"])
