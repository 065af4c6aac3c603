"""DeepSeek V4.1 Flash from a header without weights: parameters, bytes, what a sequence costs, what is
refused.
"""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from luce_arch_deepseek4 import hooks
from luce_arch_deepseek4.v41_describe import describe
from luce_arch_deepseek4.v41_geometries import (
    PICKERS,
    SOURCES,
    geometries,
)

from luce_core import synth
from luce_core.cache.layout import block_bytes, slot_bytes, snapshot_bytes, token_bytes
from luce_core.contracts import (
    CacheOptions,
    DeviceInfo,
    Equivalence,
    Group,
    OpImpl,
    OpLayer,
    StateSizes,
    StoredSize,
)
from luce_core.errors import ModelFormatError
from luce_core.gguf import read_header
from luce_core.gguf.rows import ROW_CACHE_BYTES
from luce_core.options import load_options
from luce_core.plan import make_plan, state_sizes
from luce_core.plugins import from_modules
from luce_core.testing.command import run_command
from luce_core.testing.fake_plugins import make_plugin
from luce_core.testing.gguf_header import write_header

from .models_v41 import ARCH, BASE, WHOLE, metadata_of, tensors_of

A = f"{ARCH}."
HOOKS = "luce_arch_deepseek4.hooks"
GIB = 1 << 30
ROWS = (384_006_168, 384_016_682)
"""Of the two tables of n-grams."""
SMALL = {**BASE, **WHOLE}
SHAPES = tensors_of(SMALL)
DEVICE = DeviceInfo("cpu", "a large CPU", 400 * GIB, 100e9, frozenset({"cpu"}), provenance="made up")
PACKS = OpLayer("packs", (OpImpl("pack_linear", "nowhere:f"),), Equivalence.ROUNDING, frozenset({"cpu"}))


def flash_of(folder, quant="native"):
    (flash,) = geometries()
    path = folder / f"{quant}.gguf"
    synth.write(flash, quant, path, header_only=True, tokenizer=False)
    return read_header(path)


def described(folder, keys, shapes=None):
    def format_of(name, shape):
        return "F32" if shape[-1] % 32 or len(shape) == 1 else "Q8_0"

    metadata = {
        key: list(value) if isinstance(value, np.ndarray) else value
        for key, value in metadata_of(keys).items()
    }
    path = write_header(folder / "m.gguf", metadata, shapes or SHAPES, format_of)
    return describe(read_header(path), CacheOptions(0))


# --- the published model


def test_parameters_and_bytes_of_flash(tmp_path):
    """As counted of the published checkpoint by shapes; tables of n-grams are no weights in memory."""
    spec = describe(flash_of(tmp_path), CacheOptions(0))
    assert spec.stored == {
        f"blk.{layer}.engram_embd.weight": StoredSize(count * 256, count * 272)  # Q8_0: 34 bytes for 32
        for layer, count in zip((1, 14), ROWS, strict=True)
    }
    tables = sum(ROWS) * 256
    assert round(tables / 1e9, 1) == 196.6
    experts = 40 * 384 * 3 * 5120 * 2304
    assert round(experts / 1e9, 1) == 543.6
    assert round((spec.parameters - experts) / 1e9, 1) == 8.3
    assert round((spec.parameters + tables) / 1e9, 1) == 748.5
    expert = 3 * 5120 * 2304 * 17 // 32
    assert round(expert / (1 << 20), 2) == 17.93
    assert round(40 * 384 * expert / GIB, 0) == 269
    assert round(40 * 6 * expert / GIB, 2) == 4.20
    table = 129280 * 5120 * 2
    assert spec.weight_bytes - spec.active_bytes == 40 * (384 - 6) * expert + table
    assert 9 < (spec.weight_bytes - 40 * 384 * expert) / GIB < 11


def test_bytes_at_q4_k_m(tmp_path):
    """4.5 to 6.6 bits a weight in memory, and as few in the tables."""
    spec = describe(flash_of(tmp_path, "q4_k_m"), CacheOptions(0))
    assert 4.5 <= 8 * spec.weight_bytes / spec.parameters <= 5.3
    assert sum(size.num_bytes for size in spec.stored.values()) == sum(ROWS) * 144


