"""act(gate) · up made ready by the product that gives gate and up: the kernel on the CPU, its bound, and
where it is asked for.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from luce_backend_triton import few_rows, gated, given, matrix, ops
from luce_backend_triton.few_rows import Shape
from luce_backend_triton.invariant import ops as invariant
from luce_backend_triton.matrix import Matrix, Part
from luce_backend_triton.product import Rows

from luce_core.contracts import Clamp, LinearGroup, Norm

from . import simt
from .test_matrix import cols_of, linear, packed, raw_linear
from .test_simt import activated, close

compiled = pytest.mark.skipif(simt.GXX is None, reason="no g++ here to compile CUDA C++ for the CPU with")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(3)


def most_of_pairs(gate, up):
    """f64[1], by the eigenvalues of a matrix of two rows and columns."""
    pair = torch.stack((gate, up), 1)
    turned = pair @ pair.transpose(1, 2) @ torch.tensor([[0.0, 0.5], [0.5, 0.0]], dtype=torch.float64)
    return torch.linalg.eigvals(turned).real.abs().amax(1).amax(0, keepdim=True)


# --- the kernel


@compiled
@pytest.mark.parametrize(
    ("name", "act", "m", "shape", "grid"),
    [
        ("Q4_K", "silu", 11, Shape("mma", 8, 2, 2, 2, act="silu"), 33),  # two passes; two parts of an owner
        ("Q6_K", "gelu", 16, Shape("mma", 16, 2, 4, 3, act="gelu"), 3),  # whole owners, some two
        # parts of owners as they come
        ("Q8_0", "gelu_tanh", 24, Shape("mma", 24, 2, 4, 2, act="gelu_tanh"), 7),
        ("Q4_1", "relu", 20, Shape("mma", 32, 2, 2, 2, act="relu"), 17),
    ],
)
def test_gate_and_up_are_made_ready_by_their_product(
    tmp_path, blocks, dequantized, name, act, m, shape, grid
):
    """One row of x zero, one with an outlier; then down's product of what there is."""
    rows, cols = 512, 768
    data = np.concatenate([blocks(name, rows, cols), blocks(name, rows, cols)[::-1]])
    exact = torch.from_numpy(dequantized(data, name).copy()).double()
    most = most_of_pairs(*exact.view(2, rows, cols)).float()
    x, weight = torch.randn(m, cols), torch.rand(cols) + 0.5
    x[1], x[2, 5] = 0, 300
    normed = simt.made_ready(tmp_path / "ready", given.Given(x, None, weight, 1e-6))
    out = simt.gated(tmp_path / "gated", name, data, normed, most, shape, grid)
    n = F.rms_norm(x.double(), (cols,), weight.double(), 1e-6)
    want = activated(n @ exact[:rows].T, n @ exact[rows:].T, act, None)
    (got, sums), (_, its) = simt.parts(out), simt.parts(few_rows.prepare(want.float(), "mma"))
    bound = (n.square().sum(1) * most).expand(2, m)
    factor = simt.float_at(out, few_rows.X_FACTOR)[..., 0]
    live = bound > 0
    assert ((2**15 * factor >= bound * 0.999) & (2**15 * factor <= bound * 2.001))[live].all()
    halves = got.view(2, m, 8, 4, 2, 4).transpose(3, 4) * torch.tensor([1.0, 16])[:, None, None]
    close(halves.reshape(2, m, 256).transpose(0, 1).reshape(m, rows), want, 2e-3)
    assert (got[:, 1] == 0).all()
    assert ((sums - halves.flatten(3).sum(-1)).abs() <= 2**-10 * halves.flatten(3).abs().sum(-1)).all()
    close(sums.double(), its.double(), 1e-2)
    down = blocks("Q4_K", 40, rows)
    y = torch.full((m, 40), torch.nan)
    behind = Shape("mma", shape.x_rows, 2, 2, 2)
    simt.launch(tmp_path / "down", "Q4_K", simt.packed("Q4_K", down), 40, out, y, behind, 3)
    close(y, want @ torch.from_numpy(dequantized(down, "Q4_K").copy()).double().T, 2e-3)


