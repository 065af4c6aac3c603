"""The sizes that were published, from headers without weights: parameters, bytes, what a sequence costs.

Tensor counts are those of the published files; parameters those of the published checkpoints of Gemma 3,
and of Gemma 4 (30.70 B published for 31B) counted by hand. Bytes of 270M are those of its published Q4_K_M
file, those of Gemma 4 what llama.cpp's rule gives. Bytes per token follow from the geometry:
layers · heads · dimension · 2 bytes, once for values alone, twice for keys and values.
"""

from __future__ import annotations

import pytest
from attrs import evolve
from luce_arch_gemma import hooks
from luce_arch_gemma.describe import describe
from luce_arch_gemma.geometries import VOCAB, geometries, shapes_of

from luce_core import synth
from luce_core.cache.layout import block_bytes, token_bytes
from luce_core.contracts import CacheOptions, DeviceInfo, Equivalence, Group, OpImpl, OpLayer, StateSizes
from luce_core.gguf import read_header, summarize
from luce_core.options import load_options
from luce_core.plan import make_plan, state_sizes
from luce_core.plugins import from_modules
from luce_core.testing.fake_plugins import make_plugin

MODELS = {geometry.name: geometry for geometry in geometries()}
GIB = 1 << 30
DEVICE = DeviceInfo("cpu", "a large CPU", 96 * GIB, 100e9, frozenset({"cpu"}), provenance="made up")
PACKS = OpLayer("packs", (OpImpl("pack_linear", "nowhere:f"),), Equivalence.ROUNDING, frozenset({"cpu"}))


def header_of(path, geometry):
    synth.write(geometry, "q4_k_m", path, header_only=True, tokenizer=False)
    return read_header(path)


@pytest.fixture
def header(tmp_path):
    def make(name):
        return header_of(tmp_path / f"{name}.gguf", MODELS[name])

    return make


def state_per_token(spec, group, cache_type="f16"):
    sizes = StateSizes(1, {}, 1, 1, cache_type, cache_type)
    return block_bytes(spec.layout, group, sizes)


@pytest.mark.parametrize(
    ("name", "parameters", "tensors", "num_bytes"),
    [
        ("gemma-3-270m", 268_098_176, 18 * 13 + 2, 246_587_904),
        ("gemma-3-1b", 999_885_952, 26 * 13 + 2, None),
        ("gemma-4-31b", 30_697_345_596, 833, 18_671_229_168),
        ("gemma-4-26b-a4b", 25_233_142_046, 658, 16_780_192_888),
    ],
)
def test_parameters_tensors_and_bytes(header, name, parameters, tensors, num_bytes):
    found = header(name)
    spec = describe(found, CacheOptions(0))
    assert (spec.parameters, len(found.tensors)) == (parameters, tensors)
    assert summarize(found).num_weights == parameters
    assert num_bytes in (None, spec.weight_bytes)


@pytest.mark.parametrize(
    ("name", "tensors", "billions", "whole", "local"),
    [
        # 18 of 42 layers read others' keys and values; a whole one in every six has twice the width
        ("gemma-4-e4b", 720, 7.52, 4 * 2 * 512 * 2 * 2, 20 * 2 * 256 * 2 * 2),
        ("gemma-4-e2b", 601, 4.65, 3 * 1 * 512 * 2 * 2, 12 * 1 * 256 * 2 * 2),
    ],
)
def test_models_with_inputs_of_each_layer(header, name, tensors, billions, whole, local):
    found = header(name)
    spec = describe(found, CacheOptions(0))
    assert (len(found.tensors), round(spec.parameters / 1e9, 2)) == (tensors, billions)
    assert (state_per_token(spec, "full"), state_per_token(spec, "window.512")) == (whole, local)


@pytest.mark.parametrize(
    ("name", "whole", "local", "window"),
    [
        ("gemma-3-270m", 3 * 1 * 256 * 2 * 2, 15 * 1 * 256 * 2 * 2, 512),
        ("gemma-3-1b", 4 * 1 * 256 * 2 * 2, 22 * 1 * 256 * 2 * 2, 512),
        ("gemma-4-31b", 40_960, 50 * 16 * 256 * 2 * 2, 1024),
        ("gemma-4-26b-a4b", 5 * 2 * 512 * 2, 25 * 8 * 256 * 2 * 2, 1024),
    ],
)
def test_state_per_token(header, name, whole, local, window):
    spec = describe(header(name), CacheOptions(0))
    assert spec.layout.groups == (Group(f"window.{window}", window=window), Group("full"))
    assert state_per_token(spec, "full") == whole
    assert token_bytes(spec.layout, StateSizes(32, {}, 1, 1)) == whole
    assert state_per_token(spec, f"window.{window}") == local


def test_values_alone_halve_what_a_token_of_31b_costs(header, tmp_path):
    geometry = MODELS["gemma-4-31b"]
    whole = evolve(geometry, shapes=shapes_of(geometry.metadata, VOCAB, k_eq_v=False))
    with_keys = describe(header_of(tmp_path / "kv.gguf", whole), CacheOptions(0))
    assert state_per_token(with_keys, "full") == 81_920
    assert state_per_token(describe(header("gemma-4-31b"), CacheOptions(0)), "full") == 40_960


def test_a_token_of_26b_reads_eight_experts_of_128(header):
    spec = describe(header("gemma-4-26b-a4b"), CacheOptions(0))
    # gate and up in Q4_K, 144 bytes per 256 weights; down in Q5_0, 22 per 32, or Q8_0, 34, in some layers:
    # 704 is no multiple of 256
    wide = sum(1 for layer in range(30) if layer < 3 or layer >= 26 or (layer - 3) % 3 == 2)
    gate_up, down = 2 * 704 * 2816 * 144 // 256, 2816 * 704 // 32
    layers = 30 * (gate_up + 4) + (30 - wide) * 22 * down + wide * 34 * down  # and an expert's factor
    assert spec.weight_bytes - spec.active_bytes == (128 - 8) * layers


def test_a_token_of_a_dense_model_reads_everything(header):
    for name in ("gemma-3-270m", "gemma-4-31b"):
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
