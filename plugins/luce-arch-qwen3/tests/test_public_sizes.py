"""The sizes that were published, from headers without weights: parameters, bytes, what a sequence costs.

Parameters are those of the published checkpoints. Bytes per token follow from the geometry: layers · key-
value heads · dimension · 2 (keys and values) · 2 bytes.
"""

from __future__ import annotations

import pytest
from luce_arch_qwen3 import hooks
from luce_arch_qwen3.describe import describe
from luce_arch_qwen3.geometries import VOCAB, geometries

from luce_core import synth
from luce_core.cache.layout import token_bytes
from luce_core.contracts import CacheOptions, DeviceInfo, Equivalence, OpImpl, OpLayer, StateSizes
from luce_core.gguf import read_header, summarize
from luce_core.options import load_options
from luce_core.plan import make_plan, state_sizes
from luce_core.plugins import from_modules
from luce_core.testing.fake_plugins import make_plugin

MODELS = {geometry.name: geometry for geometry in geometries()}
GIB = 1 << 30
DEVICE = DeviceInfo("cpu", "a large CPU", 96 * GIB, 100e9, frozenset({"cpu"}), provenance="made up")
PACKS = OpLayer("packs", (OpImpl("pack_linear", "nowhere:f"),), Equivalence.ROUNDING, frozenset({"cpu"}))


@pytest.fixture
def header(tmp_path):
    def make(name):
        path = tmp_path / f"{name}.gguf"
        synth.write(MODELS[name], "q4_k_m", path, header_only=True, tokenizer=False)
        return read_header(path)

    return make


@pytest.mark.parametrize(
    ("name", "parameters", "tensors", "token", "num_bytes"),
    [
        ("qwen3-0.6b", 596_049_920, 28 * 11 + 2, 114_688, 390_753_280),
        ("qwen3-1.7b", 1_720_574_976, 28 * 11 + 2, 114_688, None),
        ("qwen3-4b", 4_022_468_096, 36 * 11 + 2, 147_456, None),
        ("qwen3-8b", 8_190_735_360, 36 * 11 + 3, 147_456, None),
        ("qwen3-30b-a3b", 30_532_122_624, 48 * 12 + 3, 98_304, 18_550_716_416),
    ],
)
def test_parameters_bytes_and_state_per_token(header, name, parameters, tensors, token, num_bytes):
    found = header(name)
    spec = describe(found, CacheOptions(0))
    assert (spec.parameters, len(found.tensors)) == (parameters, tensors)
    assert summarize(found).num_weights == parameters
    assert token_bytes(spec.layout, StateSizes(32, {}, 1, 1)) == token
    assert num_bytes in (None, spec.weight_bytes)


def test_weight_bytes_are_those_of_the_file(header):
    found = header("qwen3-0.6b")
    spec = describe(found, CacheOptions(0))
    assert 0 < found.path.stat().st_size - spec.weight_bytes < 200 * len(found.tensors)
    assert 4.5 < 8 * spec.weight_bytes / spec.parameters < 6.6
    assert spec.active_bytes == spec.weight_bytes  # tied: every matrix is read


def test_a_token_of_30b_reads_eight_experts_of_128(header):
    """8 · 3 · 768 · 2048 = 37.7 M weights a layer, 21.2 MB in Q4_K."""
    spec = describe(header("qwen3-30b-a3b"), CacheOptions(0))
    expert = 3 * 768 * 2048 * 144 // 256
    assert 8 * expert == 21_233_664
    wide = sum(1 for layer in range(48) if layer < 6 or layer >= 42 or (layer - 6) % 3 == 2)
    wider = wide * 768 * 2048 * (210 - 144) // 256  # down matrices in Q6_K
    table = VOCAB * 2048 * 144 // 256
    assert spec.weight_bytes - spec.active_bytes == (128 - 8) * (48 * expert + wider) + table


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-30b-a3b"])
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
