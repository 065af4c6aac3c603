"""csrc/delta_tree.cu, run thread by thread on the CPU, beside the reference; which trees go there."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attrs import evolve
from luce_backend_triton import bounds, delta, delta_trees, few_rows
from luce_backend_triton.attention_cuts import Room

from luce_core.contracts import Norm
from luce_core.ops import build_ops

sys.path.insert(0, str(Path(__file__).parent))
import worlds

from . import simt

OPS = build_ops()
pytestmark = pytest.mark.usefixtures("wide_heads")
WIDE = [-1, *(n // 2 if n % 3 else n for n in range(34))]
"""A tree of 35 rows: some paths short, some long, some from the committed text on."""
CHAIN = list(range(-1, 31))
FOREST = [-1, 0, -2, -1, 2, 4, 3, 6, 5, 5, 8, -1, 11, 12, 13, 14, 0, 16]
"""Several paths begin at the committed text."""
ROUNDED = 1e-3


def build(folder, rows):
    """The kernel of this size."""
    defines = delta_trees.defines_of(rows, worlds.KH)
    return simt.build(folder, "delta_tree", "delta_tree", defines, "Held held;", (delta_trees.FRONT,))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return cache(lambda rows: build(tmp_path_factory.mktemp("tree"), rows))


def run(built, size, *rows):
    """(the worst relative error, what of outputs and logs was left alone)."""
    w = worlds.States(torch.device("cpu"), held=40)
    w.spec.conv.mul_(0.5)
    b = w.batch("held", *rows)
    count = b.token.shape[0]
    given = [w.rand(count, width) for width in (worlds.CHANNELS, worlds.VH * worlds.DV, worlds.VH, worlds.VH)]
    conv, memory = w.copy(w.conv), w.copy(w.memory)
    out = torch.full((count, worlds.VH * worlds.DV), torch.nan)
    want = OPS.delta(b, *given, conv, memory, w.spec)
    before = w.copy(w.conv), w.copy(w.memory)
    tree = delta_trees.arguments(b, given, out, w.conv, w.memory, w.spec, 1)
    shared = delta_trees.shared_bytes(size)
    built(size).launch_deep(ctypes.byref(tree), worlds.VH, 32 * delta_trees.WARPS, shared, b.slot.shape[0])
    for n, (_, _, number, _) in enumerate(rows):
        mine = slice(int(b.query_start[n]), int(b.query_start[n + 1]))
        taken = 1 < number <= size
        if taken:
            close(out[mine], want[mine])
        else:
            assert out[mine].isnan().all()
        slot = int(b.slot[n])
        for got, theirs, old in ((w.conv, conv, before[0]), (w.memory, memory, before[1])):
            assert torch.equal(got.state, old.state)
            for name, log in got.log.items():
                close(log[slot, :number], (theirs if taken else old).log[name][slot, :number])
                assert torch.equal(log[slot, number:], old.log[name][slot, number:])


def close(got, want):
    assert ((got - want).norm(dim=-1) <= ROUNDED * want.norm(dim=-1)).all()


@pytest.mark.skipif(simt.GXX is None, reason="no g++ here to compile CUDA C++ for the CPU with")
@pytest.mark.parametrize(
    ("size", "rows", "parents"),
    [
        (16, 16, CHAIN),
        (16, 9, WIDE),
        (24, 24, WIDE),
        (16, 13, FOREST),
        (24, 18, FOREST),
        (24, 23, CHAIN),
        (32, 32, WIDE),
        (32, 2, CHAIN),
    ],
)
def test_a_tree(built, size, rows, parents):
    run(built, size, (1, 19, rows, {"parents": parents[:rows]}))


@pytest.mark.skipif(simt.GXX is None, reason="no g++ here to compile CUDA C++ for the CPU with")
def test_sequences_of_other_sizes_are_left_alone(built):
    rows = [(slot, 9, count, {"parents": WIDE[:count]}) for slot, count in enumerate((6, 35, 1, 20))]
    run(built, 24, *rows)


@pytest.mark.skipif(simt.GXX is None, reason="no g++ here to compile CUDA C++ for the CPU with")
@pytest.mark.parametrize(("size", "rows", "z"), [(16, 16, 0), (24, 19, 0), (32, 3, 0), (16, 9, 3e4)])
def test_a_tree_leaves_its_rows_ready(built, size, rows, z):
    """What lies there is what the op gives, to the last bit, and nothing else was written. z: all of it, as
    large as it may be.
    """
    w = worlds.States(torch.device("cpu"), held=40)
    w.spec.conv.mul_(0.5)
    b = w.batch("held", (1, 19, rows, {"parents": WIDE[:rows]}))
    width = worlds.VH * worlds.DV
    given = [w.rand(rows, one) for one in (worlds.CHANNELS, width, worlds.VH, worlds.VH)]
    factors = torch.tensor([2.0**-9, 2.0**9])
    if z:
        given[1] = torch.full_like(given[1], z)
        one = bounds.Bounds(torch.tensor([z / 8]))
        factors = one.factors(0, Norm(torch.ones(64), 1e-6), w.spec.norm.weight)
        w.spec.norm.weight[1:] *= 0.01  # most of a norm in one column
    ready = torch.full((width // 256, rows, few_rows.X_BYTES), 0xAB, dtype=torch.uint8)
    room = bounds.Room(ready, factors)
    outs = []
    for left in (room, None):
        outs.append(torch.full((rows, width), torch.nan))
        tree = delta_trees.arguments(b, given, outs[-1], w.conv, w.memory, w.spec, 1, left)
        shared = delta_trees.shared_bytes(size)
        built(size).launch_deep(ctypes.byref(tree), worlds.VH, 32 * delta_trees.WARPS, shared, 1)
    assert torch.equal(*outs)
    factor = float(factors[0])
    simt.same_as_ready(room.ready, outs[0], factor)
    assert outs[0].abs().amax() <= 32768 * factor
    assert not z or outs[0].abs().amax() > z
    assert (room.ready[..., few_rows.X_FACTOR + 4 :] == 0xAB).all()


H200 = Room(132, 227 << 10, matrix=True)


def asked(count=16):
    """What `launch` is given, for one sequence."""
    w = worlds.States(torch.device("cpu"), held=40)
    b = w.batch("held", (1, 19, count, {}))
    widths = (worlds.CHANNELS, worlds.VH * worlds.DV, worlds.VH, worlds.VH)
    return b, [w.rand(count, width) for width in widths], w.conv, w.memory, w.spec


def test_what_the_kernel_reads(monkeypatch):
    _, given, conv, memory, spec = asked()
    assert delta_trees.readable(given, conv, memory, spec)
    wide = torch.zeros(16, worlds.CHANNELS + 2)
    for wrong in (wide[:, : worlds.CHANNELS], wide[:, 2:], given[0].half()):
        assert not delta_trees.readable([wrong, *given[1:]], conv, memory, spec)
    assert not delta_trees.readable(given, conv, memory, evolve(spec, key_dim=64))
    assert not delta_trees.readable(given, conv, memory, evolve(spec, conv=spec.conv[:, :3]))


@pytest.mark.parametrize(
    ("room", "sizes"),
    [(H200, (16, 24, 32)), (Room(20, 99 << 10, matrix=True), (16, 24, 32)), (evolve(H200, matrix=False), ())],
)
def test_sizes_are_those_that_find_room(monkeypatch, room, sizes):
    monkeypatch.setattr(delta_trees, "room_of", lambda device: room)
    assert delta_trees.sizes(torch.device("cuda")) == sizes
    assert delta_trees.sizes(torch.device("cpu")) == ()


@pytest.mark.parametrize(
    ("counts", "size", "done"),
    [((9,), 16, 16), ((17,), 24, 24), ((32,), 32, 32), ((33,), None, 1), ((2, 36), 32, 32), ((3, 4), 16, 16)],
)
def test_one_launch_for_all_sequences_it_takes(monkeypatch, counts, size, done):
    launched = []

    class Kernel:
        def __init__(self, rows):
            self.rows = rows

        def launch(self, grid, threads, shared_bytes, stream, args):
            launched.append((self.rows, grid))

    monkeypatch.setattr(delta_trees, "sizes", lambda device: delta_trees.SIZES)
    monkeypatch.setattr(delta_trees, "_loaded", lambda device, rows, key_heads: Kernel(rows))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    _, given, conv, memory, spec = asked(sum(counts))
    w = worlds.States(torch.device("cpu"), held=40)
    b = w.batch("held", *[(slot, 9, count, {}) for slot, count in enumerate(counts)])
    out = torch.empty(sum(counts), worlds.VH * worlds.DV)
    rows = min(sum(counts), 40)
    assert delta_trees.launch(b, given, out, conv, memory, spec, 1, rows) == done
    assert launched == ([] if size is None else [(size, (worlds.VH, 1, len(counts)))])


@pytest.mark.parametrize("layer", [delta.CUDA, delta.PORTABLE])
def test_the_portable_layer_has_no_cuda(monkeypatch, layer):
    """Trees the kernel took go nowhere else; larger ones do."""
    asked_for, others = [], []

    def launch(b, given, out, conv, state, spec, above, rows, known):
        asked_for.append(rows)
        return 32

    monkeypatch.setattr(delta_trees, "launch", launch)
    monkeypatch.setattr(delta, "_held_trees", lambda *given: others.append(given[-1]))
    for count in (16, 36):
        b, given, *rest = asked(count)
        layer.delta(OPS, b, *given, *rest)
    assert (asked_for, others) == (([16, 36], [32]) if layer.cuda else ([], [1, 1]))
