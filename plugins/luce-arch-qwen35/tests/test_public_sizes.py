"""The sizes that were published, from headers without weights: parameters, bytes, what a sequence costs.

Tensor counts are those of published files (27B) or counted by the published geometry. Bytes are those that
llama.cpp's rule for Q4_K_M gives.
"""

from __future__ import annotations

import pytest
from luce_arch_qwen35 import hooks
from luce_arch_qwen35.describe import describe
from luce_arch_qwen35.geometries import geometries

from luce_core import synth
from luce_core.cache.layout import log_bytes, slot_bytes, token_bytes
from luce_core.contracts import CacheOptions, DeviceInfo, Equivalence, Group, OpImpl, OpLayer, StateSizes
from luce_core.gguf import read_header, summarize
from luce_core.options import load_options
from luce_core.plan import make_plan, state_sizes
from luce_core.plugins import from_modules
from luce_core.testing.fake_plugins import make_plugin

MODELS = {geometry.name: geometry for geometry in geometries()}
GIB = 1 << 30
DEVICE = DeviceInfo("cpu", "a large CPU", 512 * GIB, 100e9, frozenset({"cpu"}), provenance="made up")
PACKS = OpLayer("packs", (OpImpl("pack_linear", "nowhere:f"),), Equivalence.ROUNDING, frozenset({"cpu"}))


@pytest.fixture
def header(tmp_path):
    def make(name):
        path = tmp_path / f"{name}.gguf"
        synth.write(MODELS[name], "q4_k_m", path, header_only=True, tokenizer=False)
        return read_header(path)

    return make


@pytest.mark.parametrize(
    ("name", "tensors", "millions", "num_bytes"),
    [
        ("qwen3.5-0.8b", 320, 752.4, 518_335_744),
        ("qwen3.5-27b", 851, 26_896, 16_536_406_016),
        ("qwen3.5-27b-mtp", 866, 27_321, 16_799_719_424),
        ("qwen3.5-35b-a3b", 733, 34_661, 21_155_768_832),
        ("qwen3.5-35b-a3b-mtp", 753, 35_505, 21_702_472_192),
    ],
)
def test_tensors_parameters_and_bytes(header, name, tensors, millions, num_bytes):
    found = header(name)
    spec = describe(found, CacheOptions(0))
    assert (len(found.tensors), spec.weight_bytes) == (tensors, num_bytes)
    assert spec.parameters / 1e6 == pytest.approx(millions, rel=3e-5)
    assert summarize(found).num_weights == spec.parameters


@pytest.mark.parametrize(
    ("name", "per_token", "per_sequence", "per_held_row"),
    [
        ("qwen3.5-0.8b", 12_288, 20_201_472, 18 * (16 * 128 + 16 * 128 + 16 + 6144) * 4),
        ("qwen3.5-27b", 65_536, 156_893_184, 48 * (16 * 128 + 48 * 128 + 48 + 10240) * 4),
        ("qwen3.5-35b-a3b", 20_480, 65_863_680, 30 * (16 * 128 + 32 * 128 + 32 + 8192) * 4),
    ],
)
def test_state_of_a_sequence(header, name, per_token, per_sequence, per_held_row):
    spec = describe(header(name), CacheOptions(0))
    sizes = StateSizes(32, {}, 1, 1)
    assert spec.layout.groups == (Group("full"),)
    assert token_bytes(spec.layout, sizes) == per_token
    assert slot_bytes(spec.layout, sizes) == per_sequence
    assert log_bytes(spec.layout, sizes) == per_held_row


@pytest.mark.parametrize(("name", "per_token"), [("qwen3.5-27b-mtp", 4_096), ("qwen3.5-35b-a3b-mtp", 2_048)])
def test_state_of_the_mtp_block(header, name, per_token):
    found = header(name)
    spec = describe(found, CacheOptions(0))
    assert token_bytes(spec.nextn_layout, StateSizes(32, {}, 1, 1)) == per_token
    assert not spec.nextn_layout.slots
    block = f"blk.{spec.num_layers}."
    own = [one for one in found.tensors.values() if one.name.startswith(block)]
    assert spec.nextn_size.num_bytes == sum(one.num_bytes for one in own) > 0
    assert spec.nextn_size.parameters == sum(one.num_weights for one in own)
    assert spec.num_layers == {"qwen3.5-27b-mtp": 64, "qwen3.5-35b-a3b-mtp": 40}[name]


def test_a_token_of_35b_reads_eight_experts_of_256_and_no_mtp_block(header):
    plain, spec = (
        describe(header(name), CacheOptions(0)) for name in ("qwen3.5-35b-a3b", "qwen3.5-35b-a3b-mtp")
    )
    # in Q4_K, 144 bytes per 256 weights, or Q6_K, 210, in some layers' down matrices and the head
    table, one = 248320 * 2048 * 144 // 256, 2048 * 512 // 256
    many = sum(1 for layer in range(40) if layer < 5 or layer >= 35 or (layer - 5) % 3 == 2)
    experts = 40 * 248 * one * 2 * 144 + 248 * one * (many * 210 + (40 - many) * 144)
    assert plain.weight_bytes - plain.active_bytes == table + experts
    # the same token, but for a block more by which the rule says which layers are stored wider
    assert spec.active_bytes == pytest.approx(plain.active_bytes, rel=2e-3)


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_counts_every_byte_of_state(header, name):
    """16384 tokens for two sequences: what two such contexts take in blocks, and what every slot takes."""
    rig = make_plugin("rig", luce_register_devices=[DEVICE], luce_register_ops=[PACKS], luce_extend_plan=list)
    registry = from_modules([hooks, rig])
    found = header(name)
    asked = {"model": str(found.path), "ctx_size": "16384", "max_sequences": "2", "op_layer": "packs"}
    plan = make_plan(load_options(registry, asked, {}, ()), found, registry, [DEVICE])
    spec, sizes = plan.models[0].spec, state_sizes(plan)
    claims = {claim.kind: claim.num_bytes for claim in plan.claims if claim.device == "cpu"}
    left = spec.nextn_size.num_bytes if spec.nextn_size else 0  # without a drafter that runs the block
    assert claims["weights"] == spec.weight_bytes - left
    tokens = sizes.num_blocks["target/full"] * sizes.block_tokens
    slot = slot_bytes(spec.layout, sizes) + log_bytes(spec.layout, sizes)
    assert claims["state"] == tokens * token_bytes(spec.layout, sizes) + sizes.num_slots * slot
    assert 2 * 16384 <= tokens <= 2 * (16384 + 3 * sizes.block_tokens + sizes.max_held_rows)
    assert sizes.num_slots >= 2
