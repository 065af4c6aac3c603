"""Ling 3.0 Flash from a header without weights: parameters, bytes, what a sequence costs, what is refused."""

from __future__ import annotations

import pytest
from luce_arch_bailing import hooks
from luce_arch_bailing.describe import describe
from luce_arch_bailing.geometries import FLASH, VOCAB, geometries, shapes_of, with_prefix

from luce_core import synth
from luce_core.cache.layout import log_bytes, slot_bytes, token_bytes
from luce_core.contracts import CacheOptions, DeviceInfo, Equivalence, OpImpl, OpLayer, StateSizes
from luce_core.errors import ModelFormatError
from luce_core.gguf import read_header
from luce_core.options import load_options
from luce_core.plan import make_plan, state_sizes
from luce_core.plugins import from_modules
from luce_core.testing.fake_plugins import make_plugin
from luce_core.testing.gguf_header import write_header

GIB = 1 << 30
DEVICE = DeviceInfo("cpu", "a large CPU", 400 * GIB, 100e9, frozenset({"cpu"}), provenance="made up")
PACKS = OpLayer("packs", (OpImpl("pack_linear", "nowhere:f"),), Equivalence.ROUNDING, frozenset({"cpu"}))
A = "bailingmoe3."
SMALL = FLASH | {
    "block_count": 3,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "vocab_size": 50,
    "attention.head_count": 2,
    "attention.head_count_kv": [0, 1, 1],
    "attention.key_length": 24,
    "attention.key_length_mla": 16,
    "attention.value_length_mla": 10,
    "attention.kv_lora_rank": 16,
    "attention.q_lora_rank": 12,
    "rope.dimension_count": 8,
    "kda.head_dim": 6,
    "expert_count": 6,
    "expert_used_count": 2,
    "expert_group_count": 3,
    "expert_group_used_count": 2,
    "expert_feed_forward_length": 14,
    "expert_shared_feed_forward_length": 14,
    "swiglu_clamp_exp": [0.0, 0.0, 1.0],
    "swiglu_clamp_shexp": [0.0, 0.0, 1.0],
}


def header_of(folder, keys, shapes=None):
    return read_header(write_header(folder / "m.gguf", with_prefix(keys), shapes or shapes_of(keys)))


def flash_of(folder):
    (flash,) = (geometry for geometry in geometries() if geometry.name == "ling-3.0-flash")
    path = folder / "flash.gguf"
    synth.write(flash, "q4_k_m", path, header_only=True, tokenizer=False)
    return read_header(path)


def described(folder, keys, shapes=None):
    return describe(header_of(folder, keys, shapes), CacheOptions(0))


def test_flash(tmp_path):
    """Parameters as counted by hand of the published checkpoint; state as its geometry gives it."""
    header = flash_of(tmp_path)
    spec = describe(header, CacheOptions(0))
    assert round(spec.parameters / 1e9, 3) == 124.414
    assert (spec.num_layers, spec.context, spec.hidden, spec.tree) == (42, 262144, 2560, "any")
    sizes = StateSizes(32, {}, 1, 1)
    assert token_bytes(spec.layout, sizes) == 7 * 576 * 2 == 8064
    assert len(spec.layout.slots) == 2 * 35
    matrices, tails = 35 * 32 * 128 * 128 * 4, 35 * 3 * 12288 * 4
    assert slot_bytes(spec.layout, sizes) == matrices + tails
    assert log_bytes(spec.layout, sizes) == 35 * (12288 + 3 * 32 * 128) * 4  # what one held row leaves


def test_a_token_of_flash_reads_eight_experts_of_512(tmp_path):
    spec = describe(flash_of(tmp_path), CacheOptions(0))
    # Q4_K: 144 bytes per 256 weights, 210 in the down matrices of some layers. The table is read by row.
    expert = 3 * 768 * 2560 * 144 // 256
    wide = sum(1 for layer in range(2, 42) if layer < 5 or layer >= 36 or (layer - 5) % 3 == 2)
    wider = wide * 768 * 2560 * (210 - 144) // 256
    table = VOCAB * 2560 * 144 // 256
    assert spec.weight_bytes - spec.active_bytes == (512 - 8) * (40 * expert + wider) + table
    assert 4.5 < 8 * spec.weight_bytes / spec.parameters < 5


def test_the_plan_counts_every_byte_of_state(tmp_path):
    rig = make_plugin("rig", luce_register_devices=[DEVICE], luce_register_ops=[PACKS], luce_extend_plan=list)
    registry = from_modules([hooks, rig])
    header = flash_of(tmp_path)
    asked = {"model": str(header.path), "ctx_size": "16384", "max_sequences": "2", "op_layer": "packs"}
    plan = make_plan(load_options(registry, asked, {}, ()), header, registry, [DEVICE])
    spec, sizes = plan.models[0].spec, state_sizes(plan)
    claims = {claim.kind: claim.num_bytes for claim in plan.claims if claim.device == "cpu"}
    assert claims["weights"] == spec.weight_bytes
    tokens = sizes.num_blocks["target/full"] * sizes.block_tokens
    assert 2 * 16384 <= tokens <= 2 * (16384 + 3 * sizes.block_tokens + sizes.max_held_rows)
    row = 35 * (12288 + 3 * 32 * 128) * 4
    slots = sizes.num_slots * (35 * (32 * 128 * 128 + 3 * 12288) * 4 + sizes.max_held_rows * row)
    assert claims["state"] == 8064 * tokens + slots


