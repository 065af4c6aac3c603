"""What a header says, and every way it can be wrong: one ModelFormatError naming the key or tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
from luce_arch_qwen3.describe import describe
from luce_arch_qwen3.geometries import metadata, shapes_of

from luce_core.contracts import CacheOptions, Field, Group
from luce_core.errors import ModelFormatError
from luce_core.gguf import read_header
from luce_core.model.metadata import ExpertParams
from luce_core.testing.gguf_header import write_header

FIXTURES = Path(__file__).parent / "fixtures"
VOCAB = 50
SIZES = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "dim": 16, "ffn": 64}
DENSE = metadata("qwen3", **SIZES, vocab_size=VOCAB)
MOE = metadata(
    "qwen3moe",
    **SIZES,
    vocab_size=VOCAB,
    expert_count=6,
    expert_used_count=2,
    expert_feed_forward_length=32,
)
KEYS = {"qwen3": DENSE, "qwen3moe": MOE}
SHAPES = {"qwen3": shapes_of(DENSE, VOCAB, tied=True), "qwen3moe": shapes_of(MOE, VOCAB, tied=False)}


def described(folder, arch="qwen3moe", metadata=None, shapes=None, drop=()):
    keys, tensors = {**KEYS[arch], **(metadata or {})}, {**SHAPES[arch], **(shapes or {})}
    path = write_header(
        folder / "tiny.gguf",
        {key: value for key, value in keys.items() if key not in drop},
        {name: shape for name, shape in tensors.items() if name not in drop},
    )
    return describe(read_header(path), CacheOptions(0))


def test_a_fixture_is_described():
    spec = describe(read_header(FIXTURES / "tiny-qwen3.gguf"), CacheOptions(0))
    assert (spec.arch, spec.num_layers, spec.hidden, spec.vocab, spec.context) == ("qwen3", 4, 64, 300, 512)
    assert (spec.position_axes, spec.tap_width, spec.final_width, spec.tree) == (1, 64, 64, "any")
    assert spec.layout.groups == (Group("full"),)
    assert [pages.layer for pages in spec.layout.pages] == [0, 1, 2, 3]
    assert spec.layout.pages[0].fields == {"k": Field((2, 32), "kv.k"), "v": Field((2, 32), "kv.v")}
    assert spec.details["experts"] is None
    assert spec.details["decoder"].rope.num_rotated == 32
    # 300·64 embedding; per layer 2·64·128 + 2·64·64 attention, 2·32 its norms, 3·64·96 MLP, 2·64 norms
    layer = 2 * 64 * 128 + 2 * 64 * 64 + 2 * 32 + 3 * 64 * 96 + 2 * 64
    assert spec.parameters == 300 * 64 + 4 * layer + 64
    assert spec.active_bytes == spec.weight_bytes == 4 * spec.parameters  # tied: the table is the head


def test_a_fixture_with_experts_is_described():
    spec = describe(read_header(FIXTURES / "tiny-qwen3moe.gguf"), CacheOptions(0))
    assert spec.details["experts"] == ExpertParams(count=8, used=2, ffn=48)
    # a token reads two experts of eight, and the head, but only a row of the table
    assert spec.weight_bytes - spec.active_bytes == 4 * (4 * 6 * 3 * 48 * 64 + 300 * 64)


def test_special_tokens_are_those_of_the_file(tmp_path):
    ids = {"tokenizer.ggml.eos_token_id": 45, "tokenizer.ggml.padding_token_id": 43}
    assert described(tmp_path, metadata=ids).tokens == {"eos": (45,), "pad": (43,)}


def test_experts_share_the_dense_width_where_no_key_says_theirs(tmp_path):
    spec = described(tmp_path, drop=("qwen3moe.expert_feed_forward_length",))
    assert spec.details["experts"].ffn == 64 // 2
    width = "qwen3moe.feed_forward_length"
    assert described(tmp_path, drop=(width,)).details["experts"].ffn == 32
    with pytest.raises(ModelFormatError, match=r"'qwen3moe.expert_feed_forward_length' is missing"):
        described(tmp_path, drop=(width, "qwen3moe.expert_feed_forward_length"))


REQUIRED = [
    ("qwen3", "qwen3.block_count"),
    ("qwen3", "qwen3.context_length"),
    ("qwen3", "qwen3.embedding_length"),
    ("qwen3", "qwen3.attention.head_count"),
    ("qwen3", "qwen3.attention.layer_norm_rms_epsilon"),
    ("qwen3moe", "qwen3moe.expert_count"),
    ("qwen3moe", "qwen3moe.expert_used_count"),
]


@pytest.mark.parametrize(("arch", "key"), REQUIRED)
def test_a_missing_key_is_named(tmp_path, arch, key):
    with pytest.raises(ModelFormatError, match=f"'{key}' is missing"):
        described(tmp_path, arch, drop=(key,))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("qwen3.block_count", 0),
        ("qwen3.embedding_length", 0),
        ("qwen3.feed_forward_length", 0),
        ("qwen3.feed_forward_length", [64, 0]),
        ("qwen3.feed_forward_length", [64]),
        ("qwen3.attention.head_count_kv", 3),
        ("qwen3.attention.key_length", 0),
        ("qwen3.rope.dimension_count", 8),
        ("qwen3.rope.dimension_count", 15),
        ("qwen3.rope.freq_base", 0.0),
        ("qwen3.rope.scaling.type", "longrope"),
        ("qwen3.attention.layer_norm_rms_epsilon", float("nan")),
        ("qwen3.expert_count", 8),
        ("qwen3moe.expert_count", 0),
        ("qwen3moe.expert_used_count", 0),
        ("qwen3moe.expert_used_count", 7),
        ("qwen3moe.expert_feed_forward_length", 0),
        ("qwen3moe.expert_feed_forward_length", "wide"),
    ],
)
def test_a_key_out_of_range_is_named(tmp_path, key, value):
    with pytest.raises(ModelFormatError, match=f"'{key}'"):
        described(tmp_path, key.partition(".")[0], {key: value})


TENSORS = [(arch, name) for arch, shapes in SHAPES.items() for name in shapes if "blk.1" not in name]


@pytest.mark.parametrize(("arch", "name"), [found for found in TENSORS if found[1] != "output.weight"])
def test_a_missing_tensor_is_named(tmp_path, arch, name):
    with pytest.raises(ModelFormatError, match=f"'{name}' is missing"):
        described(tmp_path, arch, drop=(name,))


@pytest.mark.parametrize(("arch", "name"), TENSORS)
def test_a_misshapen_tensor_is_named(tmp_path, arch, name):
    shape = SHAPES[arch][name]
    with pytest.raises(ModelFormatError, match=f"'{name}' has the shape"):
        described(tmp_path, arch, shapes={name: (shape[0] + 1, *shape[1:])})


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blk.0.attn_qkv.weight", (64, 32)),
        ("blk.1.attn_q.bias", (32,)),
        ("blk.1.attn_output.bias", (64,)),
        ("blk.1.ffn_gate_up_exps.weight", (6, 32, 32)),
    ],
)
def test_a_misshapen_optional_tensor_is_named(tmp_path, name, shape):
    with pytest.raises(ModelFormatError, match=f"'{name}' has the shape"):
        described(tmp_path, shapes={name: shape})


def test_a_vocabulary_longer_than_the_table_is_refused(tmp_path):
    tokens = {"tokenizer.ggml.tokens": [f"t{n}" for n in range(VOCAB + 1)]}
    with pytest.raises(ModelFormatError, match=r"'token_embd.weight' has .* \[50, 32\]; wanted \[51, 32\]"):
        described(tmp_path, "qwen3", tokens)
