"""The sizes that were published, from headers without weights: parameters, bytes, what a sequence costs.

XS 2.1: 33.44 B parameters, 10 layers without a window. M.1 has its number of layers, no window and a gate per
feature; its other sizes are made up.
"""

from __future__ import annotations

import pytest
from luce_arch_laguna import hooks
from luce_arch_laguna.describe import describe
from luce_arch_laguna.geometries import VOCAB, geometries, metadata, shapes_of

from luce_core import synth
from luce_core.cache.layout import block_bytes, token_bytes
from luce_core.contracts import CacheOptions, DeviceInfo, Equivalence, Group, OpImpl, OpLayer, StateSizes
from luce_core.gguf import read_header, summarize
from luce_core.options import load_options
from luce_core.plan import make_plan, state_sizes
from luce_core.plugins import from_modules
from luce_core.testing.fake_plugins import make_plugin
from luce_core.testing.gguf_header import write_header

XS = next(geometry for geometry in geometries() if geometry.name == "laguna-xs-2.1")
M = metadata(
    layers=70,
    width=1024,
    heads=[16] * 70,
    ffn=4096,
    experts=(64, 8, 256),
    vocab_size=VOCAB,
    leading_dense_block_count=3,
)
del M["laguna.attention.sliding_window"]
GIB = 1 << 30
DEVICE = DeviceInfo("cpu", "a large CPU", 96 * GIB, 100e9, frozenset({"cpu"}), provenance="made up")
PACKS = OpLayer("packs", (OpImpl("pack_linear", "nowhere:f"),), Equivalence.ROUNDING, frozenset({"cpu"}))


@pytest.fixture
def xs(tmp_path):
    path = tmp_path / "xs.gguf"
    synth.write(XS, "q4_k_m", path, header_only=True, tokenizer=False)
    return read_header(path)


def state_per_token(spec, group):
    return block_bytes(spec.layout, group, StateSizes(1, {}, 1, 1))


def test_parameters_of_xs(xs):
    spec = describe(xs, CacheOptions(0))
    assert spec.parameters == summarize(xs).num_weights
    assert len(xs.tensors) == 3 + 40 * 9 + 3 + 39 * 8
    vectors = (2 * 40 + 1) * 2048 + 2 * 40 * 128 + 39 * 256  # norms, the bias of the choice
    matrices = spec.parameters - vectors
    assert round(matrices / 1e9, 3) == 33.442
    routed = 39 * 256 * 3 * 512 * 2048
    assert round(routed / 1e9, 2) == 31.41
    active = matrices - routed * (256 - 8) // 256
    assert round(active / 1e9, 3) == 3.017
    assert round((active - VOCAB * 2048) / 1e9, 2) == 2.81


def test_a_token_of_xs_reads_eight_experts_of_256(xs):
    """An expert has 3.146 M weights, 1.69 MiB in Q4_K; eight of 39 layers 0.51 GiB."""
    spec = describe(xs, CacheOptions(0))
    expert = 3 * 512 * 2048 * 144 // 256
    assert round(39 * 8 * expert / GIB, 2) == 0.51
    wide = sum(1 for layer in range(1, 40) if layer < 5 or layer >= 35 or (layer - 5) % 3 == 2)
    wider = wide * 512 * 2048 * (210 - 144) // 256  # down matrices in Q6_K
    table = VOCAB * 2048 * 144 // 256
    assert spec.weight_bytes - spec.active_bytes == (256 - 8) * (39 * expert + wider) + table


def test_state_of_xs(xs):
    spec = describe(xs, CacheOptions(0))
    assert spec.layout.groups == (Group("full"), Group("window.512", window=512))
    assert state_per_token(spec, "full") == 40_960
    assert token_bytes(spec.layout, StateSizes(32, {}, 1, 1)) == 40_960
    assert 512 * state_per_token(spec, "window.512") == 60 << 20
    assert 10 * GIB == 262144 * 40_960


def test_every_layer_of_m_keeps_the_whole_text(tmp_path):
    header = read_header(write_header(tmp_path / "m.gguf", M, shapes_of(M, VOCAB, gate_per_head=False)))
    spec = describe(header, CacheOptions(0))
    assert spec.layout.groups == (Group("full"),)
    assert state_per_token(spec, "full") == 70 * 8 * 128 * 2 * 2


def test_the_plan_counts_every_byte_of_state(xs):
    """16384 tokens for two sequences: the claim is what two such contexts take in blocks, no byte more."""
    rig = make_plugin("rig", luce_register_devices=[DEVICE], luce_register_ops=[PACKS], luce_extend_plan=list)
    registry = from_modules([hooks, rig])
    asked = {"model": str(xs.path), "ctx_size": "16384", "max_sequences": "2", "op_layer": "packs"}
    plan = make_plan(load_options(registry, asked, {}, ()), xs, registry, [DEVICE])
    spec, sizes = plan.models[0].spec, state_sizes(plan)
    claims = {claim.kind: claim.num_bytes for claim in plan.claims if claim.device == "cpu"}
    assert claims["weights"] == spec.weight_bytes
    tokens = {group: count * sizes.block_tokens for group, count in sizes.num_blocks.items()}
    per_token = {group: state_per_token(spec, group) for group in ("full", "window.512")}
    assert claims["state"] == sum(tokens[f"target/{group}"] * size for group, size in per_token.items())
    assert 2 * 16384 <= tokens["target/full"] <= 2 * (16384 + 3 * sizes.block_tokens + sizes.max_held_rows)
    # the window of a sequence, a chunk beside it, and as much again for checkpoints
    assert tokens["target/window.512"] < tokens["target/full"]
