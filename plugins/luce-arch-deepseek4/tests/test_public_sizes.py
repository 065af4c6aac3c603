"""DeepSeek V4 Flash from a header without weights: parameters, bytes, what a sequence costs, what is
refused.
"""

from __future__ import annotations

import pytest
from luce_arch_deepseek4 import hooks
from luce_arch_deepseek4.describe import describe
from luce_arch_deepseek4.geometries import FLASH, VOCAB, geometries, shapes_of, with_prefix

from luce_core import synth
from luce_core.cache.layout import block_bytes, slot_bytes, snapshot_bytes, token_bytes
from luce_core.contracts import CacheOptions, DeviceInfo, Equivalence, Group, OpImpl, OpLayer, StateSizes
from luce_core.errors import ModelFormatError
from luce_core.gguf import read_header
from luce_core.options import load_options
from luce_core.plan import make_plan, state_sizes
from luce_core.plugins import from_modules
from luce_core.testing.fake_plugins import make_plugin
from luce_core.testing.gguf_header import write_header

A = "deepseek4."
GIB = 1 << 30
SMALL = FLASH | {
    "block_count": 3,
    "embedding_length": 32,
    "vocab_size": 50,
    "attention.head_count": 4,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.q_lora_rank": 12,
    "attention.compress_ratios": [0, 4, 128],
    "attention.output_group_count": 2,
    "attention.output_lora_rank": 10,
    "attention.indexer.head_count": 6,
    "attention.indexer.key_length": 14,
    "rope.dimension_count": 8,
    "hyper_connection.count": 3,
    "hash_layer_count": 1,
    "expert_count": 6,
    "expert_used_count": 2,
    "expert_feed_forward_length": 14,
    "swiglu_clamp_exp": [0.5] * 3,
    "swiglu_clamp_shexp": [0.25] * 3,
}
DEVICE = DeviceInfo("cpu", "a large CPU", 400 * GIB, 100e9, frozenset({"cpu"}), provenance="made up")
PACKS = OpLayer("packs", (OpImpl("pack_linear", "nowhere:f"),), Equivalence.ROUNDING, frozenset({"cpu"}))


def format_of(name, shape):
    return "I32" if "tid2eid" in name else "F32" if shape[-1] % 32 or len(shape) == 1 else "Q8_0"


def header_of(folder, keys, shapes=None):
    tensors = shapes or shapes_of(keys)
    return read_header(write_header(folder / "m.gguf", with_prefix(keys), tensors, format_of))


def flash_of(folder, quant="native"):
    (flash,) = (geometry for geometry in geometries() if geometry.name == "deepseek-v4-flash")
    path = folder / f"{quant}.gguf"
    synth.write(flash, quant, path, header_only=True, tokenizer=False)
    return read_header(path)


def described(folder, keys, shapes=None):
    return describe(header_of(folder, keys, shapes), CacheOptions(0))


def test_parameters_and_bytes_of_flash(tmp_path):
    """As counted of the published checkpoint by shapes; without the embedding table, which is read by row."""
    spec = describe(flash_of(tmp_path), CacheOptions(0))
    assert round(spec.parameters / 1e9, 2) == 284.33
    expert = 3 * 4096 * 2048 * 17 // 32
    assert round(43 * 256 * expert / GIB, 1) == 137.1
    assert round((spec.weight_bytes - 43 * 256 * expert) / GIB, 1) == 8.6
    table = VOCAB * 4096 * 2
    assert spec.weight_bytes - spec.active_bytes == 43 * (256 - 6) * expert + table


def test_state_of_flash(tmp_path):
    spec = describe(flash_of(tmp_path), CacheOptions(0))
    assert spec.layout.groups == (
        Group("near", window=128),
        Group("every.4", stride=4),
        Group("every.128", stride=128),
    )
    assert spec.tap_width == spec.final_width == 16384
    sizes = StateSizes(128, {}, 1, 1)
    per_token = {name: block_bytes(spec.layout, name, sizes) / 128 for name in ("every.4", "every.128")}
    assert per_token == {"every.4": 5376 + 1344, "every.128": 160}
    assert token_bytes(spec.layout, sizes) == 6880
    assert block_bytes(spec.layout, "near", sizes) == 43 * 128 * 512 * 2
    selected, index, whole = 21 * 8 * 2048 * 4, 21 * 8 * 512 * 4, 20 * 128 * 1024 * 4
    assert slot_bytes(spec.layout, sizes) == selected + index + whole
    assert snapshot_bytes(spec.layout, sizes, 1280) == (selected + index) // 2


def test_the_plan_counts_every_byte_of_state(tmp_path):
    rig = make_plugin("rig", luce_register_devices=[DEVICE], luce_register_ops=[PACKS], luce_extend_plan=list)
    registry = from_modules([hooks, rig])
    header = flash_of(tmp_path)
    asked = {"model": str(header.path), "ctx_size": "16384", "max_sequences": "2", "op_layer": "packs"}
    plan = make_plan(load_options(registry, asked, {}, ()), header, registry, [DEVICE])
    sizes = state_sizes(plan)
    claims = {claim.kind: claim.num_bytes for claim in plan.claims if claim.device == "cpu"}
    assert claims["weights"] == plan.models[0].spec.weight_bytes
    assert sizes.block_tokens % 128 == 0
    tokens = {group: count * sizes.block_tokens for group, count in sizes.num_blocks.items()}
    assert tokens["target/every.4"] == tokens["target/every.128"] >= 2 * 16384
    assert tokens["target/near"] < tokens["target/every.4"]
    assert claims["state"] >= 6880 * tokens["target/every.4"] + 43 * 1024 * tokens["target/near"]


