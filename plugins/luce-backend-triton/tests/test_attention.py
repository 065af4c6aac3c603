"""Op `attention` beside the reference: ragged batches, trees, windows, gaps, every dtype of pages."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from luce_backend_triton import attention

from luce_core.contracts import AttentionSpec, Norm, Region, RopeSpec, SeqTable
from luce_core.model.batch import RowSet, make_batch
from luce_core.ops import build_ops

BLOCK = 8
TREE = [-1, 0, 0, 1, 3, -2]
OPS = build_ops()
DIM = 16


class World:
    """Pages, and batches of sequences whose blocks are shuffled."""

    def __init__(
        self, device, dtype=torch.float32, kv_heads=2, dim=DIM, value_dim=DIM, blocks=40, v_dtype=None
    ):
        self.device = device
        self.rng = torch.Generator().manual_seed(3)
        self.free = torch.randperm(blocks, generator=self.rng).tolist()
        shapes = {"k": (kv_heads, dim), "v": (kv_heads, value_dim)}
        fields = {name: self.rand(blocks, BLOCK, *shape).to(dtype) for name, shape in shapes.items()}
        fields["v"] = fields["v"].to(v_dtype or dtype)
        self.region = Region("r", "full", fields, BLOCK)

    def rand(self, *shape):
        return torch.randn(*shape, generator=self.rng).to(self.device)

    def table(self, tokens, gone=()):
        """Blocks for so many tokens, those numbered `gone` evicted."""
        kept = [n for n in range(-(-tokens // BLOCK)) if n not in gone]
        return {"full": SeqTable(tuple(self.free.pop() for _ in kept), tuple(n * BLOCK for n in kept))}

    def rows(self, slot, length, count, gone=(), **more):
        return RowSet(slot, length, [1] * count, self.table(length + count, gone), **more)

    def batch(self, phase, *rows):
        return make_batch(phase, list(rows), device=str(self.device))


def spec(heads=4, kv_heads=2, dim=DIM, value_dim=DIM, **more):
    rope = RopeSpec(torch.logspace(0, -2, dim // 4))
    return evolve(AttentionSpec(0, heads, kv_heads, dim, value_dim, dim**-0.5, rope), **more)


def moved(s, device):
    """The same on the device."""
    rope = s.rope and evolve(s.rope, inv_freq=s.rope.inv_freq.to(device))
    return evolve(s, rope=rope, sinks=None if s.sinks is None else s.sinks.to(device))


def compare(world, b, s, tolerance=1e-5, share=False):
    s = moved(s, world.device)
    rows = b.token.shape[0]
    q, gate = world.rand(rows, s.heads * s.head_dim), None
    if s.gate:
        gate = world.rand(rows, s.heads * (1 if s.gate_per_head else s.value_dim))
    k = v = None
    if not share:
        k, v = world.rand(rows, s.kv_heads * s.head_dim), world.rand(rows, s.kv_heads * s.value_dim)
    other = evolve(world.region, fields={name: page.clone() for name, page in world.region.fields.items()})
    want = OPS.attention(b, q, k, v, other, s, gate=gate)
    got = attention.attention(OPS, b, q, k, v, world.region, s, gate=gate)
    for name, page in other.fields.items():
        mine = world.region.fields[name]
        near = 1e-5 if page.dtype is torch.float32 else 1e-2  # RoPE may round to the other neighbour
        torch.testing.assert_close(mine.float(), page.float(), rtol=near, atol=near / 10)
    live = b.parent != -2 if b.phase == "held" else slice(None)
    torch.testing.assert_close(got[live], want[live], rtol=tolerance, atol=tolerance)


LAST = RopeSpec(torch.logspace(0, -2, 4), "adjacent", 1.3, part="last")
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0])
OPTIONS = {
    "plain": {},
    "window, sinks, softcap, gate": {"window": 5, "sinks": SINKS, "softcap": 2.0, "gate": "sigmoid"},
    "gate per head, adjacent, last": {"gate": "softplus", "gate_per_head": True, "window": 9, "rope": LAST},
    "MQA, no rope": {"heads": 8, "kv_heads": 1, "rope": None},
    "three to one, narrow values": {"heads": 6, "kv_heads": 2, "value_dim": 12, "dim": 24},
}


def world_and_spec(device, options, **more):
    s = spec(**options)
    return World(device, kv_heads=s.kv_heads, dim=s.head_dim, value_dim=s.value_dim, **more), s


@pytest.mark.parametrize("name", OPTIONS)
def test_trees_and_chains(device, name):
    w, s = world_and_spec(device, OPTIONS[name])
    rows = w.rows(1, 19, 6, parents=TREE), w.rows(0, 0, 1), w.rows(2, 8, 3)
    compare(w, w.batch("held", *rows), s)


@pytest.mark.parametrize("name", list(OPTIONS)[1:4])
def test_chunks(device, name):
    w, s = world_and_spec(device, OPTIONS[name])
    compare(w, w.batch("prefill", w.rows(1, 13, 9), w.rows(0, 0, 3), w.rows(2, 30, 1)), s)


@pytest.mark.parametrize("name", list(OPTIONS)[:3])
@pytest.mark.parametrize("lengths", [((13, 9),), ((13, 9), (0, 3), (30, 1))])
def test_rows_behind_the_last_sequence_change_nothing(device, name, lengths):
    w, s = world_and_spec(device, OPTIONS[name])
    s = moved(s, device)
    b = w.batch("prefill", *[w.rows(slot, *one) for slot, one in enumerate(lengths)])
    real, more = b.token.shape[0], padded(b, 6)
    other = evolve(w.region, fields={name: page.clone() for name, page in w.region.fields.items()})
    widths = (s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.value_dim)
    q, k, v = (w.rand(real + 6, width) for width in widths)
    gate = w.rand(real + 6, s.heads * (1 if s.gate_per_head else s.value_dim))
    given = {"gate": gate} if s.gate else {}
    kept = {name: value[:real] for name, value in given.items()}
    want = attention.attention(OPS, b, q[:real], k[:real], v[:real], other, s, **kept)
    got = attention.attention(OPS, more, q, k, v, w.region, s, **given)
    torch.testing.assert_close(got[:real], want, rtol=1e-5, atol=1e-5)
    assert got.isfinite().all()
    for name, page in other.fields.items():
        assert torch.equal(w.region.fields[name], page)


def padded(b, count):
    """With rows that stand for nothing."""
    sizes = {"token": 1, "index": 1, "seq": 0, "parent": -1}
    rows = {name: torch.nn.functional.pad(getattr(b, name), (0, count), value=x) for name, x in sizes.items()}
    position = torch.nn.functional.pad(b.position, (0, count), value=7)
    sees = torch.nn.functional.pad(b.sees, (0, 0, 0, count))
    return evolve(b, **rows, position=position, sees=sees, padded=True)


def test_norms_of_heads(device):
    w = World(device)
    norms = [Norm(1 + 0.2 * w.rand(DIM), 1e-6) for _ in range(3)]
    s = spec(q_norm=norms[0], k_norm=norms[1], v_norm=norms[2])
    compare(w, w.batch("prefill", w.rows(1, 13, 9)), s)


@pytest.mark.parametrize("types", [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_keys_and_values_have_types_of_their_own(device, types):
    w = World(device, types[0], v_dtype=types[1])
    compare(w, w.batch("held", w.rows(0, 30, 1)), spec(), 2e-2)
    compare(w, w.batch("prefill", w.rows(0, 30, 7)), spec(), 2e-2)


@pytest.mark.parametrize("window", [None, 300])
def test_one_row_of_a_long_text_is_split(device, window):
    w = World(device, kv_heads=1, blocks=200)
    s = spec(heads=2, kv_heads=1, window=window, sinks=torch.tensor([0.5, -0.5]))
    compare(w, w.batch("held", w.rows(0, 600, 1)), s)


@pytest.mark.parametrize(("phase", "window"), [("held", None), ("held", 18), ("prefill", 18)])
def test_evicted_blocks_leave_gaps(device, phase, window):
    w = World(device)
    rows = w.rows(0, 60, 5, gone=(0, 1, 3)), w.rows(1, 41, 2, gone=(0, 4))
    compare(w, w.batch(phase, *rows), spec(window=window))


def test_spans_see_each_other_unless_the_layer_is_causal(device):
    w = World(device)
    b = w.batch("prefill", w.rows(0, 10, 7), w.rows(1, 0, 4))
    span = torch.tensor([-1, 0, 0, 0, -1, 1, 1, 0, 0, -1, -1], dtype=torch.int32, device=device)
    b = evolve(b, span=span)
    compare(w, b, spec(bidirectional_spans=False))
    compare(w, b, spec(window=4))


def test_a_region_another_layer_filled(device):
    w = World(device)
    compare(w, w.batch("held", w.rows(0, 17, 3)), spec(), share=True)


def test_positions_on_three_axes(device):
    w = World(device)
    rope = RopeSpec(torch.logspace(0, -2, 4), sections=(2, 1, 1), interleaved_sections=True)
    rows = w.rows(0, 5, 4, positions=[[5, 6, 7, 8], [5, 5, 6, 6], [5, 6, 5, 6]])
    b = make_batch("prefill", [rows], axes=3, device=str(device))
    compare(w, b, spec(rope=rope))


def test_a_sequence_without_rows(device):
    w = World(device)
    rows = [w.rows(1, 19, 2), w.rows(0, 11, 1), w.rows(2, 9, 2)]
    b = w.batch("held", *rows)
    keep = torch.tensor([0, 1, 3, 4], device=device)
    b = evolve(
        b, token=b.token[keep], index=b.index[keep], position=b.position[:, keep], seq=b.seq[keep],
        parent=b.parent[keep], sees=b.sees[keep], wanted=b.wanted[:4],
        query_start=torch.tensor([0, 2, 2, 4], dtype=torch.int32, device=device),
    )  # fmt: skip
    compare(w, b, spec())


def test_other_fields_go_to_the_reference(device):
    w = World(device)
    region = evolve(w.region, fields={"v": w.region.fields["v"]})
    b = w.batch("held", w.rows(0, 5, 1))
    s = moved(spec(rope=None), device)
    v = w.rand(1, 2 * DIM)
    got = attention.attention(OPS, b, w.rand(1, 4 * DIM), None, v, region, s)
    assert got.shape == (1, 4 * DIM)


def test_cuts_hold_all_query_heads_of_a_kv_head():
    for rows in (1, 2, 16, 512):
        for group in (1, 3, 6, 8, 64, 128):
            for width in (64, 128, 256, 512):
                shape = attention.cut(rows, 1, group, width, 2, attention.EMULATED)
                assert shape.rows * group <= shape.m
                assert shape.m & (shape.m - 1) == 0
    assert attention.splits_of(4, 4096, 32, 264) == 64
    assert attention.splits_of(512, 1 << 20, 64, 132) == 1
