"""The invariant ops: equal bits alone, beside others, in a tree, in any chunks, with any table."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from attrs import evolve
from luce_backend_triton import state
from luce_backend_triton.few_floats import Behind
from luce_backend_triton.formats import FORMATS
from luce_backend_triton.invariant import attention, delta, mixtures
from luce_backend_triton.invariant import ops as invariant
from luce_backend_triton.invariant.products import PIECE, multiply
from luce_backend_triton.matrix import pack_matrix
from luce_backend_triton.product import Rows

from luce_core.contracts import (
    Clamp,
    Commit,
    ExpertStack,
    Linear,
    Norm,
    RawLinear,
    RouteSpec,
    SeqTable,
)
from luce_core.model.batch import RowSet, make_batch
from luce_core.model.weights import ResidentExperts
from luce_core.ops import build_ops

sys.path.insert(0, str(Path(__file__).parent))
from worlds import CHANNELS, DV, VH, CodedPages, States, moved, spec

OPS = build_ops()
CUDA = torch.cuda.is_available()
TREE, PATH = [-1, 0, 0, 1, 2, 4], [0, 2, 4, 5]


def rand(device, *shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def packed(device, blocks, name, rows, cols, seed=0):
    raw = RawLinear("w", name, (rows, cols), blocks(name, rows, cols, seed), str(device))
    return pack_matrix(raw, OPS.dequantize)


# --- products


NAMES = (*FORMATS, "F16", "BF16", "F32") if CUDA else ("Q4_K", "BF16", "F32")
ROWS = PIECE + 9 if CUDA else 37


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_a_product_does_not_know_the_others(device, blocks, name):
    weight, x = packed(device, blocks, name, 40, 512), rand(device, ROWS, 512)
    norm, up = Norm(rand(device, 512, seed=1).abs(), 1e-5), rand(device, ROWS, 512, seed=2)
    behind = Behind(torch.tensor(0.5, device=device), rand(device, 40), rand(device, ROWS, 40, seed=3))

    def run(count, first=0):
        of = slice(first, first + count)
        ready = evolve(behind, residual=behind.residual[of])
        one, other = Rows(x[of], norm), Rows(x[of], None, up[of], "silu", Clamp(1.0))
        return [multiply(weight, rows, CUDA, ready) for rows in (one, other)]

    every = run(ROWS)
    for count in (1, 2, 8, 33) if CUDA else (1, 33):
        for got, want in zip(run(count), every, strict=True):
            assert torch.equal(got, want[:count]), f"{count} rows"
    for first in (3, ROWS - 1):
        for got, want in zip(run(1, first), every, strict=True):
            assert torch.equal(got, want[first : first + 1]), f"row {first}"


def test_a_row_of_a_norm_does_not_know_the_others(device):
    norm, x = Norm(rand(device, 96), 1e-6), rand(device, 9, 2, 96)
    every = invariant.PORTABLE.rms(OPS, x, norm)
    torch.testing.assert_close(every, OPS.rms(x, norm))
    assert torch.equal(invariant.PORTABLE.rms(OPS, x[7, 1], norm), every[7, 1])
    assert invariant.PORTABLE.rms(OPS, x[:0], norm).shape == (0, 2, 96)


# --- sequences


SPECS = {
    "plain": {},
    "window, sinks, softcap, gate": {
        "window": 21, "sinks": torch.tensor([0.3, -1.0, 2.0, 0.0]), "softcap": 2.0, "gate": "sigmoid",
    },
    "three to one": {"heads": 6, "kv_heads": 2},
    "codes": {"dim": 64, "value_dim": 64},
}  # fmt: skip
CODES = {"codes": ("q4_0", "tq3_0")}
"""Of keys and values, by spec."""


class Attention:
    """A world of pages in which one text is run in any cut."""

    def __init__(self, device, name, monkeypatch, dtype=torch.float16):
        monkeypatch.setattr(attention, "PART", 32)  # so that a short text has parts
        self.spec = moved(spec(**SPECS[name]), device)
        s = self.spec
        sizes = {"kv_heads": s.kv_heads, "dim": s.head_dim, "value_dim": s.value_dim}
        self.pages = CodedPages(device, *CODES.get(name, ("", "")), dtype, **sizes, blocks=80)
        widths = [s.heads * s.head_dim, *[s.kv_heads * s.head_dim] * 2, s.heads * s.value_dim]
        self.given = [rand(device, 200, width, seed=width + at) for at, width in enumerate(widths)]
        self.empty = {name: page.clone() for name, page in self.pages.region.fields.items()}

    def clear(self):
        for name, page in self.empty.items():
            self.pages.region.fields[name].copy_(page)

    def run(self, phase, *rows, texts=None, more=0):
        """rows: RowSets; texts: of every one, which rows of the inputs. more: columns added to the table."""
        b = self.pages.batch(phase, *rows)
        if more:
            table = b.table["full"]
            wide = {n: torch.nn.functional.pad(getattr(table, n), (0, more)) for n in ("block", "first")}
            b = evolve(b, table={"full": evolve(table, **wide)})
        at = torch.cat([torch.as_tensor(one) for one in texts])
        q, k, v, gate = (x[at] for x in self.given)
        given = {"gate": gate} if self.spec.gate else {}
        y = attention.attention(OPS, b, q, k, v, self.pages.region, self.spec, **given)
        starts = b.query_start.tolist()
        return [y[a:z] for a, z in pairwise(starts)]


@pytest.fixture(params=list(SPECS))
def text(request, device, monkeypatch):
    return Attention(device, request.param, monkeypatch)


def rows_of(tables, slot, length, tokens, **more):
    return RowSet(slot, length, [1] * tokens, tables, **more)


def test_attention_of_a_prompt_has_the_same_bits_in_any_chunks_and_beside_others(text):
    mine, other = text.pages.table(80), text.pages.table(150)
    (whole,) = text.run("prefill", rows_of(mine, 0, 45, 25), texts=[range(45, 70)])
    text.clear()
    parts = []
    for first, last in ((45, 53), (53, 54), (54, 70)):
        beside = rows_of(other, 1, 40, 3)
        both = text.run(
            "prefill",
            beside,
            rows_of(mine, 0, first, last - first),
            texts=[range(3), range(first, last)],
            more=3,
        )
        parts.append(both[1])
    assert torch.equal(torch.cat(parts), whole)


def test_attention_of_held_rows_has_the_bits_of_the_prompt(text):
    mine = text.pages.table(80)
    (whole,) = text.run("prefill", rows_of(mine, 0, 60, 15), texts=[range(60, 75)])
    (held,) = text.run("held", rows_of(mine, 0, 67, 8), texts=[range(67, 75)])
    assert torch.equal(held, whole[7:])
    (alone,) = text.run("held", rows_of(mine, 0, 70, 1), texts=[[70]], more=5)
    assert torch.equal(alone, whole[10:11])


@pytest.fixture
def compiled(monkeypatch):
    """Kernel -> what it was compiled for, by launch: constants and options by name."""
    found, kind = {}, type(state.kernels.fold)
    run = kind.run

    def noted(kernel, *args, **told):
        options = {n: value for n, value in told.items() if n.isupper() or n == "enable_fp_fusion"}
        found.setdefault(kernel.fn.__name__, []).append(options)
        return run(kernel, *args, **told)

    monkeypatch.setattr(kind, "run", noted)
    return found


def rounds_alike(launches):
    """Where one kernel is compiled more than once, the compiler may not choose which products it rounds: in
    a · b + c · d it may join the sum to either.
    """
    return all(one == launches[0] for one in launches) or not any(
        one.get("enable_fp_fusion", True) for one in launches
    )


def test_attention_compiled_for_prompts_rounds_as_for_held_rows(text, compiled):
    mine = text.pages.table(80)
    text.run("prefill", rows_of(mine, 0, 60, 15), texts=[range(60, 75)])
    text.run("held", rows_of(mine, 0, 67, 8), rows_of(text.pages.table(9), 1, 0, 1), texts=[range(8), [8]])
    assert {"make_rows", "attend_parts", "join_parts"} <= set(compiled)
    assert not all(one == compiled["attend_parts"][0] for one in compiled["attend_parts"])
    for name, launches in compiled.items():
        assert rounds_alike(launches), name


def test_attention_of_a_tree_has_the_bits_of_its_paths(text):
    mine, other = text.pages.table(80), text.pages.table(150)
    tree = rows_of(mine, 0, 62, 6, parents=TREE)
    beside = rows_of(other, 1, 100, 3)
    _, among = text.run("held", beside, tree, texts=[range(3), range(62, 68)])
    (path,) = text.run("held", rows_of(mine, 0, 62, 4), texts=[[62 + row for row in PATH]])
    assert torch.equal(among[PATH], path)


def test_a_window_begins_where_it_did_when_blocks_are_evicted(device, monkeypatch):
    text = Attention(device, "window, sinks, softcap, gate", monkeypatch)
    mine = text.pages.table(80)
    (want,) = text.run("held", rows_of(mine, 0, 75, 2), texts=[range(75, 77)])
    table = mine["full"]
    for gone in ((0, 1, 2), (1, 4)):
        kept = [n for n in range(10) if n not in gone]
        less = SeqTable(tuple(table.blocks[n] for n in kept), tuple(8 * n for n in kept))
        (got,) = text.run("held", rows_of({"full": less}, 0, 75, 2), texts=[range(75, 77)])
        assert torch.equal(got, want)


@pytest.fixture(params=[False, True], ids=["gated", "kda"])
def states(request, device):
    return States(device, request.param)


def run_delta(w, phase, *rows, texts):
    b = w.batch(phase, *[(*row[:3], row[3] if len(row) > 3 else {}) for row in rows])
    at = torch.cat([torch.as_tensor(one) for one in texts])
    widths = (CHANNELS, VH * DV, VH, w.spec.dt_bias.shape[0])
    given = [rand(w.device, 60, width, seed=number)[at] for number, width in enumerate(widths)]
    y = delta.delta(OPS, b, *given, w.conv, w.memory, w.spec)
    starts = b.query_start.tolist()
    return b, [y[a:z] for a, z in pairwise(starts)]


def state_of(w, slot):
    return torch.cat([w.conv.state[slot].flatten(), w.memory.state[slot].flatten()])


def test_delta_of_a_prompt_has_the_same_bits_in_any_chunks_and_beside_others(states):
    w = states
    begin = state_of(w, 1).clone(), (w.conv.state[1].clone(), w.memory.state[1].clone())
    _, (whole,) = run_delta(w, "prefill", (1, 0, 9), texts=[range(9)])
    want = state_of(w, 1).clone()
    w.conv.state[1], w.memory.state[1] = begin[1]
    parts = []
    for first, last in ((0, 2), (2, 3), (3, 9)):
        texts = [range(2), range(first, last)]
        parts.append(run_delta(w, "prefill", (2, 0, 2), (1, first, last - first), texts=texts)[1][1])
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(state_of(w, 1), want)


def test_delta_of_a_tree_has_the_bits_of_its_paths_decoded_alone(states):
    w = states
    tree = (1, 9, 6, {"parents": TREE})
    b, (_, among) = run_delta(w, "held", (2, 4, 3), tree, texts=[range(3), range(6)])
    kept = [w.copy(w.conv), w.copy(w.memory)]
    path = torch.tensor([[0] * 4, PATH], dtype=torch.int32, device=w.device)
    state.commit_slots(
        OPS, b, Commit(path, torch.tensor([0, 4], dtype=torch.int32, device=w.device)), [w.conv, w.memory]
    )
    at_once = state_of(w, 1).clone()
    w.conv.state[1], w.memory.state[1] = kept[0].state[1], kept[1].state[1]
    for place, row in enumerate(PATH):
        b, (alone,) = run_delta(w, "held", (1, 9 + place, 1), texts=[[row]])
        assert torch.equal(alone[0], among[row]), f"row {row}"
        one = Commit(
            torch.zeros(1, 1, dtype=torch.int32, device=w.device),
            torch.ones(1, dtype=torch.int32, device=w.device),
        )
        state.commit_slots(OPS, b, one, [w.conv, w.memory])
    assert torch.equal(state_of(w, 1), at_once)
    w.conv.state[1], w.memory.state[1] = kept[0].state[1], kept[1].state[1]
    _, (prompt,) = run_delta(w, "prefill", (1, 9, 4), texts=[PATH])
    assert torch.equal(prompt, among[PATH])
    assert torch.equal(state_of(w, 1), at_once)


def test_delta_is_compiled_once_for_prompts_and_held_rows(states, compiled):
    run_delta(states, "prefill", (1, 0, 9), texts=[range(9)])
    run_delta(states, "held", (2, 4, 3), (1, 9, 1), texts=[range(3), range(1)])
    assert len(compiled["in_turn"]) == 2
    for name, launches in compiled.items():
        assert rounds_alike(launches), name


# --- mixtures


def batch_of(rows, device):
    table = {"full": SeqTable(tuple(range(9)), tuple(range(0, 72, 8)))}
    return make_batch("prefill", [RowSet(0, 0, [1] * rows, table)], device=str(device))


@pytest.mark.parametrize("groups", [1, 2], ids=["kernel", "reference"])
def test_a_row_is_routed_alone(device, groups):
    x, w, norm = rand(device, 40, 48), rand(device, 8, 48, seed=1), Norm(rand(device, 48, seed=2), 1e-6)
    s = RouteSpec(2, groups=groups, top_groups=1)
    ids, weight = mixtures.route(OPS, batch_of(40, device), x, norm, w, s)
    assert torch.equal(ids, OPS.route(batch_of(40, device), x, norm, w, s)[0])
    for row in (0, 17, 39):
        one = mixtures.route(OPS, batch_of(1, device), x[row : row + 1], norm, w, s)
        assert torch.equal(one[0], ids[row : row + 1])
        assert torch.equal(one[1], weight[row : row + 1])


@pytest.mark.parametrize(("name", "wide", "rows"), [("Q4_K", 256, 150), ("F32", 64, 40)])
def test_a_row_meets_its_experts_alone(device, blocks, name, wide, rows):
    """By the kernels, and by the reference."""
    count, width, hidden = 4, wide, wide
    shapes = ((count * hidden, width), (count * hidden, width), (count * width, hidden))
    stack = [
        Linear("w", *shape, name, packed(device, blocks, name, *shape, seed))
        for seed, shape in enumerate(shapes)
    ]
    lut = torch.arange(count, dtype=torch.int32, device=device)
    bank = ResidentExperts(lut, ExpertStack(count, (stack[0], stack[1]), stack[2]))
    layer = invariant.CUDA
    ops = build_ops({
        name: getattr(layer, name) for name in ("linear", "table_rows", "norm_linear", "linear_out", "rms")
    })  # fmt: skip
    x, norm = rand(device, rows, width), Norm(rand(device, width, seed=5), 1e-6)
    ids = torch.stack([torch.arange(rows) % count, (torch.arange(rows) + 1) % count], 1).int().to(device)
    weight = rand(device, rows, 2, seed=6).abs()
    run = mixtures.CUDA.experts
    every = run(ops, x, norm, (ids, weight), bank, None, x)
    for first, n in ((0, 1), (5, 3), (rows - 1, 1)):
        of = slice(first, first + n)
        assert torch.equal(run(ops, x[of], norm, (ids[of], weight[of]), bank, None, x[of]), every[of])