def test_the_small_one_is_described(tmp_path):
    spec = described(tmp_path, SMALL)
    assert [slot.name for slot in spec.layout.slots] == [
        "blk.1.entries.tail",
        "blk.1.index_keys.tail",
        "blk.2.entries.tail",
    ]
    assert [slot.period for slot in spec.layout.slots] == [4, 4, 128]
    params = spec.details["decoder"]
    assert [(one.hashed, one.clamp, one.shared_clamp) for one in params.layers][:2] == [
        (True, 0.5, 0.25),
        (False, 0.5, 0.25),
    ]
    near, far = params.attention.near_rope, params.attention.far_rope
    assert (near.theta, near.scaling) == (1e4, "none")
    assert (far.theta, far.scaling, far.factor, far.original_context) == (16e4, "yarn", 16.0, 65536)


def test_the_shared_expert_has_the_limit_of_the_others_where_no_key_says(tmp_path):
    keys = {key: value for key, value in SMALL.items() if key != "swiglu_clamp_shexp"}
    layers = described(tmp_path, keys).details["decoder"].layers
    assert [(one.clamp, one.shared_clamp) for one in layers] == [(0.5, 0.5)] * 3


def test_without_selected_layers_no_indexer_is_needed(tmp_path):
    keys = {key: value for key, value in SMALL.items() if "indexer" not in key}
    keys["attention.compress_ratios"] = [0, 128, 16]
    spec = described(tmp_path, keys)
    assert spec.details["decoder"].indexer is None
    assert [group.name for group in spec.layout.groups] == ["near", "every.128", "every.16"]


def test_a_file_of_further_blocks_alone_is_refused(tmp_path):
    keys = {**SMALL, "block_count": 4, "nextn_predict_layers": 1, "attention.compress_ratios": [0, 4, 128, 0]}
    shapes = shapes_of(keys) | {"blk.3.nextn.eh_proj.weight": (32, 64)}
    alone = {
        name: shape for name, shape in shapes.items() if not name.startswith(("blk.0", "blk.1", "blk.2"))
    }
    with pytest.raises(ModelFormatError, match="without the model they belong to"):
        described(tmp_path, keys, alone)


OPTIONAL = {
    "vocab_size",  # the table's rows
    "attention.head_count_kv",
    "attention.value_length",
    "attention.compress_rope_freq_base",
    "hash_layer_count",
    "expert_shared_count",
    "expert_weights_norm",
    "expert_weights_scale",
    "swiglu_clamp_exp",
    "swiglu_clamp_shexp",
}
REQUIRED = sorted(key for key in SMALL if key not in OPTIONAL and not key.startswith("rope."))


@pytest.mark.parametrize("key", REQUIRED)
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
        ("attention.head_count_kv", 2),
        ("attention.value_length", 8),
        ("attention.q_lora_rank", 0),
        ("attention.sliding_window", 0),
        ("attention.compress_ratios", [0, 4]),
        ("attention.compress_ratios", [0, 1, 4]),
        ("attention.compress_rope_freq_base", 0.0),
        ("attention.output_group_count", 3),
        ("attention.indexer.key_length", 7),
        ("attention.indexer.top_k", 0),
        ("rope.dimension_count", 17),
        ("rope.scaling.type", "longrope"),
        ("hyper_connection.count", 0),
        ("hyper_connection.sinkhorn_iterations", 0),
        ("hyper_connection.epsilon", "small"),
        ("hash_layer_count", 4),
        ("expert_count", 0),
        ("expert_used_count", 7),
        ("expert_group_count", 2),
        ("expert_gating_func", 2),
        ("expert_feed_forward_length", [14, 14]),
        ("swiglu_clamp_exp", [1.0]),
        ("swiglu_clamp_shexp", [0.0, 0.0, -1.0]),
    ],
)
def test_a_key_out_of_range_is_named(tmp_path, key, value):
    with pytest.raises(ModelFormatError, match=f"'{A}{key}'"):
        described(tmp_path, {**SMALL, key: value}, shapes_of(SMALL))


SHAPES = shapes_of(SMALL)


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "output.weight"])
def test_a_missing_or_misshapen_tensor_is_named(tmp_path, name):
    wrong = {**SHAPES, name: (SHAPES[name][0] + 1, *SHAPES[name][1:])}
    missing = {other: shape for other, shape in SHAPES.items() if other != name}
    for broken, complaint in ((wrong, "has the shape"), (missing, "is missing")):
        with pytest.raises(ModelFormatError, match=f"'{name}' {complaint}"):
            described(tmp_path, SMALL, broken)
