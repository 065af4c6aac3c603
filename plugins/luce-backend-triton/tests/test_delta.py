"""Op `delta` and the commits behind it, beside the reference: chunks, trees, sequences without rows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from attrs import evolve
from luce_backend_triton import delta as plain
from luce_backend_triton import state
from luce_backend_triton.attention_cuts import Room
from luce_backend_triton.capability import Ability
from luce_backend_triton.invariant import delta as invariant

from luce_core.contracts import Commit, Region, SeqTable
from luce_core.model.batch import RowSet, make_batch
from luce_core.ops import build_ops

sys.path.insert(0, str(Path(__file__).parent))
from worlds import CHANNELS, DK, DV, KH, VH, States

OPS = build_ops()
TREE = [-1, 0, 0, 1, 3, -2]
MODULE = plain.CUDA
CHUNK = plain.SMALL_CHUNK if plain.INTERPRETED else plain.CHUNK


@pytest.fixture(params=[plain.CUDA, invariant], ids=["plain", "invariant"], autouse=True)
def op(request, monkeypatch):
    """Whose method or function `delta` is: every test runs for both."""
    monkeypatch.setitem(globals(), "MODULE", request.param)
    return request.param


def compare(w, b, tolerance=2e-5):
    rows = b.token.shape[0]
    widths = (CHANNELS, VH * DV, VH, VH * DK if w.kda else VH)
    given = [w.rand(rows, width) for width in widths]
    conv, memory = w.copy(w.conv), w.copy(w.memory)
    want = OPS.delta(b, *given, conv, memory, w.spec)
    got = MODULE.delta(OPS, b, *given, w.conv, w.memory, w.spec)
    close(got, want, tolerance)
    for mine, theirs in ((w.conv, conv), (w.memory, memory)):
        close(mine.state, theirs.state, tolerance)
        for name, log in theirs.log.items():
            close(mine.log[name], log, tolerance)


def close(got, want, tolerance=1e-5):
    """On a device, chunks multiply halves."""
    if want.device.type != "cpu":
        tolerance = max(tolerance, 4e-3)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("counts", [(5,), (40,), (3, 18)])
def test_rows_behind_the_last_sequence_change_nothing(device, counts):
    w, more = States(device), 21
    b = w.batch("prefill", *[(slot, 9, count, {}) for slot, count in enumerate(counts)])
    real = b.token.shape[0]
    given = [w.rand(real + more, width) for width in (CHANNELS, VH * DV, VH, VH)]
    rows = {name: torch.nn.functional.pad(getattr(b, name), (0, more)) for name in ("token", "index", "seq")}
    conv, memory = w.copy(w.conv), w.copy(w.memory)
    want = MODULE.delta(OPS, b, *[one[:real] for one in given], conv, memory, w.spec)
    got = MODULE.delta(OPS, evolve(b, **rows, padded=True), *given, w.conv, w.memory, w.spec)
    torch.testing.assert_close(got[:real], want, rtol=1e-5, atol=1e-5)
    assert got.isfinite().all()
    assert torch.equal(w.conv.state, conv.state)
    torch.testing.assert_close(w.memory.state, memory.state, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kda", [False, True], ids=["gated", "kda"])
def test_trees_and_chains(device, kda):
    w = States(device, kda)
    compare(w, w.batch("held", (1, 19, 6, {"parents": TREE}), (0, 0, 1, {}), (2, 8, 3, {})))


WIDE = [-1, *(n // 2 if n % 3 else n for n in range(34))]
"""A tree of 35 rows: some paths short, some long."""


@pytest.mark.parametrize(
    ("op", "rows"),
    [(plain.CUDA, 8), (plain.CUDA, 17), (plain.CUDA, 32), (invariant, 17)],
    indirect=["op"],
    ids=["plain-8", "plain-17", "plain-32", "invariant-17"],
)
def test_a_tree_of_many_rows(device, rows):
    """The plain one compiles a kernel of 16, 32 or 64 rows for it."""
    w = States(device, held=40)
    compare(w, w.batch("held", (1, 19, rows, {"parents": WIDE[:rows]})))


def test_trees_of_every_size_in_one_batch(device):
    w = States(device, held=40)
    rows = [(slot, 9, count, {"parents": WIDE[:count]}) for slot, count in enumerate((6, 35, 1, 20))]
    compare(w, w.batch("held", *rows))


def test_without_tensor_cores_wide_trees_go_row_after_row(device, taken_for, monkeypatch):
    taken_for(7, 5)
    monkeypatch.setattr(plain, "SMALL_HELD", 4)
    monkeypatch.setattr(plain, "_held_trees", None)
    w = States(device)
    compare(w, w.batch("held", (1, 19, 6, {"parents": TREE}), (0, 0, 1, {}), (2, 8, 3, {})))
    compare(w, w.batch("held", (1, 19, 6, {"parents": TREE})))


@pytest.mark.parametrize(
    ("number", "kib", "taken"),
    [((9, 0), 227, True), ((7, 5), 64, True), ((7, 0), 96, True), ((6, 1), 48, False)],
)
def test_prompts_go_to_the_reference_where_they_find_no_room(device, monkeypatch, number, kib, taken):
    w = States(device)
    spec = evolve(w.spec, key_dim=128, value_dim=128)
    room = Room(20, kib << 10, Ability(number).matrix)
    monkeypatch.setattr(plain, "INTERPRETED", False)
    monkeypatch.setattr(plain, "room_of", lambda device: room)
    assert plain._takes(None, w.conv, w.memory, spec) is taken
    assert plain.chunk_rows(device) == (64 if room.matrix else 16)


def test_one_row(device):
    w = States(device)
    compare(w, w.batch("held", (3, 19, 1, {})))


def test_prompts_of_several_chunks(device):
    w = States(device)
    compare(w, w.batch("prefill", (1, 13, 2 * CHUNK + 1, {}), (0, 0, 3, {}), (2, 30, CHUNK, {})))


def test_one_prompt(device):
    w = States(device)
    compare(w, w.batch("prefill", (1, 13, CHUNK - 1, {})))


def test_equal_keys_and_steps_of_one_are_solved(device):
    """The worst a triangular system can be: every row takes out what the row before put in."""
    w = States(device)
    b = w.batch("prefill", (1, 0, CHUNK + 5, {}))
    rows = b.token.shape[0]
    spec = evolve(w.spec, a=torch.zeros(VH, device=device), conv=w.spec.conv.abs())
    qkv = w.rand(1, CHANNELS).abs().expand(rows, -1).contiguous()
    qkv[:, 2 * KH * DK :] = w.rand(rows, VH * DV)
    beta = torch.full((rows, VH), 30.0, device=device)
    z, decay = w.rand(rows, VH * DV), w.rand(rows, VH)
    conv, memory = w.copy(w.conv), w.copy(w.memory)
    want = OPS.delta(b, qkv, z, beta, decay, conv, memory, spec)
    got = MODULE.delta(OPS, b, qkv, z, beta, decay, w.conv, w.memory, spec)
    close(got, want, 1e-4)
    close(w.memory.state, memory.state, 1e-4)


@pytest.mark.parametrize("phase", ["held", "prefill"])
def test_a_sequence_without_rows(device, phase):
    w = States(device)
    b = w.batch(phase, (1, 19, 2, {}), (0, 11, 1, {}), (2, 9, 2, {}))
    keep = torch.tensor([0, 1, 3, 4], device=device)
    b = evolve(
        b, token=b.token[keep], index=b.index[keep], seq=b.seq[keep], parent=b.parent[keep],
        sees=b.sees[keep],
        query_start=torch.tensor([0, 2, 2, 4], dtype=torch.int32, device=device),
    )  # fmt: skip
    compare(w, b)


@pytest.mark.parametrize("kda", [False, True], ids=["gated", "kda"])
def test_commits_of_all_layers_at_once(device, kda):
    one, other = States(device, kda), States(device, kda)
    b = one.batch("held", (1, 19, 6, {"parents": TREE}), (0, 0, 1, {}), (2, 8, 3, {}))
    path = torch.tensor([[0, 1, 3, 4], [0, 7, 7, 7], [7, 7, 7, 7]], dtype=torch.int32, device=device)
    commit = Commit(path, torch.tensor([4, 1, 0], dtype=torch.int32, device=device))
    slots = [one.conv, one.memory, other.conv, other.memory]
    copies = [one.copy(slot) for slot in slots]
    state.commit_slots(OPS, b, commit, slots)
    for slot, copy in zip(slots, copies, strict=True):
        OPS.commit_slot(b, commit, copy)
        close(slot.state, copy.state)


def test_entries_of_accepted_rows_move(device):
    rng = torch.Generator().manual_seed(2)
    regions = []
    for dtype, width in ((torch.float16, 6), (torch.float32, 3), (torch.float16, 5)):
        fields = {name: torch.randn(20, 4, 1, width, generator=rng).to(device, dtype) for name in ("k", "v")}
        regions.append(Region("r", "full", fields, 4))
    table = {"full": SeqTable((3, 7, 1, 12), (0, 4, 12, 16))}, {"full": SeqTable((9, 0), (0, 4))}
    rows = RowSet(0, 12, [1] * 6, table[0], parents=[-1, 0, 0, 2, 3, 4]), RowSet(1, 2, [1, 1], table[1])
    b = make_batch("held", list(rows), device=str(device))
    path = torch.tensor([[0, 2, 3, 4, 5], [0, 1, 0, 0, 0]], dtype=torch.int32, device=device)
    commit = Commit(path, torch.tensor([5, 2], dtype=torch.int32, device=device))
    copies = [evolve(r, fields={name: t.clone() for name, t in r.fields.items()}) for r in regions]
    state.commit_pages(OPS, b, commit, regions)
    OPS.commit_pages(b, commit, copies)
    for mine, theirs in zip(regions, copies, strict=True):
        for name, page in theirs.fields.items():
            assert torch.equal(mine.fields[name], page)