@compiled
def test_what_is_made_of_gate_and_up_is_the_same_however_it_is_cut(tmp_path, blocks):
    """But for the order of sums: grids with whole owners each give the same bits."""
    rows, cols, m = 512, 512, 9
    data = blocks("Q4_K", 2 * rows, cols)
    most = torch.ones(1)
    normed = simt.made_ready(
        tmp_path / "ready", given.Given(torch.randn(m, cols), None, torch.ones(cols), 1e-6)
    )
    shapes_of = [Shape("mma", width, 2, warps, 2, act="silu") for width, warps in ((8, 2), (16, 4), (32, 2))]
    every = [
        simt.gated(tmp_path / f"{at}", "Q4_K", data, normed, most, shape, 2)
        for at, shape in enumerate(shapes_of)
    ]
    assert all((one[..., :528] == every[0][..., :528]).all() for one in every)
    assert all(
        (simt.float_at(one, few_rows.X_FACTOR) == simt.float_at(every[0], few_rows.X_FACTOR)).all()
        for one in every
    )


@compiled
def test_the_op_goes_by_two_products_and_one_making_ready(tmp_path, device, blocks, dequantized, monkeypatch):
    """All of it as on a card: what is launched runs on the CPU."""
    launched, m, hidden, wide = [], 11, 256, 512
    simt.emulated(monkeypatch, tmp_path, Shape("mma", 16, 2, 2, 2), launched)

    weight = partial(raw_linear, blocks, dequantized)

    (gate, g), (up, u) = (weight("Q6_K", wide, hidden, seed) for seed in (1, 2))
    down, d = weight("Q4_K", hidden, wide, 3)
    both = LinearGroup((gate, up), ops.CUDA.pack_group(None, (gate, up)))
    norm, x, residual = Norm(torch.rand(hidden) + 0.5, 1e-6), torch.randn(m, hidden), torch.randn(m, hidden)
    n = F.rms_norm(x.double(), (hidden,), norm.weight.double(), norm.eps)
    want = activated(n @ g.T, n @ u.T, "silu", None) @ d.T
    got = ops.CUDA.gated_mlp(None, x, norm, both, down, residual)
    close(got - residual, want, 2e-3)
    assert launched == ["ready norm", "Q6_K silu", "Q4_K"]
    launched.clear()
    monkeypatch.setattr(gated, "MADE", False)
    close(ops.CUDA.gated_mlp(None, x, norm, both, down, residual) - residual, want, 2e-3)
    assert launched == ["ready norm", "Q6_K", "ready silu", "Q4_K"]


# --- the bound


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "MXFP4", "Q4_1"])
def test_no_product_of_rows_of_gate_and_up_is_longer(device, blocks, dequantized, name):
    rows, cols = 512, cols_of(name)
    w, data = packed(device, blocks, name, 2 * rows, cols)
    exact = torch.from_numpy(dequantized(data, name).copy()).double()
    got = gated.most_of(w).cpu().double()
    torch.testing.assert_close(got, most_of_pairs(*exact.view(2, rows, cols)), rtol=1e-5, atol=0)


def test_bounds_are_for_gate_and_up_alone(device, blocks, monkeypatch):
    """Of any group the rule but for the device, which is made to look like a card."""
    monkeypatch.setattr(gated, "most_of", lambda one: one)
    monkeypatch.setattr(gated, "useful", lambda one: True)

    def of(*rows, bias=False, other="Q8_0"):
        kinds = ["Q8_0"] * (len(rows) - 1) + [other]
        made = [linear(device, blocks, kinds[at], count, at, bias=bias)[0] for at, count in enumerate(rows)]
        return gated.bounded(matrix.pack_members(tuple(made))).parts[0]

    part = of(256, 256)
    assert part.most is part.matrix
    for rows, more in (
        ((256, 512), {}),
        ((272, 272), {}),
        ((256,) * 3, {}),
        ((256,), {}),
        ((256, 256), {"bias": True}),
    ):
        assert of(*rows, **more).most is None
    assert of(256, 256, other="Q4_0").most is None
    monkeypatch.undo()
    if str(device) == "cpu":
        assert of(256, 256).most is None