def test_the_small_one_is_described(tmp_path):
    spec = described(tmp_path, SMALL)
    assert [pages.layer for pages in spec.layout.pages] == [1, 2]
    assert [slot.name for slot in spec.layout.slots] == ["blk.0.conv", "blk.0.delta"]
    params = spec.details["decoder"]
    assert [layer.clamp for layer in params.layers] == [0.0, 0.0, 1.0]
    assert (params.mla.nope, params.mla.q_rank, params.moe.experts.ffn) == (8, 12, 14)


def test_files_of_the_first_converters_have_no_limits(tmp_path):
    keys = {key: value for key, value in SMALL.items() if "clamp" not in key}
    layers = described(tmp_path, keys).details["decoder"].layers
    assert [(layer.clamp, layer.shared_clamp) for layer in layers] == [(0.0, 0.0)] * 3


REQUIRED = set(SMALL) - {
    "vocab_size",  # the table's rows
    "attention.key_length",
    "attention.value_length",
    "attention.q_lora_rank",
    "rope.freq_base",
    "kda.safe_gate",
    "kda.gate_lower_bound",
    "leading_dense_block_count",
    "expert_shared_count",
    "expert_shared_feed_forward_length",
    "expert_group_count",
    "expert_group_used_count",
    "expert_weights_norm",
    "expert_weights_scale",
    "swiglu_clamp_exp",
    "swiglu_clamp_shexp",
}


@pytest.mark.parametrize("key", sorted(REQUIRED))
def test_a_missing_key_is_named(tmp_path, key):
    keys = {name: value for name, value in SMALL.items() if name != key}
    with pytest.raises(ModelFormatError, match=f"'{A}{key}' is missing"):
        described(tmp_path, keys, shapes_of(SMALL))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 0),
        ("nextn_predict_layers", 3),
        ("embedding_length", 0),
        ("feed_forward_length", [48, 48, 48]),
        ("attention.head_count_kv", [0, 1]),
        ("attention.key_length", 25),
        ("attention.key_length_mla", 0),
        ("attention.kv_lora_rank", 0),
        ("rope.dimension_count", 7),
        ("rope.dimension_count", 16),
        ("rope.freq_base", 0.0),
        ("kda.safe_gate", False),
        ("kda.gate_lower_bound", 0.5),
        ("ssm.conv_kernel", 1),
        ("expert_count", 0),
        ("expert_used_count", 5),
        ("expert_group_count", 4),
        ("expert_group_count", 6),
        ("expert_group_used_count", 4),
        ("expert_gating_func", 1),
        ("expert_weights_scale", "much"),
        ("leading_dense_block_count", 4),
        ("swiglu_clamp_exp", [1.0]),
        ("swiglu_clamp_shexp", [0.0, 0.0, -1.0]),
    ],
)
def test_a_key_out_of_range_is_named(tmp_path, key, value):
    with pytest.raises(ModelFormatError, match=f"'{A}{key}'"):
        described(tmp_path, {**SMALL, key: value}, shapes_of(SMALL))


def test_scaled_positions_are_refused(tmp_path):
    keys = {**SMALL, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    with pytest.raises(ModelFormatError, match=r"'bailingmoe3.rope.scaling.type' is 'yarn'"):
        described(tmp_path, keys, shapes_of(SMALL))


TENSORS = [name for name in shapes_of(SMALL | {"leading_dense_block_count": 1}) if name != "output.weight"]


@pytest.mark.parametrize("name", TENSORS)
def test_a_missing_or_misshapen_tensor_is_named(tmp_path, name):
    keys = {**SMALL, "leading_dense_block_count": 1}
    shapes = shapes_of(keys)
    wrong = {**shapes, name: (shapes[name][0] + 1, *shapes[name][1:])}
    for broken, complaint in ((wrong, "has the shape"), ({**shapes, name: None}, "is missing")):
        with pytest.raises(ModelFormatError, match=f"'{name}' {complaint}"):
            described(tmp_path, keys, {n: shape for n, shape in broken.items() if shape})


def test_a_bias_that_does_not_fit_is_named(tmp_path):
    with pytest.raises(ModelFormatError, match=r"'blk.0.attn_output.bias' has the shape"):
        described(tmp_path, SMALL, {**shapes_of(SMALL), "blk.0.attn_output.bias": (31,)})
