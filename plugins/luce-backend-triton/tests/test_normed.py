"""norm(y) made ready by the product that gives y: the kernel on the CPU, its bound, and where it is asked
for.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from luce_backend_triton import bounds, few_rows, normed, ops
from luce_backend_triton.few_rows import Divide, Shape, Then
from luce_backend_triton.matrix import Dense, Matrix
from luce_backend_triton.product import SQUARES, Rows

from luce_core.contracts import Linear, LinearGroup, Norm
from luce_core.ops import Recorder, replay, rewrite

from . import simt
from .test_followed import layer_without
from .test_matrix import raw_linear
from .test_simt import activated, close

compiled = pytest.mark.skipif(simt.GXX is None, reason="no g++ here to compile CUDA C++ for the CPU with")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(3)


@compiled
@pytest.mark.parametrize(
    ("name", "m", "shape", "grid"),
    [
        ("Q4_K", 7, Shape("mma", 8, 2, 4, 2, even=True, then=True), 9),  # owners in parts
        ("Q6_K", 16, Shape("mma", 16, 2, 4, 3, even=True, then=True), 2),  # whole owners
        ("Q8_0", 21, Shape("mma", 24, 2, 4, 2, even=True, then=True), 7),  # parts as they come
        ("Q5_K", 32, Shape("mma", 32, 2, 4, 2, even=True, then=True), 3),
    ],
)
def test_a_product_leaves_its_normed_sum_ready(tmp_path, blocks, dequantized, name, m, shape, grid):
    """And the next product divides. A row of the residual long, another zero as x is."""
    rows, cols, eps = 512, 512, 1e-6
    data = blocks(name, rows, cols)
    exact = torch.from_numpy(dequantized(data, name).copy()).double()
    x, residual, weight = torch.randn(m, cols), torch.randn(m, rows), torch.rand(rows) + 0.5
    residual[1] *= 1000
    x[2], residual[2] = 0, 0
    ready = few_rows.prepare(x, "mma", even=True).contiguous()
    before = residual.square().sum(1)
    bound = torch.stack((weight.amax(), weight.amax() * exact.abs().sum(1).amax() * 512)).float()
    left = torch.full((rows // 256, m, few_rows.X_BYTES), 0xFF, dtype=torch.uint8)
    y, then = torch.full((m, rows), torch.nan), Then(weight, bound, before, left)
    simt.launch(tmp_path / "first", name, simt.packed(name, data), rows, ready, y, shape, grid,
                residual=residual, then=then)  # fmt: skip
    want = x.double() @ exact.T + residual
    close(y - residual, x.double() @ exact.T, 2e-3)
    for kind, numbers in enumerate((y, y * weight)):
        places = [few_rows.X_SQUARES + 8 * half + 4 * kind for half in (0, 1)]
        squares = torch.stack([simt.float_at(left, place)[..., 0] for place in places], 2)
        of_halves = numbers.square().view(m, rows // 256, 2, 128).sum(3).transpose(0, 1)
        torch.testing.assert_close(squares, of_halves, rtol=1e-5, atol=0)
    factor = simt.float_at(left, few_rows.X_FACTOR)[..., 0]
    top = 2**15 * factor
    largest = bound[0] * before.sqrt() + bound[1] * simt.float_at(ready, few_rows.X_FACTOR)[0, :, 0]
    assert ((top >= largest * 0.999) & (top <= largest * 2.001)).all()
    assert (top[0] >= (y * weight).abs().amax(1)).all()
    for row in range(m):
        simt.same_as_ready(left[:, row : row + 1], (y * weight)[row : row + 1], float(factor[0, row]))
    behind = Shape("mma", shape.x_rows, 2, 2, 2, even=True)  # one owner, in two parts
    next_data = blocks("Q4_K", 48, rows)
    got = torch.full((m, 48), torch.nan)
    divide = Divide(torch.full((m,), torch.nan), rows, eps)
    simt.launch(tmp_path / "next", "Q4_K", simt.packed("Q4_K", next_data), 48, left, got, behind, 2,
                divide=divide)  # fmt: skip
    n = F.rms_norm(want, (rows,), weight.double(), eps)
    torch.testing.assert_close(divide.squares, y.square().sum(1), rtol=1e-5, atol=0)
    close(got, n @ torch.from_numpy(dequantized(next_data, "Q4_K").copy()).double().T, 2e-3)


@compiled
@pytest.mark.parametrize("grid", [6, 7])
def test_owners_come_to_the_same_length_of_a_row(tmp_path, blocks, dequantized, grid):
    """Whose sums are cut elsewhere: here a length lies just above a power of two, by what is lost where small
    squares are added to large ones one after the other. A factor of its own for some columns would be wrong.
    """
    rows, cols, m = 512, 1024, 8
    data = np.concatenate([blocks("Q4_K", rows, cols), blocks("Q4_K", rows, cols)[::-1]])
    exact = torch.from_numpy(dequantized(data, "Q4_K").copy()).double()
    x = torch.randn(m, cols)
    ready = few_rows.prepare(x, "mma", even=True).contiguous()
    squares = torch.full((4, m, 4), 2.0**-25)
    squares[0, :, 1] = squares[0, :, 0] = 1
    ready[..., few_rows.X_SQUARES : few_rows.X_SQUARES + 16] = squares.view(torch.uint8).view(4, m, 16)
    out = torch.full((2, m, few_rows.X_BYTES), 0xFF, dtype=torch.uint8)
    shape = Shape("mma", 8, 2, 4, 2, act="relu", even=True)
    most = torch.tensor([2.0**20])
    divide = Divide(torch.full((m,), torch.nan), cols, 1 - 1 / cols)  # a root of nearly 1
    simt.launch(tmp_path, "Q4_K", simt.packed("Q4_K", data), rows, ready, out.transpose(0, 1), shape, grid,
                scale=most, divide=divide)  # fmt: skip
    want = activated(x.double() @ exact[:rows].T, x.double() @ exact[rows:].T, "relu", None)
    factor = simt.float_at(out, few_rows.X_FACTOR)
    assert (factor == factor[0, 0]).all()
    got = simt.parts(out)[0].view(2, m, 8, 4, 2, 4).transpose(3, 4) * torch.tensor([1.0, 16])[:, None, None]
    close(got.reshape(2, m, 256).transpose(0, 1).reshape(m, rows), want, 2e-3)


@compiled
def test_layers_go_on_without_making_ready(tmp_path, device, blocks, dequantized, monkeypatch):
    """Two gated MLPs, one behind the other, and a group behind them, as a rewritten program: but the first
    norm, all is left ready.
    """
    if str(device) != "cpu":
        pytest.skip("the kernels run on the CPU here")
    launched, m, hidden, wide = [], 11, 256, 512
    simt.emulated(monkeypatch, tmp_path, Shape("mma", 16, 2, 4, 2), launched)

    weight = partial(raw_linear, blocks, dequantized)

    def group(*members):
        return LinearGroup(members, ops.CUDA.pack_group(None, members))

    def mlp(seed):
        (gate, g), (up, u) = (weight("Q4_K", wide, hidden, seed + one) for one in (1, 2))
        down, d = weight("Q6_K", hidden, wide, seed + 3)
        norm = Norm(torch.rand(hidden) + 0.5, 1e-6)

        def exact(h):
            n = F.rms_norm(h, (hidden,), norm.weight.double(), norm.eps)
            return h + activated(n @ g.T, n @ u.T, "silu", None) @ d.T

        return norm, group(gate, up), down, exact

    first, second = mlp(0), mlp(10)
    (last, w), norm = weight("Q8_0", 48, hidden, 20), Norm(torch.rand(hidden) + 0.5, 1e-6)
    x = torch.randn(m, hidden)
    want = F.rms_norm(second[3](first[3](x.double())), (hidden,), norm.weight.double(), norm.eps) @ w.T

    def trunk(x):
        for own, gate_up, down, _ in (first, second):
            x = recorder.gated_mlp(x, own, gate_up, down, residual=x)
        return recorder.norm_linear(x, norm, group(last))

    namespace, layer = layer_without()
    recorder = Recorder(namespace)
    program = rewrite(recorder.record(trunk, ("x",)), (layer["*"],), namespace)

    def run():
        launched.clear()
        close(replay(program, namespace, {"x": x})[0], want, 4e-3)
        return list(launched)

    assert run() == ["ready norm", "Q4_K silu", "Q6_K then", "Q4_K silu", "Q6_K then", "Q8_0"]
    monkeypatch.setattr(normed, "MADE", False)
    assert run() == ["ready norm", "Q4_K silu", "Q6_K"] * 2 + ["ready norm", "Q8_0"]


@compiled
@pytest.mark.parametrize("largest", [1.5, 30.0, 100.0])
def test_norms_with_a_large_weight_keep_the_precision_of_halves(
    tmp_path, device, blocks, dequantized, monkeypatch, largest
):
    """One weight of 512 in both norms."""
    if str(device) != "cpu":
        pytest.skip("the kernels run on the CPU here")
    launched, m, hidden, wide = [], 11, 512, 512
    simt.emulated(monkeypatch, tmp_path, Shape("mma", 16, 2, 4, 2), launched)

    weight = partial(raw_linear, blocks, dequantized)

    def norm(at):
        one = Norm(torch.rand(hidden) + 0.5, 1e-6)
        one.weight[at] = largest
        assert normed.even(one.weight, one.weight, normed.UNEVEN)
        return one

    (gate, g), (up, u), (down, d) = (
        weight(name, rows, cols, seed)
        for seed, (name, rows, cols) in enumerate((("Q4_K", wide, hidden),) * 2 + (("Q6_K", hidden, wide),))
    )
    last, w = weight("Q8_0", 48, hidden, 20)
    pair, group = (LinearGroup(of, ops.CUDA.pack_group(None, of)) for of in ((gate, up), (last,)))
    first, second = norm(7), norm(9)
    x = 30 * torch.randn(m, hidden)
    n = F.rms_norm(x.double(), (hidden,), first.weight.double(), 1e-6)
    y = x + activated(n @ g.T, n @ u.T, "silu", None) @ d.T
    want = F.rms_norm(y, (hidden,), second.weight.double(), 1e-6) @ w.T
    told = normed._next(down, second)
    got = ops.CUDA.gated_mlp(None, x, first, pair, down, x, following=told)
    (got,) = ops.CUDA.norm_linear(None, got, second, group)
    close(got, want, 2e-3)


# --- where it is asked for

MMA = Shape("mma", 16, 2, 4, 3)


@pytest.fixture
def behind(monkeypatch):
    """normed.made as on a card, with what it asks set otherwise -> (y, the norm behind it, launches)."""

    def made(
        m=5, rows=512, shape=MMA, residual=True, squares=True, even=True, packed=None, norm=None, **more
    ):
        launched = []
        monkeypatch.setattr(few_rows, "launch", lambda *args, **named: launched.append((args, named)))
        monkeypatch.setattr(normed, "few_of", lambda one, m, cuda: shape and (shape, 7))
        w = packed or Matrix("w", "Q4_K", rows, 256, torch.empty(rows // 16, 1, 1))
        x = torch.zeros(m, rows)
        if squares:
            SQUARES.put(x, torch.full((m,), 4.0))
        ready = torch.zeros(1, m, few_rows.X_BYTES, dtype=torch.uint8)
        given = Rows(torch.zeros(m, 256), even=even, few={"mma": ready})
        norm = norm or Norm(torch.rand(rows) + 0.5, 1e-5)
        following = normed.Next(norm, torch.tensor([3.0, 5.0]))
        w = Linear("w", rows, 256, "Q4_K", w, **more)
        return normed.made(given, w, x if residual else None, following), norm, launched

    return made


def test_what_a_product_is_told_of_the_norm_behind(behind):
    y, norm, ((args, more),) = behind()
    (_, _, rows, x, given_y, shape, grid), then = args, more["then"]
    assert (rows, grid, given_y is y, shape) == (512, 7, True, evolve(MMA, even=True, then=True))
    assert x.shape == (1, 5, few_rows.X_BYTES)
    assert then.bound.tolist() == [3, 5]
    assert then.weight is norm.weight
    assert then.squares.tolist() == [4.0] * 5
    assert then.ready.shape == (2, 5, few_rows.X_BYTES)
    assert more["residual"].shape == y.shape == (5, 512)


def test_whoever_reads_it_divides_and_knows_the_squares(behind):
    y, norm, ((_, more),) = behind()
    assert SQUARES.get(y) is None, "nobody has added them up"
    rows = normed.rows_of(y, norm, [q4()])
    assert (rows.divide.k, rows.divide.eps) == (512, 1e-5)
    assert rows.x is y
    assert rows.few("mma") is more["then"].ready
    assert SQUARES.get(y) is None
    rows.read()
    assert SQUARES.get(y) is rows.divide.squares


def q4(name="Q4_K"):
    return Matrix("w", name, 16, 512, torch.empty(1, 2, 1))


@pytest.mark.parametrize(
    "otherwise",
    [
        {"m": 1},
        {"m": 2},
        {"m": 33},
        {"residual": False},
        {"squares": False},
        {"even": False},
        {"bias": torch.ones(512)},
        {"scale": torch.ones(())},
        {"rows": 384},
        {"rows": 48},
        {"packed": Dense(torch.empty(512, 256))},
        {"shape": None},
        {"shape": Shape("gemv", 4, 2, 4, 2)},
        {"shape": evolve(MMA, tiles=1)},
        {"shape": evolve(MMA, warps=2)},
    ],
)
def test_elsewhere_it_is_left_to_whoever_reads_y(behind, otherwise):
    y, _, launched = behind(**otherwise)
    assert (y, launched) == (None, [])


@pytest.mark.parametrize("module", [normed, bounds])
def test_nobody_leaves_it_when_told_not_to(behind, monkeypatch, module):
    monkeypatch.setattr(module, "MADE", False)
    assert behind()[0] is None


@pytest.mark.parametrize(
    ("formats", "left"),
    [
        (["Q4_K"], True),
        (["Q4_K", "Q6_K"], True),
        (["Q4_K", "F32"], True),
        (["Q4_1"], False),
        (["Q4_K", "Q4_1"], False),  # for one of two it would have to be made again
    ],
)
def test_which_products_read_it(behind, formats, left):
    y, norm, _ = behind()
    packed = [Dense(torch.empty(16, 512)) if name == "F32" else q4(name) for name in formats]
    rows = normed.rows_of(y, norm, packed)
    assert rows.norm is norm
    assert (rows.divide is not None, rows.made("mma") is not None) == (left, left)


def test_of_another_norm_or_another_y_nothing_is_left(behind):
    y, norm, _ = behind()
    for x, one in ((y, Norm(norm.weight, norm.eps)), (y, None), (y.clone(), norm), (y[:], norm)):
        rows = normed.rows_of(x, one, [q4()])
        assert (rows.divide, rows.made("mma"), rows.norm) == (None, None, one)
    assert normed.rows_of(y, norm, [q4()]).divide is not None
    y += 1
    assert normed.rows_of(y, norm, [q4()]).divide is None


def test_products_of_many_rows_make_it_themselves(behind):
    """What is left is for csrc/mma.cu alone: as dense rows norm(y) is divided already."""
    y, norm, _ = behind()
    y.copy_(torch.randn_like(y))
    fresh, left = Rows(y, norm), normed.rows_of(y, norm, [q4()])
    assert torch.equal(fresh.dense()[0], left.dense()[0])


def test_numbers_that_f16_has_no_room_for_beside_others():
    """One that is far larger than all others, of so many that it does not make their mean."""
    weight = torch.ones(8192)
    assert normed.even(weight, weight, 64)
    weight[7] = 60
    assert normed.even(weight, weight, 64)
    weight[7] = -300
    assert not normed.even(weight, weight, 64)
    assert normed.even(weight, weight, 90)
    assert not normed.even(torch.full((64,), torch.nan), torch.ones(64), 64)
