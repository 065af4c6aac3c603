"""Op `experts` beside the reference on the same packed weights: few rows and many, slices of the scratch."""

from __future__ import annotations

import pytest
import torch
from luce_backend_triton import moe, ops, product, route, shapes

from luce_core.contracts import Clamp, ExpertStack, Linear, LinearGroup, Norm, RawLinear, SharedExpert
from luce_core.model.weights import ResidentExperts
from luce_core.ops import build_ops

NAMES = ("pack_group", "linear", "table_rows", "norm_linear", "linear_out", "gated_mlp")
OPS = build_ops({name: getattr(ops.PORTABLE, name) for name in NAMES})
EXPERTS, WIDTH, HIDDEN, USED = 5, 96, 32, 2


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(1)


@pytest.fixture(params=[64, HIDDEN], ids=["other shape", "one more"])
def layer(device, blocks, rng, request):
    """The shared expert may have the shape of the others, and then becomes one more of them."""
    wide = request.param

    def matrix(out, width, seed):
        data = blocks("Q8_0", out, width, seed)
        packed = ops.PORTABLE.pack_linear(OPS, RawLinear("w", "Q8_0", (out, width), data, str(device)))
        return Linear("w", out, width, "Q8_0", packed)

    pair = (matrix(EXPERTS * HIDDEN, WIDTH, 1), matrix(EXPERTS * HIDDEN, WIDTH, 2))
    stack = ExpertStack(EXPERTS, pair, matrix(EXPERTS * WIDTH, HIDDEN, 3))
    lut = torch.tensor([4, 2, 0, 1, 3, -1], dtype=torch.int32, device=device)  # one expert is not there
    members = (matrix(wide, WIDTH, 4), matrix(wide, WIDTH, 5))
    group = LinearGroup(members, OPS.pack_group(members))
    gate = torch.randn(WIDTH, generator=rng).to(device)
    return ResidentExperts(lut, stack), SharedExpert(group, matrix(WIDTH, wide, 6), gate)


def inputs(device, rng, rows):
    x = torch.randn(rows, WIDTH, generator=rng).to(device)
    ids = torch.rand(rows, EXPERTS + 1, generator=rng).topk(USED).indices.int()
    ids[0] = -1
    return x, (ids.to(device), torch.rand(rows, USED, generator=rng).to(device))


def check(got, want):
    assert float((got - want).norm() / want.norm()) < 2e-3


@pytest.mark.parametrize(
    "cuda", [False, True][: 1 + torch.cuda.is_available()], ids=("Triton", "CUDA").__getitem__
)
@pytest.mark.parametrize("limit", [256, 0], ids=["packed", "dense"])
def test_like_the_reference(device, rng, layer, monkeypatch, cuda, limit):
    monkeypatch.setattr(moe, "FEW_PAIRS", limit)
    bank, shared = layer
    norm = Norm(1 + 0.1 * torch.randn(WIDTH, generator=rng).to(device), 1e-6)
    x, routed = inputs(device, rng, 7)
    given = (x, norm, routed, bank, shared, x)
    check(moe.Experts(cuda).experts(OPS, *given), OPS.experts(*given))


def test_without_norm_shared_expert_and_residual(device, rng, layer):
    x, routed = inputs(device, rng, 3)
    given = (x, None, routed, layer[0])
    check(moe.PORTABLE.experts(OPS, *given, clamp=Clamp(0.5)), OPS.experts(*given, clamp=Clamp(0.5)))
    post = Norm(torch.ones(WIDTH, device=device), 1e-6)
    check(moe.PORTABLE.experts(OPS, *given, None, x, post), OPS.experts(*given, None, x, post))


def test_experts_go_through_the_scratch_in_slices(device, rng, layer, monkeypatch):
    monkeypatch.setattr(moe, "FEW_PAIRS", 0)
    monkeypatch.setattr(moe, "SCRATCH_BYTES", 2 * 2 * 2 * HIDDEN * 256)
    x, routed = inputs(device, rng, 7)
    given = (x, None, routed, layer[0])
    check(moe.PORTABLE.experts(OPS, *given), OPS.experts(*given))


