"""What a header says, and every way it can be wrong: one ModelFormatError naming the key or tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
from luce_arch_laguna.describe import describe
from luce_arch_laguna.geometries import metadata, shapes_of
from luce_arch_laguna.params import LagunaParams

from luce_core.contracts import CacheOptions, Field, Group
from luce_core.errors import ModelFormatError
from luce_core.gguf import read_header
from luce_core.model.metadata import ExpertParams
from luce_core.testing.gguf_header import write_header

FIXTURES = Path(__file__).parent / "fixtures"
VOCAB = 50
KEYS = metadata(
    layers=6,
    width=32,
    heads=[4, 6, 6, 6, 4, 6],
    ffn=64,
    experts=(6, 2, 32),
    **{
        "vocab_size": VOCAB,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.sliding_window": 8,
        "rope.dimension_count": 8,
        "rope.dimension_count_swa": 16,
        "expert_shared_feed_forward_length": 96,
    },
)
SHAPES = shapes_of(KEYS, VOCAB)


def described(folder, metadata=None, shapes=None, drop=()):
    keys, tensors = {**KEYS, **(metadata or {})}, {**SHAPES, **(shapes or {})}
    path = write_header(
        folder / "tiny.gguf",
        {key: value for key, value in keys.items() if key not in drop},
        {name: shape for name, shape in tensors.items() if name not in drop},
    )
    return describe(read_header(path), CacheOptions(0))


def params_of(spec) -> LagunaParams:
    return spec.details["decoder"]


def test_the_fixture_is_described():
    spec = describe(read_header(FIXTURES / "tiny-laguna.gguf"), CacheOptions(0))
    assert (spec.arch, spec.num_layers, spec.hidden, spec.vocab, spec.context) == ("laguna", 4, 48, 101, 512)
    assert (spec.position_axes, spec.tap_width, spec.final_width, spec.tree) == (1, 48, 48, "any")
    assert spec.layout.groups == (Group("full"), Group("window.5", window=5))
    assert [pages.group for pages in spec.layout.pages] == ["full"] + ["window.5"] * 3
    assert spec.layout.pages[1].fields == {"k": Field((2, 16), "kv.k"), "v": Field((2, 16), "kv.v")}
    params = params_of(spec)
    assert params.decoder.heads == (4, 6, 6, 6)
    assert (params.experts, params.shared_ffn, params.num_dense) == (ExpertParams(8, 3, 24), 20, 1)
    # of 8 experts in three layers a token reads 3, and of the table a row
    assert spec.weight_bytes - spec.active_bytes == 4 * (3 * 5 * 3 * 24 * 48 + 101 * 48)


def test_defaults_of_absent_keys(tmp_path):
    absent = ("sliding_window_pattern", "value_length")
    absent = [f"laguna.attention.{name}" for name in absent]
    absent += [f"laguna.{name}" for name in ("rope.freq_base_swa", "rope.dimension_count_swa")]
    absent += [f"laguna.expert_{name}" for name in ("weights_scale", "weights_norm", "gating_func")]
    params = params_of(described(tmp_path, drop=absent))
    assert params.windows == (None, 8, 8, 8, None, 8)
    assert (params.window_rope.theta, params.window_rope.num_rotated) == (10000.0, 16)
    assert (params.expert_scale, params.router_softcap) == (1.0, 0.0)


def test_end_tokens_are_those_of_the_file(tmp_path):
    """Beginning and end of a text are one token; `</assistant>`, which ends a turn, is another."""
    ids = {"bos": 2, "eos": 2, "eot": 24, "padding": 9}
    spec = described(tmp_path, {f"tokenizer.ggml.{name}_token_id": token for name, token in ids.items()})
    assert spec.tokens == {"bos": (2,), "eos": (2,), "eot": (24,), "pad": (9,)}


def test_without_a_window_there_is_one_group(tmp_path):
    spec = described(tmp_path, drop=("laguna.attention.sliding_window",))
    assert spec.layout.groups == (Group("full"),)
    assert params_of(spec).windows == (None,) * 6


@pytest.mark.parametrize(
    ("stored", "factor", "magnitude"),
    [(None, 32.0, 1.34657), (1.0, 64.0, 1.41589), (None, 128.0, 1.48520), (1.25, 32.0, 1.25)],
)
def test_the_factor_on_cos_and_sin(tmp_path, stored, factor, magnitude):
    keys = {"laguna.rope.scaling.factor": factor}
    if stored is not None:
        keys["laguna.rope.scaling.yarn_attn_factor"] = stored
    found = params_of(described(tmp_path, keys)).rope_magnitude
    assert found == pytest.approx(magnitude, abs=1e-5)


def test_the_gate_may_have_a_row_per_feature(tmp_path):
    wide = shapes_of(KEYS, VOCAB, gate_per_head=False)
    assert described(tmp_path, shapes=wide).parameters > described(tmp_path).parameters


REQUIRED = [
    "laguna.block_count",
    "laguna.context_length",
    "laguna.embedding_length",
    "laguna.attention.head_count",
    "laguna.attention.layer_norm_rms_epsilon",
    "laguna.leading_dense_block_count",
    "laguna.expert_count",
    "laguna.expert_used_count",
    "laguna.expert_feed_forward_length",
]


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(tmp_path, key):
    with pytest.raises(ModelFormatError, match=f"'{key}' is missing"):
        described(tmp_path, drop=(key,))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("laguna.block_count", 0),
        ("laguna.embedding_length", 0),
        ("laguna.feed_forward_length", 0),
        ("laguna.attention.head_count", [4, 6, 6]),
        ("laguna.attention.head_count", [4, 6, 6, 6, 4, 0]),
        ("laguna.attention.head_count_kv", 4),
        ("laguna.attention.sliding_window", "wide"),
        ("laguna.attention.sliding_window_pattern", 0),
        ("laguna.attention.sliding_window_pattern", [True, False]),
        ("laguna.attention.sliding_window_pattern", [1, 0, 1, 1, 1, 1]),
        ("laguna.rope.dimension_count", 9),
        ("laguna.rope.dimension_count_swa", 32),
        ("laguna.rope.freq_base_swa", -1.0),
        ("laguna.rope.scaling.type", "longrope"),
        ("laguna.rope.scaling.factor", 0.0),
        ("laguna.rope.scaling.yarn_attn_factor", -1.0),
        ("laguna.leading_dense_block_count", 7),
        ("laguna.expert_count", 0),
        ("laguna.expert_used_count", 7),
        ("laguna.expert_feed_forward_length", 0),
        ("laguna.expert_shared_feed_forward_length", 0),
        ("laguna.expert_shared_count", 2),
        ("laguna.expert_gating_func", 1),
        ("laguna.expert_weights_norm", False),
        ("laguna.expert_weights_scale", float("nan")),
        ("laguna.router_logit_softcapping", -1.0),
    ],
)
def test_a_key_out_of_range_is_named(tmp_path, key, value):
    with pytest.raises(ModelFormatError, match=f"'{key}'"):
        described(tmp_path, {key: value})


TENSORS = [name for name in SHAPES if not name.startswith("blk.") or name.startswith(("blk.0.", "blk.1."))]


@pytest.mark.parametrize("name", [name for name in TENSORS if name != "output.weight"])
def test_a_missing_tensor_is_named(tmp_path, name):
    with pytest.raises(ModelFormatError, match=f"'{name}' is missing"):
        described(tmp_path, drop=(name,))


@pytest.mark.parametrize("name", TENSORS)
def test_a_misshapen_tensor_is_named(tmp_path, name):
    shape = SHAPES[name]
    with pytest.raises(ModelFormatError, match=f"'{name}' has the shape"):
        described(tmp_path, shapes={name: (shape[0] + 1, *shape[1:])})


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blk.0.attn_gate.weight", (4, 64)),
        ("blk.1.attn_gate.weight", (6,)),
        ("blk.1.attn_gate.weight", (4, 32)),
        ("blk.1.attn_q.bias", (64,)),
        ("blk.1.ffn_gate_up_exps.weight", (6, 32, 32)),
    ],
)
def test_other_shapes_that_do_not_fit_are_named(tmp_path, name, shape):
    with pytest.raises(ModelFormatError, match=f"'{name}' has the shape"):
        described(tmp_path, shapes={name: shape})
