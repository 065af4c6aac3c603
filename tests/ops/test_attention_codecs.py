"""Attention over quantized pages: as over numbers that went through the codec and back."""

from __future__ import annotations

import pytest
import torch

from luce_core.contracts import CODECS, AttentionSpec, CodedField, Commit, Norm, Region, RopeSpec
from luce_core.errors import PluginError
from luce_core.ops import build_ops
from luce_core.ops.codecs import decode, encode
from luce_core.ops.pages import sequences
from luce_core.testing.op_cases.case import BLOCK, BLOCKS, OpWorld

OPS = build_ops()
HEADS, KV_HEADS, DIM = 4, 2, 128
TYPES = ["f32", *CODECS]
TURN = RopeSpec(torch.logspace(0, -2, 16))
LAST = RopeSpec(torch.logspace(0, -2, 32), "adjacent", part="last")
SHAPES = {
    "k v": {"k": (KV_HEADS, DIM), "v": (KV_HEADS, DIM)},
    "v": {"v": (KV_HEADS, DIM)},
    "k": {"k": (1, DIM)},
    "latent rope": {"latent": (DIM - 64,), "rope": (64,)},
}


def regions(shapes, types):
    """Of codes, and of numbers, in the same places; full of what nobody here wrote."""
    world, codes, codecs = OpWorld(OPS), {}, {}
    for name, shape in shapes.items():
        if types[name] == "f32":
            codes[name] = world.numbers(BLOCKS, BLOCK, *shape)
            continue
        codecs[name] = CodedField(CODECS[types[name]], shape[-1])
        codes[name] = encode(codecs[name], world.numbers(BLOCKS, BLOCK, *shape))  # of an earlier sequence
    numbers = {name: torch.randn(BLOCKS, BLOCK, *shape) for name, shape in shapes.items()}
    return (
        Region("kv", "full", codes, BLOCK, codecs=codecs),
        Region("kv", "full", numbers, BLOCK),
    )


def given(world, b, spec, kind):
    """q, k and v for this kind of region."""
    k = None if kind == "v" else world.rows(b, 64 if kind == "latent rope" else spec.kv_heads * DIM)
    v = None if kind == "k" else world.rows(b, spec.kv_heads * spec.value_dim)
    return world.rows(b, HEADS * DIM), k, v


@pytest.mark.parametrize("phase", ["prefill", "held"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("v_type", TYPES)
@pytest.mark.parametrize("k_type", TYPES)
def test_keys_and_values_of_any_types(k_type, v_type, window, phase):
    coded, plain = regions(SHAPES["k v"], {"k": k_type, "v": v_type})
    norm = Norm(torch.linspace(0.5, 1.5, DIM), 1e-6)
    spec = AttentionSpec(0, HEADS, KV_HEADS, DIM, DIM, DIM**-0.5, TURN, k_norm=norm, window=window)
    check(coded, plain, spec, "k v", phase)


@pytest.mark.parametrize("phase", ["prefill", "held"])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", ["v", "k", "latent rope"])
def test_other_kinds_of_regions(kind, codec, phase):
    coded, plain = regions(SHAPES[kind], dict.fromkeys(("k", "v", "latent", "rope"), codec))
    value_dim = DIM - 64 if kind == "latent rope" else DIM
    heads = KV_HEADS if kind == "v" else 1
    rope = TURN if kind == "v" else LAST
    check(coded, plain, AttentionSpec(0, HEADS, heads, DIM, value_dim, DIM**-0.5, rope), kind, phase)


def check(coded, plain, spec, kind, phase):
    """A prompt's worth of committed entries, then the phase; every answer is that over rounded numbers."""
    for fill in (True, False):
        world = OpWorld(OPS)
        b = world.batch("prefill" if fill else phase)  # first what the phase finds committed
        q, k, v = given(world, b, spec, kind)
        got = OPS.attention(b, q, k, v, coded, spec)
        OPS.attention(b, q, k, v, plain, spec)
        known = {name: pages.clone() for name, pages in plain.fields.items()}
        for name, pages in plain.fields.items():  # garbage is garbage in its own way
            how = coded.codecs.get(name)
            pages.copy_(coded.fields[name] if how is None else decode(how, coded.fields[name]))
        want = OPS.attention(b, q, None, None, plain, spec)
        assert got.isfinite().all()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        # And what the codes say is near what was written.
        rows = written(b, coded)
        for name, pages in plain.fields.items():
            a, z = pages.flatten(0, 1)[rows], known[name].flatten(0, 1)[rows]
            assert (a - z).norm() < 0.25 * z.norm()


def written(b, region):
    """Flat entries the rows of a batch go to."""
    return torch.cat([seq.written(b, region)[1] for seq in sequences(b, region)])


@pytest.mark.parametrize("codec", CODECS)
def test_accepted_rows_move_with_their_scales(codec):
    coded, _ = regions(SHAPES["k v"], {"k": codec, "v": codec})
    b = OpWorld(OPS).batch("held")
    spec = AttentionSpec(0, HEADS, KV_HEADS, DIM, DIM, DIM**-0.5, None)
    OPS.attention(b, *given(OpWorld(OPS), b, spec, "k v"), coded, spec)
    entries = written(b, coded)  # of five rows, then of two
    before = {name: pages.flatten(0, 1)[entries].clone() for name, pages in coded.fields.items()}
    OPS.commit_pages(b, Commit(torch.tensor([[0, 1, 3], [0, 0, 0]]), torch.tensor([3, 1])), [coded])
    for name, pages in coded.fields.items():
        now = pages.flatten(0, 1)[entries]
        assert torch.equal(now[[0, 1, 2]], before[name][[0, 1, 3]])
        assert torch.equal(now[5], before[name][5])


def test_compressed_entries_are_never_codes():
    how = CodedField(CODECS["q8_0"], 128)
    pages = torch.zeros(BLOCKS, 4, 1, 136, dtype=torch.uint8)
    pooled = Region("pooled", "pooled", {"k": pages}, 4, 2, codecs={"k": how})
    near, _ = regions(SHAPES["k"], {"k": "f32"})
    b = OpWorld(OPS).batch("prefill")
    spec = AttentionSpec(0, HEADS, 1, DIM, DIM, DIM**-0.5, None)
    q, k, v = given(OpWorld(OPS), b, spec, "k")
    with pytest.raises(PluginError, match="'pooled' is kept in q8_0; compressed entries are numbers"):
        OPS.attention(b, q, k, v, near, spec, extra=(pooled, None))
