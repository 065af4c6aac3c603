"""The sizes that were published, from headers without weights: parameters, bytes, what a sequence costs.

Tensor counts are those of the published files; parameters those of the published checkpoints of Gemma 3,
and of Gemma 4 (30.70 B published for 31B) counted by hand. Bytes per token follow from the geometry:
layers · heads · dimension · 2 bytes, once for values alone, twice for keys and values.
"""

from __future__ import annotations

import pytest
from luce_arch_gemma import hooks
from luce_arch_gemma.describe import describe

from luce_core.cache.layout import block_bytes, token_bytes
from luce_core.contracts import CacheOptions, DeviceInfo, Equivalence, Group, OpImpl, OpLayer, StateSizes
from luce_core.gguf import read_header, summarize
from luce_core.options import load_options
from luce_core.plan import make_plan, state_sizes
from luce_core.plugins import from_modules
from luce_core.testing.fake_plugins import make_plugin

from .headers import gemma3_metadata, gemma4_metadata, shapes_of, write_header

VOCAB = 262144
PATTERN_60, PATTERN_30 = [[(layer + 1) % 6 != 0 for layer in range(count)] for count in (60, 30)]
GEMMA3_270M = gemma3_metadata(layers=18, width=640, heads=4, kv_heads=1, dim=256, ffn=2048, window=512)
GEMMA3_1B = gemma3_metadata(layers=26, width=1152, heads=4, kv_heads=1, dim=256, ffn=6912, window=512)
GEMMA4_31B = gemma4_metadata(
    layers=60, width=5376, heads=32, kv_heads=(16, 4), dims=(256, 512), ffn=21504, pattern=PATTERN_60
)
GEMMA4_26B = gemma4_metadata(
    layers=30,
    width=2816,
    heads=16,
    kv_heads=(8, 2),
    dims=(256, 512),
    ffn=2112,
    pattern=PATTERN_30,
    **{
        "gemma4.expert_count": 128,
        "gemma4.expert_used_count": 8,
        "gemma4.expert_feed_forward_length": 704,
    },
)
MODELS = {"270m": GEMMA3_270M, "1b": GEMMA3_1B, "31b": GEMMA4_31B, "26b": GEMMA4_26B}
GIB = 1 << 30
DEVICE = DeviceInfo("cpu", "a large CPU", 96 * GIB, 100e9, frozenset({"cpu"}), provenance="made up")
PACKS = OpLayer("packs", (OpImpl("pack_linear", "nowhere:f"),), Equivalence.ROUNDING, frozenset({"cpu"}))


@pytest.fixture
def header(tmp_path):
    def make(name):
        metadata = MODELS[name]
        vocab = {f"{metadata['general.architecture']}.vocab_size": VOCAB}
        shapes = shapes_of(metadata, VOCAB, k_eq_v=True)
        return read_header(write_header(tmp_path / f"{name}.gguf", {**metadata, **vocab}, shapes))

    return make


def state_per_token(spec, group, cache_type="f16"):
    sizes = StateSizes(1, {}, 1, 1, cache_type, cache_type)
    return block_bytes(spec.layout, group, sizes)


@pytest.mark.parametrize(
    ("name", "parameters", "tensors"),
    [
        ("270m", 268_098_176, 18 * 13 + 2),
        ("1b", 999_885_952, 26 * 13 + 2),
        ("31b", 30_697_345_596, 833),
        ("26b", 25_233_142_046, 658),
    ],
)
def test_parameters_and_tensors(header, name, parameters, tensors):
    found = header(name)
    spec = describe(found, CacheOptions(0))
    assert (spec.parameters, len(found.tensors)) == (parameters, tensors)
    assert summarize(found).num_weights == parameters


@pytest.mark.parametrize(
    ("name", "whole", "local", "window"),
    [
        ("270m", 3 * 1 * 256 * 2 * 2, 15 * 1 * 256 * 2 * 2, 512),
        ("1b", 4 * 1 * 256 * 2 * 2, 22 * 1 * 256 * 2 * 2, 512),
        ("31b", 40_960, 50 * 16 * 256 * 2 * 2, 1024),
        ("26b", 5 * 2 * 512 * 2, 25 * 8 * 256 * 2 * 2, 1024),
    ],
)
def test_state_per_token(header, name, whole, local, window):
    spec = describe(header(name), CacheOptions(0))
    assert spec.layout.groups == (Group(f"window.{window}", window=window), Group("full"))
    assert state_per_token(spec, "full") == whole
    assert token_bytes(spec.layout, StateSizes(32, {}, 1, 1)) == whole
    assert state_per_token(spec, f"window.{window}") == local


def test_values_alone_halve_what_a_token_of_31b_costs(header, tmp_path):
    whole = shapes_of(GEMMA4_31B, VOCAB, k_eq_v=False)
    keys = {**GEMMA4_31B, "gemma4.vocab_size": VOCAB}
    with_keys = describe(read_header(write_header(tmp_path / "kv.gguf", keys, whole)), CacheOptions(0))
    assert state_per_token(with_keys, "full") == 81_920
    assert state_per_token(describe(header("31b"), CacheOptions(0)), "full") == 40_960


def test_a_token_of_26b_reads_eight_experts_of_128(header):
    spec = describe(header("26b"), CacheOptions(0))
    # gate and up in Q4_K, 144 bytes per 256 weights; down in Q5_0, 22 per 32: 704 is no multiple of 256
    expert = 2 * 704 * 2816 * 144 // 256 + 2816 * 704 * 22 // 32 + 4  # and its factor
    assert spec.weight_bytes - spec.active_bytes == 30 * (128 - 8) * expert


def test_a_token_of_a_dense_model_reads_everything(header):
    for name in ("270m", "31b"):
        spec = describe(header(name), CacheOptions(0))
        assert spec.active_bytes == spec.weight_bytes


@pytest.mark.parametrize("name", MODELS)
def test_weight_bytes_are_those_of_the_file(header, name):
    found = header(name)
    spec = describe(found, CacheOptions(0))
    beside = found.path.stat().st_size - spec.weight_bytes
    assert 0 < beside < 200 * len(found.tensors)  # the tables, and what rounds tensors up to 32 bytes
    assert 4.5 < 8 * spec.weight_bytes / spec.parameters < 8.5


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_counts_every_byte_of_state(header, name):
    """16384 tokens for two sequences: the claim is what two such contexts take in blocks, no byte more."""
    rig = make_plugin("rig", luce_register_devices=[DEVICE], luce_register_ops=[PACKS], luce_extend_plan=list)
    registry = from_modules([hooks, rig])
    found = header(name)
    asked = {"model": str(found.path), "ctx_size": "16384", "max_sequences": "2", "op_layer": "packs"}
    plan = make_plan(load_options(registry, asked, {}, ()), found, registry, [DEVICE])
    spec, sizes = plan.models[0].spec, state_sizes(plan)
    window = spec.layout.groups[0].name
    claims = {claim.kind: claim.num_bytes for claim in plan.claims if claim.device == "cpu"}
    assert claims["weights"] == spec.weight_bytes
    blocks = sizes.num_blocks
    tokens = {group: count * sizes.block_tokens for group, count in blocks.items()}
    per_token = {group: state_per_token(spec, group) for group in ("full", window)}
    assert claims["state"] == sum(tokens[f"target/{group}"] * size for group, size in per_token.items())
    assert 2 * 16384 <= tokens["target/full"] <= 2 * (16384 + 3 * sizes.block_tokens + sizes.max_held_rows)
    # the window of a sequence, a chunk beside it, and as much again for checkpoints
    assert tokens[f"target/{window}"] < tokens["target/full"]
