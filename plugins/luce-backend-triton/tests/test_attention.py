"""Op `attention` beside the reference: ragged batches, trees, windows, gaps, every dtype of pages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from attrs import evolve
from luce_backend_triton import attention as plain
from luce_backend_triton import attention_cuts
from luce_backend_triton.invariant import attention as invariant

from luce_core.contracts import Norm, RopeSpec
from luce_core.model.batch import make_batch
from luce_core.ops import build_ops

sys.path.insert(0, str(Path(__file__).parent))
from worlds import DIM, Pages, moved, padded, spec

TREE = [-1, 0, 0, 1, 3, -2]
OPS = build_ops()
MODULE = plain


@pytest.fixture(params=[plain, invariant], ids=["plain", "invariant"], autouse=True)
def attention(request, monkeypatch):
    """The module of the op: every test runs for both."""
    monkeypatch.setitem(globals(), "MODULE", request.param)
    return request.param


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
    got = MODULE.attention(OPS, b, q, k, v, world.region, s, gate=gate)
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
    return Pages(device, kv_heads=s.kv_heads, dim=s.head_dim, value_dim=s.value_dim, **more), s


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
    want = MODULE.attention(OPS, b, q[:real], k[:real], v[:real], other, s, **kept)
    got = MODULE.attention(OPS, more, q, k, v, w.region, s, **given)
    torch.testing.assert_close(got[:real], want, rtol=1e-5, atol=1e-5)
    assert got.isfinite().all()
    for name, page in other.fields.items():
        assert torch.equal(w.region.fields[name], page)


def test_norms_of_heads(device):
    w = Pages(device)
    norms = [Norm(1 + 0.2 * w.rand(DIM), 1e-6) for _ in range(3)]
    s = spec(q_norm=norms[0], k_norm=norms[1], v_norm=norms[2])
    compare(w, w.batch("prefill", w.rows(1, 13, 9)), s)


@pytest.mark.parametrize("types", [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_keys_and_values_have_types_of_their_own(device, types):
    w = Pages(device, types[0], v_dtype=types[1])
    compare(w, w.batch("held", w.rows(0, 30, 1)), spec(), 2e-2)
    compare(w, w.batch("prefill", w.rows(0, 30, 7)), spec(), 2e-2)


@pytest.mark.parametrize("name", OPTIONS)
def test_one_row_each(device, name):
    w, s = world_and_spec(device, OPTIONS[name])
    compare(w, w.batch("held", w.rows(1, 70, 1), w.rows(0, 0, 1), w.rows(2, 8, 1), w.rows(3, 7, 1)), s)


def test_one_row_with_norms_at_a_position_of_its_own_in_strided_inputs(device):
    w = Pages(device)
    norms = [Norm(1 + 0.2 * w.rand(DIM), 1e-6) for _ in range(3)]
    rope = RopeSpec(torch.logspace(0, -2, 4), sections=(2, 1, 1), interleaved_sections=True)
    s = spec(q_norm=norms[0], k_norm=norms[1], v_norm=norms[2], rope=rope, gate="sigmoid")
    rows = [w.rows(slot, 12 + slot, 1, positions=[[3], [4 + slot], [9]]) for slot in range(2)]
    b, s = make_batch("held", rows, axes=3, device=str(device)), moved(s, device)
    both = w.rand(2, 4, 2 * DIM)
    k, v = w.rand(2, 5 * DIM)[:, DIM : 3 * DIM], w.rand(2, 5 * DIM)[:, 3 * DIM :]
    other = evolve(w.region, fields={name: page.clone() for name, page in w.region.fields.items()})
    given = both[..., :DIM], k, v
    want = OPS.attention(b, *given, other, s, gate=both[..., DIM:])
    got = MODULE.attention(OPS, b, *given, w.region, s, gate=both[..., DIM:])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for name, page in other.fields.items():
        torch.testing.assert_close(w.region.fields[name], page, rtol=1e-5, atol=1e-5)


def test_one_row_beside_gaps_of_a_shared_region_and_as_padding(device):
    w = Pages(device)
    gaps = w.batch("held", w.rows(0, 60, 1, gone=(0, 1, 3)), w.rows(1, 40, 1, gone=(0, 4)))
    compare(w, gaps, spec())
    compare(w, gaps, spec(window=18))
    compare(w, w.batch("held", w.rows(0, 17, 1)), spec(), share=True)
    b = w.batch("held", w.rows(1, 9, 1), w.rows(2, 5, 1))
    unused = torch.tensor([-2, -1], dtype=torch.int32, device=device)
    compare(w, evolve(b, parent=unused, sees=b.sees * (unused != -2)[:, None]), spec())


class Never:
    """Stands for a kernel that is not to be launched."""

    def __getitem__(self, grid):
        raise AssertionError("launched")


def test_one_row_is_one_launch_where_the_text_is_short(device, monkeypatch):
    monkeypatch.setattr(plain.row_kernels, "make_rows", Never())
    monkeypatch.setattr(plain.kernels, "attend", Never())
    w = Pages(device, kv_heads=1, blocks=200)
    s = moved(spec(heads=2, kv_heads=1), device)
    q, k, v = w.rand(1, 2 * DIM), w.rand(1, DIM), w.rand(1, DIM)
    long = w.batch("held", w.rows(0, 600, 1))
    plain.attention(OPS, long, q, k, v, w.region, s)
    monkeypatch.setattr(plain.kernels, "join", Never())
    plain.attention(OPS, w.batch("held", w.rows(0, 200, 1)), q, k, v, w.region, s)
    with pytest.raises(AssertionError, match="launched"):
        plain.attention(OPS, long, q, k, v, w.region, s)


def test_heads_too_many_for_one_launch_take_more(device):
    w = Pages(device, kv_heads=1)
    compare(w, w.batch("held", w.rows(0, 30, 1)), spec(heads=64, kv_heads=1))


@pytest.mark.parametrize("window", [None, 300])
def test_one_row_of_a_long_text_is_split(device, window):
    w = Pages(device, kv_heads=1, blocks=200)
    s = spec(heads=2, kv_heads=1, window=window, sinks=torch.tensor([0.5, -0.5]))
    compare(w, w.batch("held", w.rows(0, 600, 1)), s)


@pytest.mark.parametrize(("phase", "window"), [("held", None), ("held", 18), ("prefill", 18)])
def test_evicted_blocks_leave_gaps(device, phase, window):
    w = Pages(device)
    rows = w.rows(0, 60, 5, gone=(0, 1, 3)), w.rows(1, 41, 2, gone=(0, 4))
    compare(w, w.batch(phase, *rows), spec(window=window))


def test_spans_see_each_other_unless_the_layer_is_causal(device):
    w = Pages(device)
    b = w.batch("prefill", w.rows(0, 10, 7), w.rows(1, 0, 4))
    span = torch.tensor([-1, 0, 0, 0, -1, 1, 1, 0, 0, -1, -1], dtype=torch.int32, device=device)
    b = evolve(b, span=span)
    compare(w, b, spec(bidirectional_spans=False))
    compare(w, b, spec(window=4))


def test_a_region_another_layer_filled(device):
    w = Pages(device)
    compare(w, w.batch("held", w.rows(0, 17, 3)), spec(), share=True)


def test_positions_on_three_axes(device):
    w = Pages(device)
    rope = RopeSpec(torch.logspace(0, -2, 4), sections=(2, 1, 1), interleaved_sections=True)
    rows = w.rows(0, 5, 4, positions=[[5, 6, 7, 8], [5, 5, 6, 6], [5, 6, 5, 6]])
    b = make_batch("prefill", [rows], axes=3, device=str(device))
    compare(w, b, spec(rope=rope))


def test_a_sequence_without_rows(device):
    w = Pages(device)
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
    w = Pages(device)
    region = evolve(w.region, fields={"v": w.region.fields["v"]})
    b = w.batch("held", w.rows(0, 5, 1))
    s = moved(spec(rope=None), device)
    v = w.rand(1, 2 * DIM)
    got = MODULE.attention(OPS, b, w.rand(1, 4 * DIM), None, v, region, s)
    assert got.shape == (1, 4 * DIM)


def test_cuts_hold_all_query_heads_of_a_kv_head():
    for rows in (1, 2, 16, 512):
        for group in (1, 3, 6, 8, 64, 128):
            for width in (64, 128, 256, 512):
                for places in (64, 4096):
                    shape = attention_cuts.cut(rows, 1, places, 2 * group, 2, width, 2, plain.EMULATED)
                    assert shape.rows * group <= shape.m
                    assert shape.m & (shape.m - 1) == 0
    assert attention_cuts.splits_of(4, 4096, 32, 264) == 64
    assert attention_cuts.splits_of(512, 1 << 20, 64, 132) == 1


@pytest.mark.parametrize("window", [None, 7])
def test_a_tree_over_several_small_tiles(device, monkeypatch, window):
    monkeypatch.setattr(plain, "room_of", lambda _: attention_cuts.Room(132, 232448, True))
    w, s = world_and_spec(device, {"heads": 12, "kv_heads": 2, "window": window, "gate": "sigmoid"})
    parents = [-1, *(max(0, j // 2 - 1) for j in range(1, 20))]
    compare(w, w.batch("held", w.rows(1, 30, 20, parents=parents), w.rows(0, 9, 3)), s)
    assert attention_cuts.cut(23, 2, 64, 12, 2, 16, 4, plain.room_of(device)).rows == 2


def test_tiles_are_small_where_the_text_is_short():
    card = attention_cuts.Room(132, 232448, True)
    one, short, long, prompt = (
        attention_cuts.cut(rows, 1, places, 24, 4, 256, 2, card)
        for rows, places in ((1, 128), (16, 128), (16, 8192), (512, 512))
    )
    assert attention_cuts.cut(1, 1, 256, 24, 4, 256, 2, card).splits > 1
    assert (one.m, one.splits, one.warps) == (16, 1, attention_cuts.HASTY)
    assert (short.m, short.splits) == (16, 1)
    assert (long.m, prompt.m) == (128, 128)
    assert attention_cuts.cut(64, 64, 128, 24, 4, 256, 2, card).warps < attention_cuts.HASTY
    assert long.splits > 16
