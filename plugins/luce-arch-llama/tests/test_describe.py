"""What a header says, and every way it can be wrong: one ModelFormatError naming the key or tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from luce_arch_llama.describe import describe

from luce_core.contracts import CacheOptions, Field, Group
from luce_core.errors import ModelFormatError
from luce_core.gguf import read_header
from luce_core.testing.gguf_factory import write_gguf
from luce_core.testing.rig import ModelRig

FIXTURES = Path(__file__).parent / "fixtures"
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 12,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 10,
}
SHAPES = {
    "token_embd.weight": (10, 8),
    "output_norm.weight": (8,),
    "blk.0.attn_norm.weight": (8,),
    "blk.0.ffn_norm.weight": (8,),
    "blk.0.attn_q.weight": (8, 8),
    "blk.0.attn_k.weight": (4, 8),
    "blk.0.attn_v.weight": (4, 8),
    "blk.0.attn_output.weight": (8, 8),
    "blk.0.ffn_gate.weight": (12, 8),
    "blk.0.ffn_up.weight": (12, 8),
    "blk.0.ffn_down.weight": (8, 12),
}


def described(folder, metadata=None, shapes=None, drop=()):
    found = {**METADATA, **(metadata or {})}
    tensors = {
        name: np.full(shape, 0.1, np.float32)
        for name, shape in {**SHAPES, **(shapes or {})}.items()
        if name not in drop
    }
    kept = {key: value for key, value in found.items() if key not in drop}
    path = write_gguf(folder / "tiny.gguf", kept, tensors)
    return describe(read_header(path), CacheOptions(0))


def test_a_fixture_is_described():
    spec = describe(read_header(FIXTURES / "tiny-llama.gguf"), CacheOptions(context=0))
    assert (spec.arch, spec.num_layers, spec.hidden, spec.vocab, spec.context) == ("llama", 4, 64, 300, 512)
    assert (spec.position_axes, spec.tap_width, spec.final_width, spec.tree) == (1, 64, 64, "any")
    assert spec.layout.groups == (Group("full"),)
    assert [pages.layer for pages in spec.layout.pages] == [0, 1, 2, 3]
    assert spec.layout.pages[0].fields == {"k": Field((2, 16), "kv.k"), "v": Field((2, 16), "kv.v")}
    # 300·64 embedding; per layer 64·64·2 + 64·32·2 attention, 3·64·96 MLP, 2·64 norms; 64 for the last norm
    assert spec.parameters == 300 * 64 + 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64) + 64
    assert spec.weight_bytes == 4 * spec.parameters
    assert spec.active_bytes == spec.weight_bytes  # tied: the table is read as the head


def test_an_untied_table_is_not_read_by_a_decoded_token():
    spec = describe(read_header(FIXTURES / "tiny-qwen2.gguf"), CacheOptions(context=0))
    assert spec.arch == "qwen2"
    assert spec.active_bytes == spec.weight_bytes - 300 * 64 * 4


def test_defaults_of_absent_keys(tmp_path):
    spec = described(
        tmp_path,
        drop=("llama.attention.head_count_kv", "llama.vocab_size"),
        shapes={"blk.0.attn_k.weight": (8, 8), "blk.0.attn_v.weight": (8, 8)},
    )
    params = spec.details["decoder"]
    assert params.kv_heads == (2,)  # as many as query heads
    assert params.head_dim == params.value_dim == 4  # embedding length / heads
    assert params.rope.theta == 10000.0
    assert spec.vocab == 10


def test_arrays_give_every_layer_its_own_number(tmp_path):
    shapes = {name.replace("blk.0", "blk.1"): shape for name, shape in SHAPES.items() if "blk" in name}
    shapes |= {"blk.1.ffn_gate.weight": (16, 8), "blk.1.ffn_up.weight": (16, 8)}
    shapes |= {"blk.1.ffn_down.weight": (8, 16)}
    shapes |= {"blk.1.attn_k.weight": (8, 8), "blk.1.attn_v.weight": (8, 8)}
    spec = described(
        tmp_path,
        {
            "llama.block_count": 2,
            "llama.feed_forward_length": [12, 16],
            "llama.attention.head_count_kv": [1, 2],
        },
        shapes,
    )
    assert spec.details["decoder"].ffn == (12, 16)
    assert [pages.fields["k"].shape for pages in spec.layout.pages] == [(1, 4), (2, 4)]
    rig = ModelRig(tmp_path / "tiny.gguf", "luce_arch_llama.hooks")
    assert rig.fresh([1, 2, 3]).shape == (3, 10)


REQUIRED = [
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.attention.head_count",
    "llama.attention.layer_norm_rms_epsilon",
]


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(tmp_path, key):
    with pytest.raises(ModelFormatError, match=f"'{key}' is missing"):
        described(tmp_path, drop=(key,))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 0),
        ("llama.block_count", 1 << 30),
        ("llama.block_count", "one"),
        ("llama.embedding_length", 0),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count", 3),
        ("llama.attention.head_count_kv", 0),
        ("llama.attention.head_count_kv", 3),
        ("llama.attention.head_count_kv", [1, 1]),
        ("llama.attention.key_length", 0),
        ("llama.rope.dimension_count", 3),
        ("llama.rope.dimension_count", 2),
        ("llama.rope.dimension_count", 64),
        ("llama.rope.freq_base", -1.0),
        ("llama.rope.freq_base", float("nan")),
        ("llama.rope.scaling.type", "longrope"),
        ("llama.rope.scaling.factor", 0.0),
        ("llama.feed_forward_length", 0),
        ("llama.attention.layer_norm_rms_epsilon", float("inf")),
        ("llama.nextn_predict_layers", 1),
        ("tokenizer.ggml.eos_token_id", "x"),
    ],
)
def test_a_key_out_of_range_is_named(tmp_path, key, value):
    with pytest.raises(ModelFormatError, match=f"'{key}'"):
        described(tmp_path, {key: value})


@pytest.mark.parametrize("name", SHAPES)
def test_a_missing_tensor_is_named(tmp_path, name):
    with pytest.raises(ModelFormatError, match=f"'{name}' is missing"):
        described(tmp_path, drop=(name,))


@pytest.mark.parametrize("name", SHAPES)
def test_a_misshapen_tensor_is_named(tmp_path, name):
    shape = SHAPES[name]
    with pytest.raises(ModelFormatError, match=f"'{name}' has the shape"):
        described(tmp_path, shapes={name: (*shape[:-1], shape[-1] + 4)})


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("output.weight", (9, 8)),
        ("rope_freqs.weight", (3,)),
        ("blk.0.attn_q.bias", (4,)),
        ("blk.0.attn_output.bias", (4,)),
        ("blk.0.ffn_down.bias", (12,)),
        ("blk.0.attn_qkv.weight", (12, 8)),
    ],
)
def test_a_misshapen_optional_tensor_is_named(tmp_path, name, shape):
    with pytest.raises(ModelFormatError, match=f"'{name}' has the shape"):
        described(tmp_path, shapes={name: shape})


def test_a_vocabulary_longer_than_the_table_is_refused(tmp_path):
    with pytest.raises(ModelFormatError, match=r"'token_embd.weight' has .* \[10, 8\]; wanted \[11, 8\]"):
        described(tmp_path, {"tokenizer.ggml.tokens": [f"t{n}" for n in range(11)]})


def test_a_mixture_of_experts_is_refused_in_words(tmp_path):
    with pytest.raises(ModelFormatError, match=r"mixture of 8 experts.*runs dense models only"):
        described(tmp_path, {"llama.expert_count": 8})
