"""The sizes that were published, from headers without weights: parameters, bytes, what a sequence costs.

Parameters are those of the published checkpoints. Bytes per token follow from the geometry: layers · key-
value heads · dimension · 2 (keys and values) · 2 bytes.
"""

from __future__ import annotations

import pytest
from luce_arch_qwen3 import hooks
from luce_arch_qwen3.describe import describe

from luce_core.cache.layout import token_bytes
from luce_core.contracts import CacheOptions, DeviceInfo, Equivalence, OpImpl, OpLayer, StateSizes
from luce_core.gguf import read_header, summarize
from luce_core.options import load_options
from luce_core.plan import make_plan, state_sizes
from luce_core.plugins import from_modules
from luce_core.testing.fake_plugins import make_plugin
from luce_core.testing.gguf_header import write_header

from .headers import metadata, shapes_of

VOCAB = 151936
MODELS = {
    "0.6b": (metadata("qwen3", layers=28, width=1024, heads=16, kv_heads=8, ffn=3072), True),
    "1.7b": (metadata("qwen3", layers=28, width=2048, heads=16, kv_heads=8, ffn=6144), True),
    "4b": (metadata("qwen3", layers=36, width=2560, heads=32, kv_heads=8, ffn=9728), True),
    "8b": (metadata("qwen3", layers=36, width=4096, heads=32, kv_heads=8, ffn=12288), False),
    "30b": (
        metadata(
            "qwen3moe",
            layers=48,
            width=2048,
            heads=32,
            kv_heads=4,
            ffn=6144,
            expert_count=128,
            expert_used_count=8,
            expert_feed_forward_length=768,
        ),
        False,
    ),
}
GIB = 1 << 30
DEVICE = DeviceInfo("cpu", "a large CPU", 96 * GIB, 100e9, frozenset({"cpu"}), provenance="made up")
PACKS = OpLayer("packs", (OpImpl("pack_linear", "nowhere:f"),), Equivalence.ROUNDING, frozenset({"cpu"}))


@pytest.fixture
def header(tmp_path):
    def make(name):
        keys, tied = MODELS[name]
        keys = {**keys, f"{keys['general.architecture']}.vocab_size": VOCAB}
        return read_header(write_header(tmp_path / f"{name}.gguf", keys, shapes_of(keys, VOCAB, tied=tied)))

    return make


@pytest.mark.parametrize(
    ("name", "parameters", "tensors", "token"),
    [
        ("0.6b", 596_049_920, 28 * 11 + 2, 114_688),
        ("1.7b", 1_720_574_976, 28 * 11 + 2, 114_688),
        ("4b", 4_022_468_096, 36 * 11 + 2, 147_456),
        ("8b", 8_190_735_360, 36 * 11 + 3, 147_456),
        ("30b", 30_532_122_624, 48 * 12 + 3, 98_304),
    ],
)
def test_parameters_and_state_per_token(header, name, parameters, tensors, token):
    found = header(name)
    spec = describe(found, CacheOptions(0))
    assert (spec.parameters, len(found.tensors)) == (parameters, tensors)
    assert summarize(found).num_weights == parameters
    assert token_bytes(spec.layout, StateSizes(32, {}, 1, 1)) == token


def test_weight_bytes_are_those_of_the_file(header):
    found = header("0.6b")
    spec = describe(found, CacheOptions(0))
    assert 0 < found.path.stat().st_size - spec.weight_bytes < 200 * len(found.tensors)
    assert 4.5 < 8 * spec.weight_bytes / spec.parameters < 6.6
    assert spec.active_bytes == spec.weight_bytes  # tied: every matrix is read


def test_a_token_of_30b_reads_eight_experts_of_128(header):
    """8 · 3 · 768 · 2048 = 37.7 M weights a layer, 21.2 MB in Q4_K."""
    spec = describe(header("30b"), CacheOptions(0))
    expert = 3 * 768 * 2048 * 144 // 256
    table = VOCAB * 2048 * 210 // 256
    assert 8 * expert == 21_233_664
    assert spec.weight_bytes - spec.active_bytes == 48 * (128 - 8) * expert + table


@pytest.mark.parametrize("name", ["0.6b", "30b"])
def test_the_plan_counts_every_byte_of_state(header, name):
    """16384 tokens for two sequences: the claim is what two such contexts take in blocks, no byte more."""
    rig = make_plugin("rig", luce_register_devices=[DEVICE], luce_register_ops=[PACKS], luce_extend_plan=list)
    registry = from_modules([hooks, rig])
    found = header(name)
    asked = {"model": str(found.path), "ctx_size": "16384", "max_sequences": "2", "op_layer": "packs"}
    plan = make_plan(load_options(registry, asked, {}, ()), found, registry, [DEVICE])
    spec, sizes = plan.models[0].spec, state_sizes(plan)
    claims = {claim.kind: claim.num_bytes for claim in plan.claims if claim.device == "cpu"}
    assert claims["weights"] == spec.weight_bytes
    tokens = sizes.num_blocks["target/full"] * sizes.block_tokens
    assert claims["state"] == tokens * token_bytes(spec.layout, sizes)
    assert 2 * 16384 <= tokens <= 2 * (16384 + 3 * sizes.block_tokens + sizes.max_held_rows)
