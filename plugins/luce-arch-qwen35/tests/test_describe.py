"""What a header says, and every way it can be wrong: one ModelFormatError naming the key or tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
from luce_arch_qwen35.describe import describe
from luce_arch_qwen35.geometries import metadata_of, shapes_of
from luce_arch_qwen35.params import HybridParams

from luce_core.contracts import CacheOptions, Field, Group
from luce_core.errors import ModelFormatError
from luce_core.gguf import read_header
from luce_core.testing.gguf_header import write_header

FIXTURES = Path(__file__).parent / "fixtures"
SIZES = {"layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "value_heads": 6, "key_heads": 2, "dim": 16}
SIZES |= {"state": 16, "sections": (2, 1, 1, 0), "turning": 8, "nextn": 1, "vocab": 50}
DENSE = metadata_of(**SIZES, ffn=64)
MOE = metadata_of(**SIZES, experts=(6, 2, 32, 64))
KEYS, SHAPES = {"qwen35": DENSE, "qwen35moe": MOE}, {"qwen35": shapes_of(DENSE), "qwen35moe": shapes_of(MOE)}


def described(folder, arch="qwen35", metadata=None, shapes=None, drop=()):
    keys, tensors = {**KEYS[arch], **(metadata or {})}, {**SHAPES[arch], **(shapes or {})}
    path = write_header(
        folder / "tiny.gguf",
        {key: value for key, value in keys.items() if key not in drop},
        {name: shape for name, shape in tensors.items() if name not in drop},
    )
    return describe(read_header(path), CacheOptions(0))


def params_of(spec) -> HybridParams:
    return spec.details["decoder"]


def kinds(spec):
    return [block.recurrent for block in params_of(spec).trunk]


def test_a_fixture_is_described():
    spec = describe(read_header(FIXTURES / "tiny-qwen35.gguf"), CacheOptions(0))
    assert (spec.arch, spec.num_layers, spec.hidden, spec.vocab, spec.context) == ("qwen35", 4, 64, 300, 512)
    assert (spec.position_axes, spec.tap_width, spec.final_width, spec.tree) == (3, 64, 64, "any")
    assert spec.layout.groups == (Group("full"),)
    (pages,) = spec.layout.pages
    assert (pages.name, pages.layer) == ("blk.3.kv", 3)
    assert pages.fields == {"k": Field((2, 32), "kv.k"), "v": Field((2, 32), "kv.v")}
    assert [slot.name for slot in spec.layout.slots] == [
        f"blk.{layer}.{part}" for layer in range(3) for part in ("conv", "delta")
    ]
    conv, delta = spec.layout.slots[:2]
    assert (conv.state, conv.log) == (Field((3, 160), "f32"), {"row": Field((160,), "f32")})
    assert delta.state == Field((6, 16, 16), "f32")
    assert delta.log == {"k": Field((2, 16), "f32"), "u": Field((6, 16), "f32"), "g": Field((6,), "f32")}
    assert spec.nextn_layout is None
    assert spec.active_bytes == spec.weight_bytes - 300 * 64 * 4  # untied: of the table, one row


def test_a_token_reads_the_experts_it_is_routed_to():
    spec = describe(read_header(FIXTURES / "tiny-qwen35moe.gguf"), CacheOptions(0))
    experts = 4 * (8 - 2) * 3 * 48 * 64 * 4
    assert spec.weight_bytes - spec.active_bytes == experts + 300 * 64 * 4


def test_which_layers_are_recurrent(tmp_path):
    flags, interval = "qwen35.attention.recurrent_layers", "qwen35.full_attention_interval"
    assert kinds(described(tmp_path)) == [True, True, True, False]
    assert kinds(described(tmp_path, drop=(interval,))) == [True, True, True, False]
    turned = {"qwen35.block_count": 4, "qwen35.nextn_predict_layers": 0, interval: 2}
    path = write_header(tmp_path / "two.gguf", {**DENSE, **turned}, shapes_of({**DENSE, **turned}))
    assert kinds(describe(read_header(path), CacheOptions(0))) == [True, False, True, False]
    for given in ([True, True, True, False], [True, True, True, False, True]):  # the last: of the MTP block
        spec = described(tmp_path, metadata={flags: given, interval: 2})
        assert kinds(spec) == [True, True, True, False]
        assert [block.recurrent for block in params_of(spec).nextn] == [False]


def test_defaults_of_absent_keys(tmp_path):
    shapes = {"blk.3.attn_k.weight": (64, 32), "blk.3.attn_v.weight": (64, 32)}
    shapes |= {name.replace("3", "4", 1): shape for name, shape in shapes.items()}
    drop = ("qwen35.attention.head_count_kv", "qwen35.rope.freq_base")
    params = params_of(described(tmp_path, shapes=shapes, drop=drop))
    assert params.trunk[3].kv_heads == 4
    assert params.rope.theta == 10000.0


REQUIRED = [
    "block_count",
    "context_length",
    "embedding_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_sections",
    "ssm.conv_kernel",
    "ssm.state_size",
    "ssm.group_count",
    "ssm.time_step_rank",
    "ssm.inner_size",
]
EXPERT_KEYS = ["count", "used_count", "feed_forward_length", "shared_feed_forward_length"]


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(tmp_path, key):
    with pytest.raises(ModelFormatError, match=f"'qwen35.{key}' is missing"):
        described(tmp_path, drop=(f"qwen35.{key}",))


@pytest.mark.parametrize("key", EXPERT_KEYS)
def test_a_missing_key_of_the_experts_is_named(tmp_path, key):
    with pytest.raises(ModelFormatError, match=f"'qwen35moe.expert_{key}' is missing"):
        described(tmp_path, "qwen35moe", drop=(f"qwen35moe.expert_{key}",))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 0),
        ("nextn_predict_layers", 5),
        ("attention.head_count", 0),
        ("attention.head_count_kv", 3),
        ("attention.head_count_kv", [2, 2, 2, 2, 3]),
        ("attention.value_length", 8),
        ("attention.recurrent_layers", [True, False]),
        ("attention.recurrent_layers", [1, 1, 1, 0, 0]),
        ("full_attention_interval", 0),
        ("rope.dimension_count", 7),
        ("rope.dimension_count", 18),
        ("rope.dimension_sections", [2, 1, 0, 0]),
        ("rope.dimension_sections", [1, 1, 1, 1]),
        ("rope.dimension_sections", [2, 0, 2, 0]),
        ("rope.dimension_sections", [2, 1, 1, 0, 0]),
        ("rope.dimension_sections", [5, -1, 0, 0]),
        ("rope.freq_base", 0.0),
        ("ssm.conv_kernel", 1),
        ("ssm.conv_kernel", 1000),
        ("ssm.state_size", 0),
        ("ssm.group_count", 0),
        ("ssm.time_step_rank", 5),
        ("ssm.inner_size", 97),
        ("feed_forward_length", 0),
        ("expert_count", 4),
    ],
)
def test_a_key_out_of_range_is_named(tmp_path, key, value):
    with pytest.raises(ModelFormatError, match=f"'qwen35.{key}'"):
        described(tmp_path, metadata={f"qwen35.{key}": value})


@pytest.mark.parametrize(("key", "value"), [("count", 0), ("used_count", 7), ("used_count", 0)])
def test_a_key_of_the_experts_out_of_range_is_named(tmp_path, key, value):
    with pytest.raises(ModelFormatError, match=f"'qwen35moe.expert_{key}'"):
        described(tmp_path, "qwen35moe", {f"qwen35moe.expert_{key}": value})


OPTIONAL = ("output.weight", "blk.4.nextn.shared_head_norm.weight")
ROLES = [
    (arch, name)
    for arch, shapes in SHAPES.items()
    for name in shapes
    if not name.startswith(("blk.1.", "blk.2."))  # as layer 0
]


@pytest.mark.parametrize(("arch", "name"), [role for role in ROLES if role[1] not in OPTIONAL])
def test_a_missing_tensor_is_named(tmp_path, arch, name):
    with pytest.raises(ModelFormatError, match=f"'{name}' is missing"):
        described(tmp_path, arch, drop=(name,))


@pytest.mark.parametrize(("arch", "name"), ROLES)
def test_a_misshapen_tensor_is_named(tmp_path, arch, name):
    shape = SHAPES[arch][name]
    with pytest.raises(ModelFormatError, match=f"'{name}' has the shape"):
        described(tmp_path, arch, shapes={name: (shape[0] + 1, *shape[1:])})


@pytest.mark.parametrize("name", OPTIONAL)
def test_what_a_file_may_lack(tmp_path, name):
    described(tmp_path, drop=(name,))


@pytest.mark.parametrize(
    ("arch", "name", "shape"),
    [
        ("qwen35", "blk.3.attn_qkv.weight", (191, 32)),
        ("qwen35", "blk.4.nextn.embed_tokens.weight", (49, 32)),
        ("qwen35", "blk.4.nextn.shared_head_head.weight", (50, 33)),
        ("qwen35moe", "blk.0.ffn_gate_up_exps.weight", (6, 32, 32)),
        ("qwen35moe", "blk.0.ffn_gate_inp_shexp.weight", (33,)),
    ],
)
def test_a_misshapen_optional_tensor_is_named(tmp_path, arch, name, shape):
    with pytest.raises(ModelFormatError, match=f"'{name}' has the shape"):
        described(tmp_path, arch, shapes={name: shape})


def test_a_file_of_the_mtp_block_alone_is_refused_in_words(tmp_path):
    trunk = tuple(name for name in SHAPES["qwen35"] if name.startswith(("blk.0", "blk.1", "blk.2", "blk.3")))
    with pytest.raises(
        ModelFormatError, match=r"without the model they belong to\. Use the file of the model"
    ):
        described(tmp_path, drop=trunk)
