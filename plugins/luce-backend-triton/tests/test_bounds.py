"""Rows that are left ready for the product behind: by which bound, for whom, and how long."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from luce_backend_triton import (
    attention,
    attention_cuts,
    bounds,
    delta,
    delta_trees,
    few_rows,
    gated,
    matrix,
    ops,
    product,
)
from luce_backend_triton.few_rows import Shape
from luce_backend_triton.invariant import ops as invariant
from luce_backend_triton.product import Rows

from luce_core.contracts import Linear, LinearGroup, Norm
from luce_core.ops import build_ops

sys.path.insert(0, str(Path(__file__).parent))
import worlds

from . import simt
from .test_matrix import cols_of, linear, packed, raw_linear
from .test_simt import close

compiled = pytest.mark.skipif(simt.GXX is None, reason="no g++ here to compile CUDA C++ for the CPU with")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(3)


@pytest.fixture
def useful(monkeypatch):
    """What asks for a card gets one."""
    monkeypatch.setattr(gated, "useful", lambda one: True)


# --- the bound


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "MXFP4", "Q4_1"])
def test_the_longest_row_of_every_member(device, blocks, dequantized, name):
    cols = cols_of(name)
    w, data = packed(device, blocks, name, 96 + 40, cols)
    exact = torch.from_numpy(dequantized(data, name).copy()).double()
    members = tuple(Linear("w", rows, cols, name, None) for rows in (96, 40))
    want = torch.stack([part.norm(dim=1).amax() for part in exact.split((96, 40))])
    got = bounds.longest_of(w, members)
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=0)


def test_no_row_gives_more_than_the_bound():
    """Not even x for which |n| and the product are largest, which reaches it but for a power of two."""
    k, weight, head = 96, torch.rand(96) + 0.1, torch.rand(128) + 0.1
    w = torch.randn(40, k)
    one = bounds.Bounds(torch.tensor([0.1, w.norm(dim=1).amax()]))
    norm = Norm(torch.full((k,), 0.7), 1e-6)
    x = torch.cat([torch.randn(20, k) ** 5, w[w.norm(dim=1).argmax()][None] * 1e3])
    n = F.rms_norm(x, (k,), norm.weight, norm.eps)
    most = (n @ w.T).abs().amax()
    factor, inverse = one.factors(1, norm, None).tolist()
    assert factor * inverse == 1
    assert most <= 32768 * factor <= 2 * most * 1.001
    o = torch.cat([torch.randn(5, 128), torch.eye(128)])
    behind = F.rms_norm(o, (128,), head, 1e-6).abs().amax() * most
    factor = float(one.factors(1, norm, head)[0])
    assert behind <= 32768 * factor <= 2 * behind * 1.001
    ragged = float(one.factors(1, Norm(weight, 1e-6), None)[0])
    assert 32768 * ragged >= (F.rms_norm(x, (k,), weight, 1e-6) @ w.T).abs().amax()


def test_a_bound_is_made_once(monkeypatch):
    one, norm = bounds.Bounds(torch.ones(2)), Norm(torch.ones(8), 1e-6)
    first = one.factors(0, norm, None)
    assert one.factors(0, Norm(norm.weight, 1e-6), None) is first
    assert one.factors(1, norm, None) is not first


def test_nobody_makes_one_while_a_graph_is_captured(monkeypatch):
    norm, longest = Norm(torch.ones(8), 1e-6), SimpleNamespace(is_cuda=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    one = bounds.Bounds(longest)
    assert one.factors(0, norm, None) is None
    one.longest = torch.ones(2)  # as if it had run plainly before
    first = one.factors(0, norm, None)
    one.longest = longest
    assert one.factors(0, norm, None) is first


def test_zeros_have_a_factor():
    factor, inverse = bounds.Bounds(torch.zeros(1)).factors(0, Norm(torch.ones(8), 1e-6), None)
    assert factor > 0
    assert inverse < torch.inf


# --- of which products it is known


def normed(device, blocks, layer, rows, monkeypatch, bias=False, norm=True):
    """What `norm_linear` gives of two members."""
    parts = [linear(device, blocks, "Q8_0", out, seed, bias=bias)[0] for seed, out in enumerate((48, 32))]
    group = LinearGroup(tuple(parts), layer.pack_group(None, tuple(parts)))
    cols = parts[0].in_features
    weight = Norm(torch.rand(cols, device=device) + 0.5, 1e-6) if norm else None
    x = torch.randn(rows, cols, device=device)
    return layer.norm_linear(build_ops(), x, weight, group), group, weight


@pytest.mark.usefixtures("useful")
def test_members_of_a_normed_group_are_known(device, blocks, monkeypatch):
    (q, k), group, norm = normed(device, blocks, ops.CUDA, 5, monkeypatch)
    first, second = bounds.known(q), bounds.known(k)
    assert (first.place, second.place) == (0, 1)
    assert first.norm is second.norm is norm
    assert first.bounds is group.packed.parts[0].bounds
    assert q.abs().amax() <= 32768 * first.factors()[0]
    assert bounds.known(q.clone()) is None
    k.mul_(2)
    assert bounds.known(k) is None


@pytest.mark.usefixtures("useful")
@pytest.mark.parametrize(
    ("layer", "rows", "more"),
    [
        (ops.CUDA, 2, {}),
        (ops.CUDA, 33, {}),
        (ops.CUDA, 5, {"bias": True}),
        (ops.CUDA, 5, {"norm": False}),
        (ops.PORTABLE, 5, {}),
        (invariant.CUDA, 5, {}),
    ],
)
def test_others_are_not(device, blocks, monkeypatch, layer, rows, more):
    outputs, *_ = normed(device, blocks, layer, rows, monkeypatch, **more)
    assert all(bounds.known(y) is None for y in outputs)


def test_without_a_card_nothing_is(device, blocks, monkeypatch):
    if str(device) == "cpu":
        outputs, *_ = normed(device, blocks, ops.CUDA, 5, monkeypatch)
        assert all(bounds.known(y) is None for y in outputs)


# --- how long rows are ready


def left(m=5, k=256):
    y = torch.randn(m, k)
    room = bounds.room(m, k, lambda: torch.tensor([0.5, 2.0]))
    return room.leave(y), room


def test_rows_are_ready_as_long_as_they_are_the_same():
    y, room = left()
    q4 = matrix.Matrix("w", "Q4_K", 16, 256, torch.empty(1, 1, 1))
    assert bounds.ready_for(y, q4) is room
    assert bounds.ready_for(y.clone(), q4) is None
    assert bounds.ready_for(y[:], q4) is None
    assert bounds.ready_for(y, matrix.Dense(torch.empty(16, 256))) is None
    pair = matrix.Matrix("w", "Q4_1", 16, 256, torch.empty(1, 1, 1))
    assert bounds.ready_for(y, pair) is None
    y += 1
    assert bounds.ready_for(y, q4) is None


def test_what_is_ready_goes_with_its_rows():
    y, room = left()
    gone = weakref.ref(room.ready)
    del room
    gc.collect()
    assert gone() is not None
    del y
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("m", "k", "made"), [(3, 512, 1), (32, 256, 1), (2, 512, 0), (33, 512, 0), (9, 384, 0)]
)
def test_rooms_are_for_few_rows_of_whole_blocks(monkeypatch, m, k, made):
    asked = []
    bounds.room(m, k, lambda: asked.append(1))
    assert len(asked) == made
    monkeypatch.setattr(bounds, "MADE", False)
    bounds.room(m, k, lambda: asked.append(1))
    assert len(asked) == made


@pytest.mark.parametrize("layer", [ops.CUDA, ops.PORTABLE, invariant.CUDA])
def test_products_take_what_is_ready(device, blocks, monkeypatch, layer):
    given = []

    def one(self, ops, rows, *more):
        given.append(rows.made("mma"))
        return rows.x

    monkeypatch.setattr(ops.Layer, "_one", one)
    w, _ = linear(device, blocks, "Q8_0", 48, 0)
    y, room = left(5, w.in_features)
    layer.linear_out(build_ops(), y, w)
    assert given == [room.ready if layer is ops.CUDA else None]


# --- DeltaNet


def trees(built):
    """delta_trees where its kernels run on the CPU."""

    class Kernel:
        def __init__(self, rows):
            self.rows = rows

        def launch(self, grid, threads, shared_bytes, stream, args):
            built(self.rows).launch_deep(ctypes.byref(args[0]), grid[0], threads, shared_bytes, grid[2])

    return lambda device, rows, key_heads: Kernel(rows)


@compiled
@pytest.mark.usefixtures("wide_heads", "useful")
@pytest.mark.parametrize("rows", [3, 11])
def test_a_layer_of_delta_has_one_making_ready(tmp_path, device, blocks, dequantized, monkeypatch, rows):
    """All of it as on a card, by what is launched: z, and the product behind."""
    if str(device) != "cpu":
        pytest.skip("the kernels run on the CPU here")
    launched, folders = [], map(str, range(9))

    def launch(name, *args, **more):
        launched.append(name)
        simt.launch(tmp_path / next(folders), name, *args, **more)

    def few(self, kind):
        if self.made(kind) is None:
            launched.append("ready")
            self._few[kind] = few_rows.prepare(
                F.rms_norm(self.x, self.x.shape[1:], self.norm.weight, 1e-6) if self.norm else self.x, kind
            )
        return self.made(kind)

    def built(size):
        defines = delta_trees.defines_of(size, worlds.KH)
        folder = tmp_path / f"tree{size}"
        folder.mkdir(exist_ok=True)
        return simt.build(folder, "delta_tree", "delta_tree", defines, "Held held;", (delta_trees.FRONT,))

    monkeypatch.setattr(few_rows, "launch", launch)
    monkeypatch.setattr(Rows, "few", few)
    monkeypatch.setattr(product, "few_of", lambda one, m, cuda: (Shape("mma", 16, 2, 2, 2), 3))
    monkeypatch.setattr(delta_trees, "sizes", lambda device: delta_trees.SIZES)
    monkeypatch.setattr(delta_trees, "_loaded", trees(built))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    w = worlds.States(device, held=40)
    w.spec.conv.mul_(0.5)
    width = worlds.VH * worlds.DV
    b = w.batch("held", (1, 19, rows, {}))
    raw = partial(raw_linear, blocks, dequantized)
    (member, gates), (output, behind) = raw("Q4_K", width, 256, 1), raw("Q6_K", 40, width, 2)
    group = LinearGroup((member,), ops.CUDA.pack_group(None, (member,)))
    norm, x = Norm(torch.rand(256) + 0.5, 1e-6), torch.randn(rows, 256)
    x[1] = gates[gates.norm(dim=1).argmax()] / norm.weight
    (z,) = ops.CUDA.norm_linear(OPS, x, norm, group)
    others = [w.rand(rows, one) for one in (worlds.CHANNELS, worlds.VH, worlds.VH)]
    given = others[0], z, *others[1:]
    want = OPS.delta(b, *given, w.copy(w.conv), w.copy(w.memory), w.spec).double() @ behind.T

    def run(layer=ops.CUDA):
        y = delta.CUDA.delta(OPS, b, *given, w.copy(w.conv), w.copy(w.memory), w.spec)
        launched.clear()
        close(layer.linear_out(OPS, y, output), want, 3e-3)
        return list(launched)

    assert z.abs().amax() > 1
    assert run() == ["Q6_K"]
    assert run(ops.PORTABLE) == ["ready", "Q6_K"]
    monkeypatch.setattr(bounds, "MADE", False)
    assert run() == ["ready", "Q6_K"]


# --- attention


def attend(device, monkeypatch, rows=((1, 600, 5),), v_kind="", norm=1.0, dim=64, **more):
    """(what is ready, the output, its factor or None) of attention over long texts, whose v is known."""
    made = worlds.CodedPages if v_kind else worlds.Pages
    kinds = ("", v_kind) if v_kind else ()
    w = made(device, *kinds, dim=dim, value_dim=dim, kv_heads=1, blocks=400)
    s = worlds.moved(worlds.spec(512 // dim, 1, dim, dim, **more), device)
    b = w.batch("held", *(w.rows(*row) for row in rows))
    count = b.token.shape[0]
    q, gate = w.rand(count, 512), w.rand(count, 512)
    gate = gate if s.gate else None
    k, v = (w.rand(count, dim) for _ in range(2))
    one = bounds.Bounds(torch.tensor([0.0, 5.0], device=device))
    weight = Norm(torch.full((16,), norm, device=device), 1e-6)
    bounds.note((k, v), SimpleNamespace(bounds=one), weight)
    other = evolve(w.region, fields={name: page.clone() for name, page in w.region.fields.items()})
    want = OPS.attention(b, q, k, v, other, s, gate=gate)
    got = attention.attention(OPS, b, q, k, v, w.region, s, gate=gate)
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    ready = bounds.ready_for(got, matrix.Matrix("w", "Q4_K", 16, 512, torch.empty(1, 1, 1)))
    return ready and ready.ready, got, float(bounds.known(v).factors()[0])


@pytest.mark.parametrize(
    ("rows", "more"),
    [
        (((1, 600, 5),), {"gate": "sigmoid"}),
        (((1, 600, 3),), {"dim": 32}),
        (((1, 600, 3),), {"dim": 128, "gate": "sigmoid", "gate_per_head": False}),
        (((0, 20, 1), (1, 600, 4)), {}),
        (((0, 600, 1), (1, 500, 1), (2, 400, 1)), {"gate": "sigmoid"}),  # one launch before the sums
    ],
)
def test_sums_of_splits_are_left_ready(device, monkeypatch, rows, more):
    monkeypatch.setattr(attention, "room_of", lambda _: attention_cuts.Room(132, 232448, True))
    ready, got, factor = attend(device, monkeypatch, rows, **more)
    assert 16**0.5 * 5 <= 32768 * factor <= 2 * 16**0.5 * 5
    simt.same_as_ready(ready.cpu(), got.cpu(), factor)
    assert got.abs().amax() < 32768 * factor


@pytest.mark.parametrize(
    ("rows", "more"),
    [
        (((1, 600, 2),), {}),
        (((1, 600, 33),), {}),
        (((1, 60, 5),), {}),  # not split
        (((1, 600, 5),), {"gate": "softplus"}),
        (((1, 600, 5),), {"v_norm": True}),
        (((1, 600, 5),), {"v_kind": "q8_0"}),
        (((1, 600, 5),), {"v_kind": "tq3_0"}),
    ],
)
def test_other_sums_are_not(device, monkeypatch, rows, more):
    if more.pop("v_norm", False):
        more["v_norm"] = Norm(torch.ones(64, device=device), 1e-6)
    monkeypatch.setattr(attention, "room_of", lambda _: attention_cuts.Room(132, 232448, True))
    assert attend(device, monkeypatch, rows, **more)[0] is None


def test_a_region_another_layer_filled_bounds_nothing(device):
    w = worlds.Pages(device)
    b = w.batch("held", w.rows(0, 17, 3))
    assert attention.bound_of(b, None, w.region, worlds.spec()) is None


@pytest.mark.usefixtures("wide_heads")
def test_trees_beside_others_are_not_made_ready():
    """Nor where rows stand for nothing."""
    w = worlds.States(torch.device("cpu"), held=40)
    asked = []
    known = SimpleNamespace(factors=lambda *given: asked.append(given))
    width = worlds.VH * worlds.DV
    for rows in ((1, 19, 9, {}),), ((0, 9, 4, {}), (1, 19, 5, {})):
        b = w.batch("held", *rows)
        assert delta_trees.room_of_out(b, torch.empty(9, width), w.spec, known) is None
        assert len(asked) == 1
    assert asked[0][0] is w.spec.norm.weight
    b = worlds.padded(w.batch("held", (1, 19, 7, {})), 2)
    assert delta_trees.room_of_out(b, torch.empty(9, width), w.spec, known) is None
    assert delta_trees.room_of_out(b, torch.empty(9, width), w.spec, None) is None
    assert len(asked) == 1


OPS = build_ops()
