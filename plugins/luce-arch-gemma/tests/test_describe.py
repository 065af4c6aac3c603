"""What a header says, and every way it can be wrong: one ModelFormatError naming the key or tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
from luce_arch_gemma.describe import describe
from luce_arch_gemma.geometries import gemma3_metadata, gemma4_metadata, shapes_of
from luce_arch_gemma.params import GemmaParams

from luce_core.contracts import CacheOptions, Field, Group
from luce_core.errors import ModelFormatError
from luce_core.gguf import read_header
from luce_core.testing.gguf_header import write_header

FIXTURES = Path(__file__).parent / "fixtures"
VOCAB = 50
GEMMA3 = {
    **gemma3_metadata(layers=7, width=32, heads=4, kv_heads=2, dim=16, ffn=64, window=8),
    "gemma3.vocab_size": VOCAB,
}
PATTERN = [True, True, False, True, False, True, False]
GEMMA4 = gemma4_metadata(
    layers=7,
    width=32,
    heads=4,
    kv_heads=(2, 1),
    dims=(16, 32),
    ffn=64,
    pattern=PATTERN,
    **{
        "gemma4.vocab_size": VOCAB,
        "gemma4.attention.shared_kv_layers": 3,
        "gemma4.embedding_length_per_layer_input": 32,
        "gemma4.expert_count": 6,
        "gemma4.expert_used_count": 2,
        "gemma4.expert_feed_forward_length": 32,
    },
)
SHAPES3, SHAPES4 = shapes_of(GEMMA3, VOCAB, k_eq_v=False), shapes_of(GEMMA4, VOCAB, k_eq_v=True)


def described(folder, arch="gemma4", metadata=None, shapes=None, drop=()):
    keys = {**(GEMMA3 if arch == "gemma3" else GEMMA4), **(metadata or {})}
    tensors = {**(SHAPES3 if arch == "gemma3" else SHAPES4), **(shapes or {})}
    path = write_header(
        folder / "tiny.gguf",
        {key: value for key, value in keys.items() if key not in drop},
        {name: shape for name, shape in tensors.items() if name not in drop},
    )
    return describe(read_header(path), CacheOptions(0))


def params_of(spec) -> GemmaParams:
    return spec.details["decoder"]


def test_a_fixture_is_described():
    spec = describe(read_header(FIXTURES / "tiny-gemma4.gguf"), CacheOptions(0))
    assert (spec.arch, spec.num_layers, spec.hidden, spec.vocab, spec.context) == ("gemma4", 6, 64, 300, 512)
    assert (spec.position_axes, spec.tap_width, spec.final_width, spec.tree) == (1, 64, 64, "any")
    assert spec.layout.groups == (Group("window.24", window=24), Group("full"))
    assert [pages.group for pages in spec.layout.pages] == ["window.24"] * 5 + ["full"]
    assert spec.layout.pages[0].fields == {"k": Field((2, 16), "kv.k"), "v": Field((2, 16), "kv.v")}
    assert spec.layout.pages[5].fields == {"v": Field((1, 32), "kv.v")}


def test_layers_that_share_keys_have_no_state(tmp_path):
    spec = described(tmp_path)
    assert [pages.layer for pages in spec.layout.pages] == [0, 1, 2, 3]
    assert [layer.kv_layer for layer in params_of(spec).layers] == [0, 1, 2, 3, 2, 3, 2]
    assert [set(pages.fields) for pages in spec.layout.pages] == [{"k", "v"}, {"k", "v"}, {"v"}, {"k", "v"}]


def test_what_a_token_does_not_read_is_left_out(tmp_path):
    """Of the per-layer table one row, in Q8_0 (7 · 32 is no multiple of 256); of six experts two."""
    spec = described(tmp_path)
    table = 7 * 32 * 34 // 32 * (VOCAB - 1)
    expert = 7 * ((2 * 32 * 32 + 32 * 32) * 22 // 32 + 4)  # and its factor
    assert spec.weight_bytes - spec.active_bytes == table + (6 - 2) * expert


def test_defaults_of_absent_keys(tmp_path):
    absent = ("gemma3.attention.value_length", "gemma3.rope.freq_base")
    params = params_of(described(tmp_path, "gemma3", drop=absent))
    assert [layer.local for layer in params.layers] == [True] * 5 + [False, True]
    assert (params.local_rope.theta, params.global_rope.theta) == (10000.0, 10000.0)
    assert (params.final_softcap, params.attention_scale, params.experts) == (0.0, 16**-0.5, None)


def test_scaling_is_for_global_layers(tmp_path):
    keys = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    params = params_of(described(tmp_path, "gemma3", keys))
    assert (params.global_rope.factor, params.local_rope.factor) == (8.0, 1.0)


REQUIRED = [
    ("gemma3", "gemma3.block_count"),
    ("gemma3", "gemma3.context_length"),
    ("gemma3", "gemma3.embedding_length"),
    ("gemma3", "gemma3.attention.head_count"),
    ("gemma3", "gemma3.attention.layer_norm_rms_epsilon"),
    ("gemma4", "gemma4.attention.sliding_window_pattern"),
    ("gemma4", "gemma4.expert_used_count"),
    ("gemma4", "gemma4.expert_feed_forward_length"),
]


@pytest.mark.parametrize(("arch", "key"), REQUIRED)
def test_a_missing_key_is_named(tmp_path, arch, key):
    with pytest.raises(ModelFormatError, match=f"'{key}' is missing"):
        described(tmp_path, arch, drop=(key,))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gemma3.block_count", 0),
        ("gemma3.embedding_length", 0),
        ("gemma3.feed_forward_length", 0),
        ("gemma3.attention.head_count_kv", 3),
        ("gemma3.attention.value_length", 8),
        ("gemma3.attention.sliding_window", "wide"),
        ("gemma3.attention.sliding_window_pattern", 0),
        ("gemma3.attention.sliding_window_pattern", [True, False]),
        ("gemma3.attention.sliding_window_pattern", [1, 0, 1, 1, 1, 1, 1]),
        ("gemma3.attention.sliding_window_pattern", "all"),
        ("gemma3.rope.freq_base", 0.0),
        ("gemma3.rope.freq_base_swa", -1.0),
        ("gemma3.rope.scaling.type", "longrope"),
        ("gemma3.rope.dimension_count_swa", 64),
        ("gemma3.final_logit_softcapping", -30.0),
        ("gemma3.final_logit_softcapping", float("nan")),
        ("gemma4.attention.sliding_window", 0),
        ("gemma4.attention.value_length", 16),
        ("gemma4.attention.value_length_swa", 8),
        ("gemma4.attention.key_length_swa", 0),
        ("gemma4.attention.shared_kv_layers", 7),
        ("gemma4.attention.shared_kv_layers", 5),
        ("gemma4.attention.head_count_kv", [2, 2, 1, 2, 2, 2, 1]),
        ("gemma4.attention.head_count_kv", [2, 2, 1]),
        ("gemma4.feed_forward_length", [64, 64]),
        ("gemma4.rope.dimension_count", 33),
        ("gemma4.expert_used_count", 7),
        ("gemma4.expert_used_count", 0),
        ("gemma4.expert_feed_forward_length", 0),
        ("gemma4.embedding_length_per_layer_input", "wide"),
    ],
)
def test_a_key_out_of_range_is_named(tmp_path, key, value):
    with pytest.raises(ModelFormatError, match=f"'{key}'"):
        described(tmp_path, key.partition(".")[0], {key: value})


TENSORS = [("gemma3", name) for name in SHAPES3 if not name.startswith("blk.") or ".0." in name]
TENSORS += [
    ("gemma4", name)
    for name in SHAPES4
    if not name.startswith("blk.") or name.startswith(("blk.0.", "blk.2.", "blk.6."))
]


@pytest.mark.parametrize(("arch", "name"), TENSORS)
def test_a_missing_tensor_is_named(tmp_path, arch, name):
    with pytest.raises(ModelFormatError, match=f"'{name}' is missing"):
        described(tmp_path, arch, drop=(name,))


@pytest.mark.parametrize(("arch", "name"), TENSORS)
def test_a_misshapen_tensor_is_named(tmp_path, arch, name):
    shape = (SHAPES3 if arch == "gemma3" else SHAPES4)[name]
    with pytest.raises(ModelFormatError, match=f"'{name}' has the shape"):
        described(tmp_path, arch, shapes={name: (shape[0] + 1, *shape[1:])})


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("output.weight", (49, 32)),
        ("blk.2.attn_v.weight", (16, 32)),
        ("blk.0.ffn_gate_exps.weight", (6, 32, 64)),
    ],
)
def test_a_misshapen_optional_tensor_is_named(tmp_path, name, shape):
    gone = ("blk.0.ffn_gate_up_exps.weight",) if "gate_exps" in name else ()
    with pytest.raises(ModelFormatError, match=f"'{name}' has the shape"):
        described(tmp_path, shapes={name: shape}, drop=gone)


def test_a_vocabulary_longer_than_the_table_is_refused(tmp_path):
    tokens = {"tokenizer.ggml.tokens": [f"t{n}" for n in range(VOCAB + 1)]}
    with pytest.raises(ModelFormatError, match=r"'token_embd.weight' has .* \[50, 32\]; wanted \[51, 32\]"):
        described(tmp_path, "gemma3", tokens)