def test_state_of_flash(tmp_path):
    spec = describe(flash_of(tmp_path), CacheOptions(0))
    assert spec.layout.groups == (
        Group("near", window=128),
        Group("every.2", stride=2),
        Group("every.1", stride=1),
    )
    assert (spec.tap_width, spec.final_width) == (4 * 5120, 5120)
    sizes = StateSizes(128, {}, 1, 1)
    per_token = {name: block_bytes(spec.layout, name, sizes) / 128 for name in ("every.2", "every.1")}
    assert per_token == {"every.2": 3 * 640, "every.1": 1280}
    assert token_bytes(spec.layout, sizes) == 3200
    assert block_bytes(spec.layout, "near", sizes) == 40 * 128 * 512 * 2 == 5 << 20
    history = 3 * 4
    assert slot_bytes(spec.layout, sizes) == 3 * 2 * 1024 * 4 + history
    assert snapshot_bytes(spec.layout, sizes, 128) == history
    assert snapshot_bytes(spec.layout, sizes, 129) == 3 * 1024 * 4 + history


def test_roles_of_layers_follow_their_tensors(tmp_path):
    params = describe(flash_of(tmp_path), CacheOptions(0)).details["decoder"]
    assert tuple(layer.number for layer in params.layers if layer.compresses) == SOURCES
    assert tuple(layer.number for layer in params.layers if layer.indexes) == PICKERS
    sources = [layer.source for layer in params.layers]
    assert sources == [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    assert (params.candidates.layer, params.candidates.blocks, params.candidates.entries) == (20, 2048, 8)


def test_the_plan_leaves_tables_in_the_file(tmp_path):
    """They alone are larger than what is left of this machine."""
    rig = make_plugin("rig", luce_register_devices=[DEVICE], luce_register_ops=[PACKS], luce_extend_plan=list)
    registry, header = from_modules([hooks, rig]), flash_of(tmp_path)
    asked = {"model": str(header.path), "ctx_size": "16384", "max_sequences": "2", "op_layer": "packs"}
    plan = make_plan(load_options(registry, asked, {}, ()), header, registry, [DEVICE])
    spec, sizes = plan.models[0].spec, state_sizes(plan)
    claims = {claim.owner: claim.num_bytes for claim in plan.claims}
    assert claims["weights of target"] == spec.weight_bytes < 285 * GIB
    assert claims["rows of target read from its file"] == 2 * ROW_CACHE_BYTES
    assert sum(size.num_bytes for size in spec.stored.values()) > 190 * GIB
    tokens = {group: count * sizes.block_tokens for group, count in sizes.num_blocks.items()}
    assert tokens["target/every.1"] == tokens["target/every.2"] >= 2 * 16384
    assert claims["state of target"] >= 3200 * tokens["target/every.1"] + 40 * 1024 * tokens["target/near"]


def test_inspect_says_what_stays_in_the_file(tmp_path):
    path = flash_of(tmp_path).path
    shown = " ".join(run_command("inspect", path, hooks=(HOOKS,)).split())
    assert "551,880.8 M parameters in 40 layers" in shown
    assert (
        "196,613.8 M parameters more in 2 tables stay in the file, 194.6 GiB, and are read by row." in shown
    )
    data = json.loads(run_command("inspect", path, "--json", hooks=(HOOKS,)))["model"]
    assert data["stored"]["blk.1.engram_embd.weight"] == {"parameters": ROWS[0] * 256, "bytes": ROWS[0] * 272}


# --- keys


def test_the_small_one_is_described(tmp_path):
    spec = described(tmp_path, SMALL)
    assert [slot.name for slot in spec.layout.slots] == [
        "blk.1.entries.tail",
        "blk.3.entries.tail",
        "engram.history",
    ]
    assert [(slot.period, slot.state.shape, slot.state.dtype) for slot in spec.layout.slots] == [
        (2, (2, 64), "f32"),
        (2, (2, 64), "f32"),
        (1, (3, 1), "i32"),
    ]
    params = spec.details["decoder"]
    assert (params.candidates.layer, params.candidates.blocks, params.candidates.entries) == (4, 3, 4)
    near, far = params.attention.near_rope, params.attention.far_rope
    assert (near.theta, near.scaling) == (1e4, "none")
    assert (far.theta, far.scaling, far.factor) == (16e4, "yarn", 4.0)
    assert "compressed" not in repr(params.engram), "129280 ids in every line that shows it"


def test_a_plan_crosses_to_another_process(tmp_path):
    spec = described(tmp_path, SMALL)
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.parametrize(
    ("changes", "candidates"),
    [
        ({}, 4),
        ({"attention.indexer.candidate_source_layer": -1}, None),
        ({"attention.indexer.candidate_source_layer": 6}, 6),
    ],
)
def test_which_layer_chooses_candidates(tmp_path, changes, candidates):
    """Files do not say it as a rule: the first that picks among single tokens."""
    silent = {key: value for key, value in SMALL.items() if "candidate" not in key}
    found = described(tmp_path, silent | changes).details["decoder"].candidates
    assert (found and found.layer) == candidates
    if candidates is not None:
        assert (found.blocks, found.entries) == (2048, 8)


def test_without_compression_no_indexer_is_needed(tmp_path):
    keys = {key: value for key, value in BASE.items() if "indexer" not in key}
    spec = described(tmp_path, keys, tensors_of(BASE))
    assert spec.details["decoder"].indexer is None
    assert [group.name for group in spec.layout.groups] == ["near"]
    assert not spec.layout.slots
    assert not spec.stored


@pytest.mark.parametrize("held", [True, False])
def test_blocks_that_draft_are_left_out(tmp_path, held):
    """A file may count them and hold them, or only count them; without the first it may count neither."""
    ratios = [*SMALL["attention.compress_ratios"], 0, 0]
    keys = {**SMALL, "block_count": 9, "nextn_predict_layers": 2, "attention.compress_ratios": ratios}
    drafting = {"blk.7.attn_norm.weight": (32,), "blk.8.nextn.eh_proj.weight": (32, 64)} if held else {}
    beside = {"v.patch_embd.weight": (32, 32), "mtp.markov_embd.weight": (61, 8)}
    spec = described(tmp_path, keys, SHAPES | drafting | beside)
    plain = described(tmp_path, SMALL)
    assert (spec.num_layers, spec.parameters) == (7, plain.parameters)
    counted = described(tmp_path, SMALL | {"nextn_predict_layers": 2})
    assert counted.num_layers == 7


REQUIRED = sorted(
    key
    for key in SMALL
    if key
    not in {
        *("sources", "indexers", "vocab_size", "attention.head_count_kv", "attention.value_length"),
        *("attention.compress_rope_freq_base", "expert_shared_count", "expert_weights_norm"),
        *("expert_weights_scale", "swiglu_clamp_exp", "engram.pad_id", "engram.multipliers"),
        *("engram.primes", "engram.offsets", "engram.token_map", "engram.layer_ids"),
    }
    and not key.startswith(("rope.", "attention.indexer.candidate"))
)


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(tmp_path, key):
    keys = {name: value for name, value in SMALL.items() if name != key}
    with pytest.raises(ModelFormatError, match=f"'{A}{key}' is missing"):
        described(tmp_path, keys)


def test_tables_no_key_speaks_of_are_refused(tmp_path):
    keys = {name: value for name, value in SMALL.items() if name != "engram.layer_ids"}
    with pytest.raises(
        ModelFormatError, match=r"'deepseek41.engram.layer_ids' is \[\]; wanted layer 1 among"
    ):
        described(tmp_path, keys)


U64 = np.uint64


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 0),
        ("attention.head_count_kv", 2),
        ("attention.value_length", 8),
        ("attention.compress_ratios", [0, 2]),
        ("attention.compress_ratios", [0, 2, 2, 2, 1, 2, 1]),
        ("attention.compress_ratios", [0, 2, 1, 2, 1, 1, 1]),
        ("attention.indexer.key_length", 7),
        ("attention.indexer.top_k", 0),
        ("attention.indexer.candidate_source_layer", 3),
        ("attention.indexer.candidate_source_layer", 5),
        ("attention.indexer.candidate_source_layer", -2),
        ("attention.indexer.candidate_top_k", 0),
        ("attention.indexer.candidate_block_size", 0),
        ("hash_layer_count", 1),
        ("expert_gating_func", 2),
        ("engram.layer_ids", [1, 1]),
        ("engram.layer_ids", [1, 7]),
        ("engram.layer_ids", "1"),
        ("engram.head_count", 0),
        ("engram.key_length", 0),
        ("engram.max_ngram_size", 1),
        ("engram.pad_id", -1),
        ("engram.multipliers", np.full(7, 3, U64)),
        ("engram.multipliers", np.full(8, (2**63 - 1) // 36 + 1, U64)),
        ("engram.primes", np.full(11, 3, U64)),
        ("engram.primes", np.zeros(12, U64)),
        ("engram.offsets", np.full(13, 3, U64)),
        ("engram.offsets", np.full(12, 2**31, U64)),
        ("engram.token_map", np.zeros(60, np.int32)),
        ("engram.token_map", np.full(61, -1, np.int32)),
    ],
)
def test_a_key_out_of_range_is_named(tmp_path, key, value):
    with pytest.raises(ModelFormatError, match=f"'{A}{key}'"):
        described(tmp_path, {**SMALL, key: value})


