"""The CUDA C++ of few rows, run thread by thread on the CPU, against float64."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F
from luce_backend_triton import (
    few_floats,
    few_rows,
    formats,
    given,
    moe,
    moe_args,
    product,
    route,
    shapes,
)  # fmt: skip
from luce_backend_triton.few_rows import Shape

from luce_core.contracts import Clamp, Norm

from . import simt

pytestmark = pytest.mark.skipif(simt.GXX is None, reason="no g++ here to compile CUDA C++ for the CPU with")


DENSE = "const u8 *weights; In in; Out out; int wide;"
DenseGiven = simt.fields(
    ("weights", ctypes.c_void_p), ("in_", given.In), ("out", few_rows._Out), ("wide", ctypes.c_int)
)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(3)


def close(y, want, bits):
    error = float((y.double() - want).norm() / want.norm())
    assert error <= bits, f"relative error {error:.1e}, allowed {bits:.1e}"


@pytest.mark.parametrize(
    ("name", "rows", "cols", "grid", "shape"),
    [
        ("Q4_K", 200, 768, 4, Shape("gemv", 1, 1, 10, 4)),  # more tiles than thread blocks
        ("Q4_K", 40, 2560, 5, Shape("gemv", 1, 1, 12, 3)),  # fewer
        ("Q4_K", 112, 2560, 5, Shape("gemv", 1, 1, 3, 3)),  # one or two for each
        ("Q4_K", 112, 768, 4, Shape("gemv", 1, 1, 12, 3)),  # no unit for some warps
        ("Q6_K", 520, 512, 2, Shape("gemv", 2, 1, 4, 2)),
        ("Q8_0", 40, 320, 3, Shape("gemv", 1, 1, 4, 2)),
        ("IQ4_XS", 40, 256, 1, Shape("gemv", 1, 1, 2, 2)),
        ("NVFP4", 40, 320, 2, Shape("gemv", 2, 1, 3, 2)),
    ],
)
def test_gemv(tmp_path, blocks, dequantized, name, rows, cols, grid, shape):
    check_gemv(tmp_path, blocks, dequantized, name, rows, cols, grid, shape, imma=False)


@pytest.mark.parametrize("x_rows", [1, 2, 3, 4])
@pytest.mark.parametrize("name", formats.FORMATS)
def test_gemv_on_tensor_cores(tmp_path, blocks, dequantized, name, x_rows):
    shape = Shape("gemv", x_rows, 1, 3, 2)
    check_gemv(tmp_path, blocks, dequantized, name, 40, 512, 2, shape, imma=True)


def check_gemv(tmp_path, blocks, dequantized, name, rows, cols, grid, shape, imma):
    data, m = blocks(name, rows, cols), shape.x_rows
    x, bias, residual = torch.randn(m, cols), torch.randn(rows), torch.randn(m, rows)
    y = simt.product(tmp_path, name, data, x, shape, grid, bias, residual, imma)
    exact = torch.from_numpy(dequantized(data, name).copy()).double()
    close(y, x.double() @ exact.T + bias.double() + residual.double(), 1e-4)


@pytest.mark.parametrize("name", formats.FORMATS)
def test_mma(tmp_path, blocks, dequantized, name):
    """Two passes, the second not full; more and fewer thread blocks than shares of rows."""
    rows, m, cols = 72, 11, 512
    data, x = blocks(name, rows, cols), torch.randn(m, cols)
    more = torch.randn(rows), torch.randn(m, rows)
    exact = torch.from_numpy(dequantized(data, name).copy()).double()
    want = x.double() @ exact.T + more[0].double() + more[1].double()
    close(simt.product(tmp_path / "wide", name, data, x, Shape("mma", 8, 2, 2, 2), 3, *more), want, 2e-3)
    close(simt.product(tmp_path / "one", name, data, x, Shape("mma", 16, 1, 1, 3), 9, *more), want, 2e-3)


@pytest.mark.parametrize(
    ("grid", "workers", "parts"),
    [
        (5, 5, 1),  # an owner for each
        (2, 2, 1),  # two or three
        (16, 15, 3),  # three for each owner
        (11, 10, 2),  # not equally
        (4, 4, 0),  # whole owners would be too uneven
        (8, 8, 0),
        (40, 20, 4),  # more than there are units
    ],
)
def test_who_has_what_of_mma(tmp_path, blocks, dequantized, grid, workers, parts):
    rows, m, cols, shape = 72, 8, 1024 if parts in (2, 4) else 768, Shape("mma", 8, 1, 1, 2)
    found, _, walk = few_rows.walk(shape, 5, cols // 256, grid)
    assert (found, walk.parts) == (workers, parts)
    data, x = blocks("Q4_K", rows, cols), torch.randn(m, cols)
    more = torch.randn(rows), torch.randn(m, rows)
    exact = torch.from_numpy(dequantized(data, "Q4_K").copy()).double()
    want = x.double() @ exact.T + more[0].double() + more[1].double()
    close(simt.product(tmp_path, "Q4_K", data, x, shape, grid, *more), want, 2e-3)


@pytest.mark.parametrize(
    ("cols", "kind"), [(1300, "norm"), (256, "norm"), (1300, "silu"), (1040, ""), (260, "gelu")]
)
def test_rows_made_ready_for_mma(tmp_path, cols, kind):
    m = 3
    x, up = torch.randn(m, 2 * cols).split(cols, 1)
    x[1] *= 1e-4
    x[2, 256:] = 0
    weight = torch.rand(cols) + 0.5
    rows, exact = given.Given(x), x
    if kind == "norm":
        rows, exact = given.Given(x, None, weight, 1e-6), F.rms_norm(x, (cols,), weight, 1e-6)
    elif kind:
        rows, exact = given.Given(x, up, act=kind), getattr(F, kind)(x) * up
    squares = torch.full((m,), torch.nan)
    out = simt.made_ready(tmp_path, rows, squares if kind == "norm" else None)
    (got, sums), (wanted, its) = simt.parts(out), simt.parts(few_rows.prepare(exact, "mma"))
    top = wanted.abs().amax(-1, keepdim=True)
    assert ((got - wanted).abs() <= 2**-10 * top).all()
    assert ((sums - its).abs() <= 2**-7 * top).all()  # of 32
    if kind == "norm":
        torch.testing.assert_close(squares, x.square().sum(1))
        lengths = simt.float_at(out, few_rows.X_LENGTH)[..., 0]
        torch.testing.assert_close(lengths, exact.square().sum(1).expand_as(lengths))


def test_a_row_has_the_same_bits_in_passes_of_any_width(tmp_path, blocks):
    """What `triton-invariant` rests on: `shapes.narrowed` leaves all but the width alone."""
    widest, rows, m = Shape("mma", 32, 2, 2, 2), 104, 33
    data, x = blocks("Q4_K", rows, 768), torch.randn(m, 768)
    more = torch.randn(rows), torch.randn(m, rows)
    every = simt.product(tmp_path / "all", "Q4_K", data, x, shapes.narrowed(widest, m), 5, *more)
    for first, count in ((0, 1), (32, 1), (3, 9), (1, 20)):
        of = slice(first, first + count)
        shape = shapes.narrowed(widest, count)
        some = simt.product(tmp_path / f"{first}", "Q4_K", data, x[of], shape, 5, more[0], more[1][of])
        assert torch.equal(some, every[of]), shape


def unready(x, up, scale, kind):
    """What a kernel makes ready, and what comes of it."""
    if kind == "norm":
        return given.Given(x, None, scale, 1e-5), F.rms_norm(x.double(), x.shape[1:], scale.double(), 1e-5)
    if not kind:
        return given.Given(x), x.double()
    approximate = {"approximate": "tanh"} if kind == "gelu_tanh" else {}
    activated = getattr(F, kind.partition("_")[0])(x.double(), **approximate)
    return given.Given(x, up, act=kind), activated * up.double()


@pytest.mark.parametrize(
    ("name", "rows", "cols", "grid", "shape", "kind"),
    [
        ("Q4_K", 200, 768, 4, Shape("gemv", 1, 1, 10, 4, makes=1), "norm"),
        ("Q6_K", 40, 2560, 5, Shape("gemv", 1, 1, 4, 3, makes=3), "norm"),
        ("Q8_0", 40, 300, 3, Shape("gemv", 1, 1, 2, 2, makes=1), ""),
        ("Q4_0", 40, 768, 2, Shape("gemv", 1, 1, 2, 2, makes=2), ""),
        ("Q5_1", 200, 260, 1, Shape("gemv", 1, 1, 3, 2, makes=1), "norm"),
    ],
)
def test_gemv_makes_x_ready(tmp_path, blocks, dequantized, name, rows, cols, grid, shape, kind):
    padded = -(-cols // 256) * 256 if name in ("Q4_K", "Q6_K") else -(-cols // 32) * 32
    data = blocks(name, rows, padded)
    exact = torch.from_numpy(dequantized(data, name).copy()).double()[:, :cols]
    x, bias, residual = torch.randn(1, cols), torch.randn(rows), torch.randn(1, rows)
    of, ready = unready(x, x, torch.rand(cols) + 0.5, kind)
    y = simt.product(tmp_path, name, data, of, shape, grid, bias, residual)
    close(y, ready @ exact.T + bias.double() + residual.double(), 1e-4)


@pytest.mark.parametrize(
    ("dtype", "rows", "cols", "m", "kind", "grid"),
    [
        (torch.bfloat16, 77, 264, 1, "norm", 2),  # a chunk that is not full
        (torch.bfloat16, 300, 1024, 2, "norm", 3),
        (torch.bfloat16, 50, 3584, 1, "silu", 2),  # eight warps share a row
        (torch.float16, 40, 520, 1, "relu", 1),
        (torch.float32, 33, 2048, 2, "", 3),
        (torch.float32, 9, 512, 1, "gelu", 4),  # thread blocks without a row
        (torch.bfloat16, 9, 512, 1, "gelu_tanh", 1),
    ],
)
def test_dense(tmp_path, dtype, rows, cols, m, kind, grid):
    weights = torch.randn(rows, cols).to(dtype)
    x, up = torch.randn(m, 2 * cols).split(cols, 1)
    scale, bias, residual = torch.rand(cols) + 0.5, torch.randn(rows), torch.randn(m, rows)
    of, ready = unready(x, up, scale, kind)
    y = torch.full((m, rows), torch.nan)
    defines = few_floats.defines_of(few_floats.KINDS[dtype], m, cols)
    library = simt.build(tmp_path, "dense", "dense_linear", defines, DENSE)
    wide = -(-cols // few_floats.CHUNK) * few_floats.CHUNK
    out = few_floats._out(y, few_floats.Behind(None, bias, residual))
    it = DenseGiven(weights.data_ptr(), given.in_of(of), out, wide)
    library.launch(ctypes.byref(it), grid, 32 * few_floats.WARPS, few_floats.shared_bytes(m, wide))
    close(y, ready @ weights.double().T + bias.double() + residual.double(), 1e-6)


MOE = "Stack stack; Cut cut;"
MoeGiven = simt.fields(("stack", moe_args.Stack), ("cut", moe_args.Cut))


@pytest.mark.parametrize(
    ("name", "per", "grid", "matrices", "act", "clamp"),
    [
        ("Q4_K", 2, 2, 2, "silu", None),
        ("Q4_K", 2, 3, 1, "silu", None),
        ("Q6_K", 1, 1, 2, "gelu", Clamp(0.5)),
        ("Q8_0", 2, 1, 2, "relu", Clamp(0.5, "after")),
    ],
)
@pytest.mark.parametrize("given", ["alone", "beside", "ready", "choosing"])
def test_experts(tmp_path, blocks, dequantized, name, per, grid, matrices, act, clamp, given):
    """beside: every third pair is one of the last expert's matrices, given by themselves. ready: likewise,
    with norm(x) as another launch has made it. choosing: likewise, by logits.
    """
    check_experts(tmp_path, blocks, dequantized, name, per, grid, matrices, act, clamp, given, 1)


@pytest.mark.parametrize("given", ["alone", "beside", "ready"])
@pytest.mark.parametrize(("name", "x_rows", "matrices"), [("Q4_K", 2, 2), ("Q6_K", 4, 2), ("Q8_0", 3, 1)])
def test_pairs_of_an_expert_together(tmp_path, blocks, dequantized, name, x_rows, matrices, given):
    """One expert has five pairs: more than go together."""
    check_experts(tmp_path, blocks, dequantized, name, 3, 2, matrices, "silu", None, given, x_rows)


def check_experts(tmp_path, blocks, dequantized, name, per, grid, matrices, act, clamp, given, x_rows):
    beside, is_ready = given != "alone", given in ("ready", "choosing")
    count, rows, cols, shape = 3, 40, 512, Shape("gemv", x_rows, 1, 4, 2)
    tall = formats.tiles_of(rows) * formats.TILE_ROWS
    data = [blocks(name, count * tall, cols, seed) for seed in range(matrices)]
    records = [formats.pack(name, torch.from_numpy(one)).contiguous() for one in data]
    ids = torch.tensor([2, 0, -1, 3, 1, 2], dtype=torch.int32)
    if x_rows > 1:
        ids = torch.tensor([2, 0, -1, 3, 2, 2, 0, 2, 1, 2, 0, 2, 2, 1, 0], dtype=torch.int32)
    lut = torch.tensor([1, 2, 0, -1], dtype=torch.int32)
    every = [torch.from_numpy(dequantized(one, name).copy()).double() for one in data]
    usual = max(float(one.norm()) for one in every) / (count * tall) ** 0.5  # products are about 1
    pairs, x = ids.numel(), torch.randn(ids.numel() // per, cols) / (1 if beside else usual)
    norm = Norm((torch.rand(cols) + 0.5) / usual, 1e-6) if beside else None
    y = torch.full((pairs, rows), torch.nan)
    defines = few_rows.defines(formats.FORMATS[name], shape) | {"IMMA": int(beside)}
    library = simt.build(tmp_path, "moe", "moe_gemv", defines, MOE, after=tuple(moe.FRONT.split()))
    tiles, across = tall // formats.TILE_ROWS, records[0].shape[1]
    told, own, used = ids, (), pairs
    if beside:
        told, used = ids.view(-1, 3)[:, :2].contiguous(), 2
        ids[2::3], lut[2] = 2, 2  # what the kernel is to do with what it was not told
        own = [one[2 * tiles :] for one in records]
    if given == "choosing":
        logits = torch.rand(2, 40)
        logits.scatter_(1, told.long(), torch.tensor([[1.5, 1.5], [3.0, 2.0]]))
        ids[0], ids[1], lut = 0, 2, torch.cat([lut, torch.full((36,), -1, dtype=torch.int32)])  # alike: by id
        told = route.Asked(logits, torch.full((2,), -1, dtype=torch.int32), 1.0, used)
    rows_of_x = product.Rows(x, norm)
    if is_ready:
        normed = F.rms_norm(x, (cols,), norm.weight, norm.eps)
        rows_of_x.room("gemv").copy_(few_rows.prepare(normed, "gemv"))
        x = x.clone()
        rows_of_x.x.fill_(torch.nan)  # is not read again
    stack = moe_args.stack_of(records, own, told, lut, rows_of_x, y, used, act, clamp)
    fmt = formats.FORMATS[name]
    each = used + beside
    it = MoeGiven(stack, moe_args.cut_of(fmt, shape, tiles, across, grid, matrices, pairs, each, per))
    shared = moe.few_bytes(fmt, shape, tiles, across, grid, matrices, lut.numel())
    library.launch_deep(ctypes.byref(it), grid, 32 * shape.warps, shared, pairs)
    ready = x.double()
    if norm is not None:
        ready = F.rms_norm(ready, (cols,), norm.weight.double(), norm.eps)
    ready = rounded(ready)
    for pair, expert in enumerate(ids.tolist()):
        place = -1 if expert < 0 else int(lut[expert])
        if place < 0:
            assert not y[pair].any()
            continue
        parts = [one.view(count, tall, cols)[place, :rows] @ ready[pair // per] for one in every]
        close(y[pair], activated(*parts, act, clamp) if matrices == 2 else parts[0], 2e-5)


@pytest.mark.parametrize("normed", [True, False])
def test_what_the_router_makes_ready_is_what_experts_make_but_for_rounding(
    tmp_path, blocks, dequantized, normed
):
    """Its squares are summed in another order, and it divides where they multiply with the inverse: some
    columns in ten thousand are the next of 65,024 integers. Both are as near to what is exact.
    """
    shape, data = Shape("gemv", 1, 1, 4, 2), blocks("Q4_K", 48, 768)
    records, x = formats.pack("Q4_K", torch.from_numpy(data)).contiguous(), torch.randn(1, 768)
    norm = Norm(torch.rand(768) + 0.5, 1e-6) if normed else None
    defines = few_rows.defines(formats.FORMATS["Q4_K"], shape) | {"IMMA": 0}
    library = simt.build(tmp_path, "moe", "moe_gemv", defines, MOE, after=tuple(moe.FRONT.split()))
    found, (ids, lut) = [], torch.zeros(2, 1, dtype=torch.int32)
    tiles, across, _ = records.shape
    for by_router in (False, True):
        rows, y = product.Rows(x, norm), torch.full((1, 48), torch.nan)
        if by_router:
            route.logits(x, norm, torch.randn(20, 768), False, rows.room("gemv"))
        stack = moe_args.stack_of([records], (), ids, lut, rows, y, 1, "silu", None)
        fmt = formats.FORMATS["Q4_K"]
        it = MoeGiven(stack, moe_args.cut_of(fmt, shape, tiles, across, 1, 1, 1, 1, 1))
        shared = moe.few_bytes(fmt, shape, tiles, across, 1, 1, 1)
        library.launch_deep(ctypes.byref(it), 1, 32 * shape.warps, shared, 1)
        found.append(y)
    ready = x.double() if norm is None else F.rms_norm(x.double(), (768,), norm.weight.double(), norm.eps)
    exact = ready @ torch.from_numpy(dequantized(data, "Q4_K").copy()).double().T
    for y in found:
        close(y, exact, 3 * rounding_of(ready))
    close(found[1], found[0].double(), rounding_of(ready))


def rounded(x):
    """As the kernel sees it: every 256 columns in 32,512ths of their largest."""
    blocks = x.unflatten(1, (-1, 256))
    steps = blocks.abs().amax(-1, keepdim=True) / 32512
    return ((blocks / steps).round() * steps).flatten(1)


def activated(gate, up, act, clamp):
    if clamp is None:
        return acts(act)(gate) * up
    before = clamp.at == "before"
    mid = acts(act)(gate.clamp(max=clamp.limit) if before else gate)
    return (mid if before else mid.clamp(max=clamp.limit)) * up.clamp(-clamp.limit, clamp.limit)


DOWN = "Down d; DownCut cut;"
DownGiven = simt.fields(("d", moe_args.Down), ("cut", moe_args.DownCut))


@pytest.mark.parametrize(
    ("name", "hidden", "grid", "warps", "stages"),
    [
        ("Q4_K", 512, 3, 4, 3),
        ("Q4_K", 512, 5, 8, 1),  # more warps than parts, when alone
        ("Q4_K", 768, 5, 2, 4),  # some warps have more than three parts, of one tile
        ("Q6_K", 256, 1, 2, 2),
        ("Q8_0", 288, 2, 5, 2),  # a block of columns that is not full
        ("MXFP4", 64, 1, 1, 2),
        ("NVFP4", 320, 2, 3, 1),
    ],
)
@pytest.mark.parametrize("choosing", [False, True], ids=["chosen", "choosing"])
@pytest.mark.parametrize("common", [False, True], ids=["alone", "beside"])
def test_all_experts_of_a_row_at_once(
    tmp_path, blocks, dequantized, name, hidden, grid, warps, stages, common, choosing
):
    """common: with a shared expert behind them, that has a gate with a norm. choosing: by logits; the second
    row is padding.
    """
    count, used, rows, width = 3, 3, 2, 80
    fmt, shape, each = formats.FORMATS[name], Shape("gemv", 1, 1, warps, stages), used + common
    wide = formats.tiles_of(width) * formats.TILE_ROWS
    data = blocks(name, (count + 1) * wide, hidden)
    records = formats.pack(name, torch.from_numpy(data)).contiguous()
    tiles, across = wide // formats.TILE_ROWS, records.shape[1]
    ids = torch.tensor([[2, 0, 3], [1, -1, 2]], dtype=torch.int32)
    lut = torch.tensor([1, 2, 0, -1], dtype=torch.int32)
    weight, x, residual = torch.rand(rows, 5)[:, :used], torch.randn(rows, width), torch.randn(rows, width)
    norm, mix = Norm(torch.rand(width) + 0.5, 1e-5), torch.randn(width)
    mid = torch.randn(rows * each, hidden)
    y = torch.full((rows, width), torch.nan)
    own, who = records[count * tiles :] if common else None, ids
    if choosing:
        experts = 41 if name == "Q6_K" else 40  # read one by one, four at a time
        logits, lut = torch.randn(rows, experts), torch.arange(experts, dtype=torch.int32) % 4 - 1
        logits[0, [3, 7, 12, 30]] = 4.0  # of one lane and of others: the last is one too many
        who = route.Asked(logits, torch.tensor([-1, -2], dtype=torch.int32), 1.5, used)
        best = logits.sort(dim=1, descending=True, stable=True)
        ids, weight = best.indices[:, :used], 1.5 * best.values[:, :used].softmax(1)
        weight[1] = 0
    down = moe_args.down_of(
        records, own, who, used, lut, product.Rows(mid), None if choosing else weight,
        mix if common else None, x, norm, residual, y,
    )  # fmt: skip
    defines = few_rows.defines(fmt, shape) | {"IMMA": int(common)}
    library = simt.build(tmp_path, "moe_down", "moe_down", defines, DOWN, after=tuple(moe.FRONT.split()))
    it = DownGiven(down, moe_args.down_cut_of(fmt, tiles, across, grid, each))
    shared = moe.down_bytes(fmt, shape, -(-tiles // grid), each)
    library.launch_deep(ctypes.byref(it), grid, 32 * warps, shared, rows)

    exact = torch.from_numpy(dequantized(data, name).copy()).double().view(count + 1, wide, hidden)[:, :width]
    mid = mid.double()
    want = residual.double()
    for row in range(rows):
        for place in range(used):
            expert = int(lut[ids[row, place]]) if ids[row, place] >= 0 else -1
            if expert >= 0:
                want[row] += weight[row, place].double() * (exact[expert] @ mid[row * each + place])
        if common:
            part = F.rms_norm(x[row].double(), (width,), norm.weight.double(), norm.eps) @ mix.double()
            want[row] += part.sigmoid() * (exact[count] @ mid[row * each + used])
    close(y, want, 3 * rounding_of(mid))


def rounding_of(mid):
    """Relative, expected: every 256 columns are rounded to 32,512ths of their largest, and products of a few
    large and many small numbers feel it most.
    """
    blocks = F.pad(mid, (0, -mid.shape[1] % 256)).unflatten(1, (-1, 256))
    steps = blocks.abs().amax(-1) / 32512
    return float((256 / 12 * steps.square().sum()).sqrt() / mid.norm())


def acts(name):
    approximate = {"approximate": "tanh"} if name == "gelu_tanh" else {}
    return lambda x: getattr(F, name.partition("_")[0])(x, **approximate)