# --- where


MMA = few_rows.Shape("mma", 16, 2, 4, 3)


@pytest.fixture
def gate_up(monkeypatch):
    """gated.made on gate and up of 256 rows each, with what it asks set otherwise; launches it makes."""
    launched = []
    monkeypatch.setattr(few_rows, "launch", lambda *args, **more: launched.append((args, more)))

    def few(rows, kind):
        rows.lengths = rows.norm is not None
        return torch.zeros(1, 9, few_rows.X_BYTES, dtype=torch.uint8)

    monkeypatch.setattr(Rows, "few", few)

    def made(shape=MMA, behind=MMA, norm=True, most=True, down=256, act="silu", name="Q4_K"):
        matrix, back = (
            Matrix(one, kind, rows, cols, torch.empty(rows // 16, cols // 256, 1))
            for one, kind, rows, cols in (("w", "Q4_K", 512, 256), ("d", name, 40, down))
        )
        monkeypatch.setattr(
            gated,
            "few_of",
            lambda one, m, cuda: {"w": shape and (shape, 7), "d": behind and (behind, 5)}[one.name],
        )
        part = Part(matrix, (), None, torch.ones(1) if most else None)
        rows = Rows(torch.zeros(9, 256), Norm(torch.ones(256), 1e-6) if norm else None)
        return gated.made(part, rows, act, back, cuda=True), launched

    return made


def test_gate_and_up_are_made_ready_where_one_warp_has_both(gate_up):
    rows, ((args, more),) = gate_up(act="gelu")
    (name, _, count, x, y, shape, grid), scale = args, more["scale"]
    assert (name, count, grid, scale.tolist()) == ("Q4_K", 256, 7, [1.0])
    assert shape == evolve(MMA, act="gelu")
    assert x.shape == (1, 9, few_rows.X_BYTES)
    assert y.shape == (9, 1, few_rows.X_BYTES)
    assert rows.x.shape == (9, 256)
    assert rows.made("mma").data_ptr() == y.data_ptr()
    assert rows.made("mma").is_contiguous()


@pytest.mark.parametrize(
    "otherwise",
    [
        {"shape": None},
        {"behind": None},
        {"shape": few_rows.Shape("gemv", 2, 1, 8, 2), "behind": few_rows.Shape("gemv", 2, 1, 8, 2)},
        {"shape": evolve(MMA, tiles=1)},
        {"shape": evolve(MMA, warps=1)},
        {"norm": False},
        {"most": False},
        {"down": 512},
        {"name": "Q4_1"},
    ],
)
def test_elsewhere_gate_and_up_come_first(gate_up, otherwise):
    assert gate_up(**otherwise) == (None, [])


def test_nobody_makes_gate_and_up_ready_when_told_not_to(gate_up, monkeypatch):
    monkeypatch.setattr(gated, "MADE", False)
    assert gate_up() == (None, [])


@pytest.mark.parametrize(
    ("layer", "clamp"),
    [(ops.CUDA, None), (ops.CUDA, Clamp(1.0)), (ops.CUDA, Clamp(1.0, "after")), (invariant.CUDA, None)],
)
def test_with_a_clamp_or_where_rows_must_not_know_others_nobody_asks(
    device, blocks, monkeypatch, layer, clamp
):
    asked = []
    monkeypatch.setattr(gated, "made", lambda *args: asked.append(args))
    gate, up, down = (linear(device, blocks, "Q8_0", 256, seed)[0] for seed in range(3))
    both = LinearGroup((gate, up), layer.pack_group(None, (gate, up)))
    x, norm = torch.ones(5, 256, device=device), Norm(torch.ones(256, device=device), 1e-6)
    layer.gated_mlp(None, x, norm, both, down, clamp=clamp)
    assert len(asked) == (layer is ops.CUDA and clamp is None)