# --- tensors

ROLES = [name for name in SHAPES if name != "output.weight" and not name.endswith("engram_embd.weight")]
SOME = [name for name in ROLES if not name.startswith(("blk.2.", "blk.5.", "blk.6.ffn", "blk.6.hc"))]


@pytest.mark.parametrize("name", SOME)
def test_a_missing_or_misshapen_tensor_is_named(tmp_path, name):
    wrong = {**SHAPES, name: (SHAPES[name][0] + 1, *SHAPES[name][1:])}
    missing = {other: shape for other, shape in SHAPES.items() if other != name}
    cases = [(wrong, "has the shape")]
    # Without these a layer has another role: it reads what one before it made, or takes what was picked.
    if name not in ("blk.3.attn_compressor_kv.weight", "blk.6.indexer.attn_q_b.weight"):
        ratios = name == "blk.4.attn_compressor_kv.weight"
        cases.append((missing, "compress_ratios" if ratios else f"'{name}' is missing"))
    for broken, complaint in cases:
        with pytest.raises(ModelFormatError, match=complaint) as caught:
            described(tmp_path, SMALL, broken)
        if complaint == "has the shape":
            assert f"'{name}'" in str(caught.value)


@pytest.mark.parametrize("layer", [1, 3])
def test_a_table_must_hold_every_row_that_is_named(tmp_path, layer):
    name = f"blk.{layer}.engram_embd.weight"
    rows, width = SHAPES[name]
    assert (
        described(tmp_path, SMALL, {**SHAPES, name: (rows + 9, width)}).stored[name].parameters
        == (rows + 9) * width
    )
    for shape in ((rows - 1, width), (rows, width + 1), (rows * width,), (1, rows, width)):
        with pytest.raises(ModelFormatError, match=rf"'{name}' has the shape .*wanted \[{rows}, {width}\]"):
            described(tmp_path, SMALL, {**SHAPES, name: shape})
    with pytest.raises(ModelFormatError, match=f"'{name}' is missing"):
        described(tmp_path, SMALL, {key: shape for key, shape in SHAPES.items() if key != name})


def test_a_bias_of_image_tokens_fits_the_experts(tmp_path):
    name = "blk.0.exp_probs_b_vl.bias"
    described(tmp_path, SMALL, {**SHAPES, name: (6,)})
    with pytest.raises(ModelFormatError, match=f"'{name}' has the shape"):
        described(tmp_path, SMALL, {**SHAPES, name: (7,)})