def test_without_tensor_cores_many_pairs_meet_packed_records(device, rng, layer, monkeypatch, taken_for):
    taken_for(7, 5)
    monkeypatch.setattr(moe, "FEW_PAIRS", 0)
    monkeypatch.setattr(moe.Experts, "_few", lambda *_: False)
    monkeypatch.setattr(moe.moe_kernels, "grouped_dense", None)
    x, routed = inputs(device, rng, 7)
    given = (x, None, routed, layer[0])
    check(moe.PORTABLE.experts(OPS, *given), OPS.experts(*given))


def test_a_shared_expert_of_the_same_shape_is_one_more(layer):
    bank, shared = layer
    assert moe._alike(bank, shared, None) == (shared.down.in_features == HIDDEN)
    assert not moe._alike(bank, shared, Clamp(0.5))


def test_pairs_are_sorted_by_expert(device, layer):
    ids = torch.tensor([[3, -1], [0, 5], [1, 3], [3, 0]], dtype=torch.int32, device=device)
    chosen = moe._Sorted(layer[0], ids)  # places 1 -, 4 -, 2 1, 1 4
    assert chosen.starts.tolist() == [0, 0, 3, 4, 4, 6]
    assert chosen.order[:6].tolist() == [0, 5, 6, 4, 2, 7]


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_one_row_asks_for_all_its_records_before_it_waits(name):
    """256 experts of 2048 x 512, 8 used and a shared one, on an H200."""
    room = shapes.Room(132, 227 << 10, 228 << 10)
    shape, grid = moe._shape(name, 32, 8, 9, 2, 256, 1, room)
    assert grid == 32
    assert shape.warps * shape.stages == 2 * 8
    shape, grid = moe._down_shape(name, 128, 2, 9, 1, room)
    assert grid == 128
    assert shape.warps * shape.stages == 2 * 9
    assert shape.warps <= 8  # what the registers beside three thread blocks of the first have room for


def test_shapes_fit_small_cards_and_no_thread_block_has_more_than_its_share():
    small, large = shapes.Room(20, 64 << 10, 64 << 10), shapes.Room(132, 227 << 10, 228 << 10)
    for name in ("Q8_0", "Q4_K"):
        for rows in (1, 3, 16):
            assert moe._down_shape(name, 128, 2, 9, rows, small) is not None
            for room in (small, large):
                _, grid = moe._shape(name, 32, 8, 9 * rows, 2, 256, 4, room)
                share = 32 * 9 * rows // (2 * room.multiprocessors)
                assert -(-32 // grid) <= max(1, share)
    assert moe._down_shape("Q4_K", 128, 2, 9, 1, shapes.Room(20, 3 << 10, 3 << 10)) is None


@pytest.mark.parametrize("fits", [True, False])
def test_experts_choose_where_both_launches_can(layer, rng, device, monkeypatch, fits):
    """One that cannot leaves the choice to be launched."""
    bank, shared = layer
    x, routed = inputs(device, rng, 2)
    looked = []
    asked = route.Asked(torch.zeros(2, EXPERTS), torch.zeros(2, dtype=torch.int32), 1.0, USED)
    given = route.Routed(product.Rows(x), asked, lambda: looked.append(1) or routed)
    want = OPS.experts(x, None, routed, bank, shared, x)
    monkeypatch.setattr(moe._Few, "down_fits", lambda self, width: fits)
    monkeypatch.setattr(moe._Few, "middle", lambda self, rows, *_: product.Rows(rows.x + 1))
    monkeypatch.setattr(moe._Few, "down", lambda self, rows, weight, shared, x, *_: x + rows.x)
    got = moe.Experts(cuda=True).experts(OPS, x, None, given, bank, shared, x)
    chosen = fits and shared.down.in_features == HIDDEN  # else the shared expert is none of them
    assert looked == ([] if chosen else [1])
    check(got, 2 * x + 1 if chosen else want)
    assert moe.PORTABLE._choosing(x, None, given, bank, shared, x, "silu", None) is None
