"""Op `attention` on pages of codes, beside the reference: every codec of keys, every one of values."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from attrs import evolve
from luce_backend_triton import attention as plain
from luce_backend_triton import attention_cuts, state
from luce_backend_triton.invariant import attention as invariant

from luce_core.contracts import CODECS, Commit, Norm
from luce_core.ops import build_ops

sys.path.insert(0, str(Path(__file__).parent))
from worlds import CodedPages, moved, padded, spec

TREE = [-1, 0, 0, 1, 3, -2]
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0])
TYPES = ["", *CODECS]
OPS = build_ops()
MODULE = plain


@pytest.fixture(params=[plain, invariant], ids=["plain", "invariant"], autouse=True)
def attention(request, monkeypatch):
    """The module of the op: every test runs for both."""
    monkeypatch.setitem(globals(), "MODULE", request.param)
    return request.param


def compare(world, b, s, share=False):
    """Answers are near, and pages hold the same codes but for a number between two of them."""
    s = moved(s, world.device)
    rows = b.token.shape[0]
    q, k, v, gate = world.rand(rows, s.heads * s.head_dim), None, None, None
    if s.gate:
        gate = world.rand(rows, s.heads * (1 if s.gate_per_head else s.value_dim))
    if not share:
        k, v = world.rand(rows, s.kv_heads * s.head_dim), world.rand(rows, s.kv_heads * s.value_dim)
    other = evolve(world.region, fields={name: page.clone() for name, page in world.region.fields.items()})
    want = OPS.attention(b, q, k, v, other, s, gate=gate)
    got = MODULE.attention(OPS, b, q, k, v, world.region, s, gate=gate)
    for name in other.codecs:
        assert (world.region.fields[name] != other.fields[name]).float().mean() < 1e-4
    live = b.parent != -2 if b.phase == "held" else slice(None)
    error = (got[live] - want[live]).norm() / want[live].norm()
    assert error < 2e-3  # queries and numbers out of codes are f16
    return error


def world_of(device, k_type, v_type, s, **more):
    sizes = {"kv_heads": s.kv_heads, "dim": s.head_dim, "value_dim": s.value_dim}
    return CodedPages(device, k_type, v_type, **sizes, **more)


def pairs(*apart):
    """Types of keys and values, so far apart in their list: every one of each, beside others."""
    return [(TYPES[at], TYPES[(at + by) % len(TYPES)]) for by in apart for at in range(len(TYPES))]


@pytest.mark.parametrize(("k_type", "v_type"), pairs(0, 2))
def test_keys_and_values_of_any_types(device, k_type, v_type):
    s = spec(dim=64, value_dim=64)
    w = world_of(device, k_type, v_type, s)
    compare(w, w.batch("held", w.rows(1, 19, 6, parents=TREE), w.rows(0, 0, 1), w.rows(2, 8, 3)), s)


@pytest.mark.parametrize(("k_type", "v_type"), pairs(1, 3))
def test_one_row_each_of_any_types(device, k_type, v_type):
    s = spec(dim=64, value_dim=64, gate="sigmoid")
    w = world_of(device, k_type, v_type, s)
    compare(w, w.batch("held", w.rows(1, 60, 1), w.rows(0, 0, 1), w.rows(2, 8, 1)), s)


HEADS = {
    "heads of 32": ({"dim": 32, "value_dim": 32}, ("q8_0", "q4_0")),
    "heads of 96, gate": ({"dim": 96, "value_dim": 96, "gate": "sigmoid"}, ("q4_0", "fp8")),
    "heads of 128, MQA": ({"dim": 128, "value_dim": 128, "heads": 8, "kv_heads": 1}, ("tq3_0", "tq3_0")),
    "heads of 192, values of 128": ({"dim": 192, "value_dim": 128, "rope": None}, ("tq3_0", "q8_0")),
    "heads of 256, two to one": ({"dim": 256, "value_dim": 256}, ("q8_0", "tq3_0")),
    "window, sinks, softcap": ({"dim": 64, "value_dim": 64, "window": 5, "sinks": SINKS, "softcap": 2.0},
                               ("fp8", "tq3_0")),
    "three to one, gate per head": (
        {"dim": 64, "value_dim": 128, "heads": 6, "gate": "softplus", "gate_per_head": True, "window": 9},
        ("q4_0", "q8_0"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_heads_of_all_widths(device, name):
    options, types = HEADS[name]
    s = spec(**options)
    w = world_of(device, *types, s)
    compare(w, w.batch("held", w.rows(1, 19, 6, parents=TREE), w.rows(2, 8, 3)), s)
    compare(w, w.batch("prefill", w.rows(1, 13, 9), w.rows(0, 0, 3), w.rows(2, 30, 1)), s)
    compare(w, w.batch("held", w.rows(1, 19, 1), w.rows(0, 0, 1)), s)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("window", [None, 300])
def test_one_row_of_a_long_text_is_split(device, codec, window):
    s = spec(heads=2, kv_heads=1, dim=128, value_dim=128, window=window, sinks=SINKS[:2])
    w = world_of(device, codec, codec, s, blocks=200)
    compare(w, w.batch("held", w.rows(0, 600, 1)), s)


def test_norms_gaps_and_regions_another_layer_filled(device):
    s = spec(dim=64, value_dim=64)
    w = world_of(device, "q4_0", "tq3_0", s)
    norms = [Norm(1 + 0.2 * w.rand(64), 1e-6) for _ in range(3)]
    s = evolve(s, q_norm=norms[0], k_norm=norms[1], v_norm=norms[2])
    compare(w, w.batch("held", w.rows(0, 60, 5, gone=(0, 1, 3)), w.rows(1, 41, 2, gone=(0, 4))), s)
    for rows in (3, 1):
        compare(w, w.batch("held", w.rows(0, 17, rows)), s, share=True)


def test_rows_behind_the_last_sequence_write_nothing(device):
    s = spec(dim=64, value_dim=64)
    w = world_of(device, "q8_0", "tq3_0", s)
    s = moved(s, device)
    b = w.batch("prefill", w.rows(0, 13, 9))
    other = evolve(w.region, fields={name: page.clone() for name, page in w.region.fields.items()})
    q, k, v = (w.rand(15, width) for width in (256, 128, 128))
    want = MODULE.attention(OPS, b, q[:9], k[:9], v[:9], other, s)
    got = MODULE.attention(OPS, padded(b, 6), q, k, v, w.region, s)
    torch.testing.assert_close(got[:9], want, rtol=1e-5, atol=1e-5)
    for name, page in other.fields.items():
        assert torch.equal(w.region.fields[name], page)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow|All-NaN slice) encountered:RuntimeWarning")
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-3, 50.0, float("nan"), float("inf")])
def test_codes_are_those_of_the_reference(device, codec, size):
    """Of small, large, no and broken numbers, each in one sequence."""
    s = moved(spec(dim=128, value_dim=128, rope=None), device)
    w = world_of(device, codec, codec, s)
    other = evolve(w.region, fields={name: page.clone() for name, page in w.region.fields.items()})
    b = w.batch("prefill", w.rows(0, 0, 6))
    q, k, v = (w.rand(6, width) for width in (512, 256, 256))
    k, v = (
        x * size if abs(size) < 100 else x.index_fill(1, torch.tensor([3], device=device), size)
        for x in (k, v)
    )
    OPS.attention(b, q, k, v, other, s)
    MODULE.attention(OPS, b, q, k, v, w.region, s)
    for name, how in other.codecs.items():
        end = how.codec.code_bytes(how.width)
        mine, theirs = w.region.fields[name], other.fields[name]
        if abs(size) < 100:
            assert (mine != theirs).float().mean() < 1e-4
        else:  # scales tell; which codes stand beside a NaN is nobody's business
            halves = [x[..., end:].contiguous().view(torch.float16) for x in (mine, theirs)]
            assert torch.equal(halves[0].isnan(), halves[1].isnan())
            assert codec == "fp8" or halves[0].isnan().any()


def test_accepted_rows_move_by_whole_words(device):
    """Entries of every codec and any number of heads: the kernel moves i32, and never asks the host."""
    for codec in CODECS.values():
        for width in (64, 128, 192, 256):
            assert codec.vector_bytes(width) % 4 == 0
    s = spec(dim=64, value_dim=64, heads=3, kv_heads=3)
    w = world_of(device, "tq3_0", "q8_0", s)
    b = w.batch("held", w.rows(1, 19, 6, parents=TREE))
    other = evolve(w.region, fields={name: page.clone() for name, page in w.region.fields.items()})
    commit = Commit(
        torch.tensor([[0, 1, 3]], dtype=torch.int32, device=device),
        torch.tensor([3], dtype=torch.int32, device=device),
    )
    OPS.commit_pages(b, commit, [other])
    state.commit_pages(None, b, commit, [w.region])  # without ops: the reference would need some
    for name, page in other.fields.items():
        assert torch.equal(w.region.fields[name], page)


class Counted:
    """A Triton kernel, and how often it is launched."""

    def __init__(self, kernel):
        self.kernel, self.count = kernel, 0

    def __getitem__(self, grid):
        self.count += 1
        return self.kernel[grid]


@pytest.mark.parametrize(("v_type", "launches"), [("q8_0", 1), ("tq3_0", 1), ("", 0)])
@pytest.mark.parametrize("gate", ["", "sigmoid"])
def test_sums_of_large_tiles_are_turned_back_by_a_launch_of_their_own(
    device, attention, monkeypatch, v_type, launches, gate
):
    if attention is invariant:
        pytest.skip("It always adds up parts.")
    s = spec(dim=64, value_dim=64, gate=gate, sinks=SINKS)
    w = world_of(device, "q8_0", v_type, s)
    join = Counted(plain.kernels.join)
    monkeypatch.setattr(plain.kernels, "join", join)
    b = w.batch("prefill", w.rows(1, 13, 40))
    assert plain._shape(b, 40, w.region, s, plain.EMULATED).m > attention_cuts.FEW
    assert plain._shape(b, 40, w.region, s, plain.EMULATED).splits == 1
    compare(w, b, s)
    assert join.count == launches
