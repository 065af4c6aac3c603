"""csrc/delta_one.cu, run thread by thread on the CPU, beside the reference; which rows go there."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attrs import evolve
from luce_backend_triton import delta, delta_kernels, delta_one, delta_trees

from luce_core.ops import build_ops

sys.path.insert(0, str(Path(__file__).parent))
import worlds

from . import simt

OPS = build_ops()
pytestmark = pytest.mark.usefixtures("wide_heads")
ROUNDED = 2e-5


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return simt.build(folder, "delta_one", "delta_one", delta_one.defines_of(2), "Held held;", ("delta.cuh",))


def asked(*rows):
    """A batch, and what the op is given with it: rows lie behind each other with room between them."""
    w = worlds.States(torch.device("cpu"), held=6)
    b = w.batch("held", *rows)
    widths = (worlds.CHANNELS, worlds.VH * worlds.DV, worlds.VH, worlds.VH)
    return w, b, [w.rand(b.token.shape[0], width + 8)[:, :width] for width in widths]


def run(library, w, b, given):
    out = torch.full((b.token.shape[0], worlds.VH * worlds.DV), torch.nan)
    held = delta_trees.arguments(b, given, out, w.conv, w.memory, w.spec, 0)
    threads = 32 * delta_one.WARPS
    library.launch_deep(ctypes.byref(held), worlds.VH, threads, delta_one.shared_bytes(), b.slot.shape[0])
    return out


def close(got, want):
    assert ((got - want).norm(dim=-1) <= ROUNDED * want.norm(dim=-1)).all()


@pytest.mark.skipif(simt.GXX is None, reason="no g++ here to compile CUDA C++ for the CPU with")
@pytest.mark.parametrize("counts", [(1,), (1, 1, 1), (3, 1, 2, 1)])
def test_single_rows_and_no_others(built, counts):
    w, b, given = asked(*[((slot + 2) % 4, 9, count, {}) for slot, count in enumerate(counts)])
    before, theirs = (w.copy(w.conv), w.copy(w.memory)), (w.copy(w.conv), w.copy(w.memory))
    want = OPS.delta(b, *given, *theirs, w.spec)
    out = run(built, w, b, given)
    for n, count in enumerate(counts):
        first, slot = int(b.query_start[n]), int(b.slot[n])
        if count == 1:
            close(out[first], want[first])
        else:
            assert out[first : first + count].isnan().all()
        for got, other, old in zip((w.conv, w.memory), theirs, before, strict=True):
            assert torch.equal(got.state, old.state)
            for name, log in got.log.items():
                close(log[slot, :1], (other if count == 1 else old).log[name][slot, :1])
                assert torch.equal(log[slot, 1:], old.log[name][slot, 1:])


@pytest.mark.skipif(simt.GXX is None, reason="no g++ here to compile CUDA C++ for the CPU with")
@pytest.mark.parametrize("large", [-90.0, 90.0])
def test_steps_and_decays_at_their_ends(built, large):
    w, b, given = asked((1, 9, 1, {}))
    given = [*given[:2], torch.full_like(given[2], large), torch.full_like(given[3], -large)]
    given[1][0, :64] = large
    theirs = w.copy(w.conv), w.copy(w.memory)
    want = OPS.delta(b, *given, *theirs, w.spec)
    torch.testing.assert_close(run(built, w, b, given), want, rtol=1e-4, atol=1e-5)
    for got, other in zip((w.conv, w.memory), theirs, strict=True):
        for name, log in got.log.items():
            torch.testing.assert_close(log, other.log[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "wide", "places", "kinds"),
    [
        (delta.CUDA, 128, None, ["CUDA C++"]),
        (delta.CUDA, 64, None, ["Triton"]),
        (delta.CUDA, 128, 4 * 4 * 128 * 128, ["Triton"]),
        (delta.PORTABLE, 128, None, ["Triton"]),
    ],
)
def test_what_takes_a_row(monkeypatch, layer, wide, places, kinds):
    """places: as many as a state has, so one more than can be counted."""
    launched, grids = [], []

    class Kernel:
        def launch(self, grid, threads, shared_bytes, stream, args):
            launched.append("CUDA C++")
            grids.append(grid)

    def on_a_card(b, given, out, *rest):
        card = SimpleNamespace(device=torch.device("cuda", 0), data_ptr=out.data_ptr)
        return plain(b, given, card, *rest)

    class Triton:
        def __getitem__(self, grid):
            grids.append((grid[0], 1, grid[1]))
            return lambda *given, **more: launched.append("Triton")

    plain = delta_one.launch
    if places:
        monkeypatch.setattr(delta_one, "PLACES", places)
    monkeypatch.setattr(delta_one, "launch", on_a_card)
    monkeypatch.setattr(delta_one, "_loaded", lambda device, key_heads: Kernel())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(delta_kernels, "held_one", Triton())
    monkeypatch.setattr(delta_kernels, "held_in_turn", {(worlds.VH, 2): lambda *given, **more: None})
    w, b, given = asked((1, 9, 1, {}), (0, 9, 1, {}))
    layer.delta(OPS, b, *given, w.conv, w.memory, evolve(w.spec, value_dim=wide))
    assert (launched, grids) == (kinds, [(worlds.VH, 1, 2)])


def test_a_cpu_has_none():
    w, b, given = asked((1, 9, 1, {}))
    assert not delta_one.launch(b, given, torch.empty(1, worlds.VH * worlds.DV), w.conv, w.memory, w.spec)
