"""Ops against float64 on what `gguf` dequantizes, by the kernels this machine can run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from luce_backend_triton import few_rows, ops, product
from luce_backend_triton.formats import FORMATS
from luce_backend_triton.matrix import Dense, Matrix
from luce_backend_triton.product import Rows

from luce_core.contracts import Clamp, Linear, LinearGroup, Norm, RawLinear
from luce_core.ops import build_ops
from luce_core.ops.reference import REFERENCE

BITS = 2**-9
"""x and W as halves through two products and a norm, sums in f32."""


def names(layer):
    bound = {
        op: getattr(layer, op) for op in ("pack_linear", "linear", "table_rows", "norm_linear", "linear_out")
    }
    return build_ops({**bound, "gated_mlp": layer.gated_mlp, "head": layer.head})


LAYERS = {"triton-portable": ops.PORTABLE}
if torch.cuda.is_available():  # without a GPU both are the same code
    LAYERS["triton"] = ops.CUDA


@pytest.fixture(params=list(LAYERS))
def layer(request):
    return LAYERS[request.param]


def pair(device, layer, blocks, dequantized, name, rows, cols, seed=0, *, bias=False, scale=None):
    """(packed by the layer, as f32 for the reference)."""
    data = blocks(name, rows, cols, seed)
    packed = layer.pack_linear(names(layer), RawLinear("w", name, (rows, cols), data, str(device)))
    b = torch.linspace(-1, 1, rows, device=device) if bias else None
    s = None if scale is None else torch.tensor(scale, device=device)
    floats = torch.from_numpy(dequantized(data, name).copy()).to(device)
    return tuple(Linear("w", rows, cols, name, one, b, s) for one in (packed, floats))


def rand(device, *shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).to(device)


def close(got, want, bits=BITS):
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error <= bits, f"relative error {error:.2e}, allowed {bits:.2e}"


@pytest.mark.parametrize("name", [*FORMATS, "F16", "BF16", "F32"])
def test_linear(device, layer, blocks, dequantized, name):
    mine, theirs = pair(device, layer, blocks, dequantized, name, 40, 512, bias=True, scale=0.5)
    x = rand(device, 2, 3, 512)
    got = layer.linear(names(layer), x, mine)
    assert got.shape == (2, 3, 40)
    close(got, REFERENCE["linear"](None, x, theirs), 2**-7 if name == "BF16" else BITS)


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 16, 24, 40, 70, 300])
def test_any_number_of_rows(device, layer, blocks, dequantized, rows):
    mine, theirs = pair(device, layer, blocks, dequantized, "Q4_K", 50, 256)
    x = rand(device, rows, 256)
    residual = rand(device, rows, 50, seed=1)
    got = layer.linear_out(names(layer), x, mine, residual)
    close(got - residual, x.double() @ theirs.packed.double().T)


def test_without_tensor_cores_tiles_of_the_triton_product_are_small(
    device, blocks, dequantized, taken_for, monkeypatch
):
    taken_for(7, 5)
    mine, theirs = pair(device, ops.PORTABLE, blocks, dequantized, "Q4_K", 50, 256)
    seen, real = [], product.kernels.linear

    class Watched:
        def __getitem__(self, grid):
            def launch(*args, **more):
                seen.append((grid, more["M"]))
                real[grid](*args, **more)

            return launch

    monkeypatch.setattr(product.kernels, "linear", Watched())
    x = rand(device, 40, 256)
    close(ops.PORTABLE.linear(names(ops.PORTABLE), x, mine), x.double() @ theirs.packed.double().T)
    assert [(grid[1], m) for grid, m in seen] == [(3, 16)]


WIDTHS = (256, 1536, 3584) if torch.cuda.is_available() else (384,)


@pytest.mark.parametrize("cols", WIDTHS)
@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "BF16", "F16", "F32"])
@pytest.mark.parametrize("rows", [1, 2])
def test_one_and_two_rows_of_any_width(device, layer, blocks, dequantized, name, rows, cols):
    """Where there is CUDA C++, x is made ready in the launch of the product."""
    if name == "Q4_K" and cols % 256:
        cols = 512
    pairs = [pair(device, layer, blocks, dequantized, name, out, cols, out, bias=True) for out in (528, 40)]
    members = tuple(one for one, _ in pairs)
    mine = LinearGroup(members, layer.pack_group(None, members))
    theirs = LinearGroup(tuple(other for _, other in pairs))
    norm, x = Norm(rand(device, cols, seed=1).abs(), 1e-5), 3 * rand(device, rows, cols)
    bits = 2**-7 if name == "BF16" and layer is not ops.CUDA else BITS  # torch rounds x to bf16 too
    want = REFERENCE["norm_linear"](build_ops(), x, norm, theirs)
    for got, wanted in zip(layer.norm_linear(names(layer), x, norm, mine), want, strict=True):
        close(got, wanted, bits)
    residual = rand(device, rows, 528, seed=2)
    got = layer.linear_out(names(layer), x, members[0], residual)
    close(got - residual, REFERENCE["linear"](None, x, theirs.members[0]), bits)
    both = rand(device, rows, 2 * cols, seed=3)
    gate, up = both.split(cols, 1)
    for act in ("silu", "gelu_tanh"):
        got = layer._out(names(layer), Rows(gate, None, up, act), members[1], None, None, 1.0)
        ready = REFERENCE["act_mul"](build_ops(), gate, up, act)
        close(got, REFERENCE["linear"](None, ready, theirs.members[1]), bits)


def test_rows_of_very_different_size_keep_their_precision(device, layer, blocks, dequantized):
    mine, theirs = pair(device, layer, blocks, dequantized, "Q8_0", 32, 320)
    x = rand(device, 6, 320) * torch.tensor([1e-6, 1e6, 1.0, 1e4, 0.0, 1e-3], device=device)[:, None]
    x[2, 7] = 3e4
    got = layer.linear(names(layer), x, mine)
    want = x.double() @ theirs.packed.double().T
    for row in (0, 1, 2, 3, 5):
        close(got[row], want[row])
    assert not got[4].any()


@pytest.mark.parametrize("rows", [1, 7, 80])
def test_group_with_norm(device, layer, blocks, dequantized, rows):
    pairs = [
        pair(device, layer, blocks, dequantized, name, out, 256, out, bias=bias)
        for name, out, bias in (("Q4_K", 32, True), ("Q4_K", 24, False), ("Q6_K", 16, True))
    ]
    members = tuple(one for one, _ in pairs)
    group = LinearGroup(members, layer.pack_group(None, members))
    assert group.packed is not None
    norm = Norm(rand(device, 256, seed=1).abs(), 1e-5)
    x = 3 * rand(device, rows, 256)
    want = REFERENCE["norm_linear"](build_ops(), x, norm, LinearGroup(tuple(other for _, other in pairs)))
    for got, wanted in zip(layer.norm_linear(names(layer), x, norm, group), want, strict=True):
        close(got, wanted)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "relu", "sigmoid"])
@pytest.mark.parametrize("clamp", [None, Clamp(1.5, "before"), Clamp(0.75, "after")])
def test_gated_mlp(device, layer, blocks, dequantized, act, clamp):
    gates = [pair(device, layer, blocks, dequantized, "Q8_0", 64, 64, seed) for seed in (0, 1)]
    down = pair(device, layer, blocks, dequantized, "Q5_0", 64, 64, 2)
    norm = Norm(rand(device, 64, seed=4), 1e-5)
    more = {
        "residual": rand(device, 5, 64, seed=5),
        "post": Norm(rand(device, 64, seed=6), 1e-5),
        "act": act,
        "clamp": clamp,
        "scale": 2.0,
    }
    x = rand(device, 5, 64)
    members = tuple(one for one, _ in gates)
    mine = LinearGroup(members, layer.pack_group(None, members))
    got = layer.gated_mlp(names(layer), x, norm, mine, down[0], **more)
    theirs = LinearGroup(tuple(other for _, other in gates))
    want = REFERENCE["gated_mlp"](build_ops(), x, norm, theirs, down[1], **more)
    close(got, want)


def test_head(device, layer, blocks, dequantized):
    mine, theirs = pair(device, layer, blocks, dequantized, "Q6_K", 80, 256)
    norm, x = Norm(rand(device, 256, seed=7), 1e-5), rand(device, 3, 256)
    more = {"softcap": 3.0, "scale": 0.3}
    got = layer.head(names(layer), x, norm, mine, **more)
    close(got, REFERENCE["head"](build_ops(), x, norm, theirs, **more))


@pytest.mark.parametrize("name", ["IQ4_XS", "F16"])
def test_table_rows(device, layer, blocks, dequantized, name):
    mine, theirs = pair(device, layer, blocks, dequantized, name, 33, 256, scale=1.5)
    ids = torch.tensor([[3, 32], [0, 3]], device=device)
    got = layer.table_rows(names(layer), mine, ids)
    torch.testing.assert_close(got, theirs.packed[ids] * 1.5, rtol=1e-6, atol=1e-7)


def decoded(given, kind):
    """f32[m, columns] back from what the kernels of csrc are given, element by element as they read it."""
    blocks, m, _ = given.shape
    factor = given[..., few_rows.X_FACTOR :][..., :4].contiguous().view(torch.float32)
    data = given[..., :512].contiguous()
    if kind == "mma":
        x = data.view(torch.float16).float().view(blocks, m, 8, 4, 2, 4).transpose(3, 4)
        x = x * x.new_tensor([1, 16])[:, None, None]
    else:
        words = data.view(torch.int8).float().view(blocks, m, 8, 4, 2, 2, 4)[..., [0, 2, 1, 3]]
        x = (256 * words[..., 0, :, :] + words[..., 1, :, :]).transpose(3, 4)
    return x.reshape(blocks, m, 256), factor


@pytest.mark.parametrize("kind", ["gemv", "mma"])
@pytest.mark.parametrize(("cols", "blocks"), [(352, 2), (1300, 6)])
@pytest.mark.parametrize("norm", [False, True])
def test_few_rows_are_made_ready(device, kind, cols, blocks, norm):
    x = rand(device, 3, cols) * torch.tensor([1.0, 1e-4, 500.0], device=device)[:, None]
    x[1, 256:] = 0
    weight = 1 + torch.arange(cols, device=device) / cols
    given = Rows(x, Norm(weight, 1e-6) if norm else None).few(kind)
    got, factor = decoded(given, kind)
    wide = torch.zeros(3, 256 * blocks, device=device)
    wide[:, :cols] = torch.nn.functional.rms_norm(x, (cols,), weight, 1e-6) if norm else x
    want = wide.view(3, blocks, 256).transpose(0, 1)
    top = want.abs().amax(-1, keepdim=True)
    step = 2**-11 if kind == "mma" else 1 / 65024
    assert ((got * factor - want).abs() <= step * 1.01 * top).all()
    sums = 32 * given[..., 512:528].contiguous().view(torch.float16).float()
    if kind == "gemv":
        sums = given[..., 512:544].contiguous().view(torch.int32).float()
    want_sums = got.view(blocks, 3, 8, 32).sum(-1)
    torch.testing.assert_close(sums, want_sums, rtol=2**-11, atol=0.3)


@pytest.mark.parametrize("kind", ["gemv", "mma"])
def test_the_torch_form_of_few_rows_agrees(device, kind):
    """Benchmarks prepare with plain torch."""
    x = rand(device, 2, 300)
    one, factor = decoded(few_rows.prepare(x, kind), kind)
    other, its = decoded(Rows(x).few(kind), kind)
    torch.testing.assert_close(one * factor, other * its, rtol=2**-10, atol=1e-4)


def test_slices_of_dense_weights_do_not_show(device, blocks, dequantized, monkeypatch):
    mine, theirs = pair(device, ops.PORTABLE, blocks, dequantized, "Q4_0", 300, 64)
    monkeypatch.setattr(product, "SCRATCH_BYTES", 1)
    x = rand(device, 70, 64)
    close(ops.PORTABLE.linear(None, x, mine), x.double() @ theirs.packed.double().T)


def test_products_of_one_kernel_in_a_row_lie_beside_each_other(monkeypatch):
    """Only those with the same making ready of x, so that no other launch comes between."""
    kinds = {"A": "gemv", "B": "gemv", "C": "mma", "D": None}
    shaped = {kind: kind and (few_rows.Shape(kind, 8, 1, 4, 2), 1) for kind in ("gemv", "mma", None)}
    monkeypatch.setattr(product, "few_of", lambda one, m, cuda: shaped[kinds[one.name]])

    def bits(names):
        empty = torch.empty(1, 1, 1)
        given = [Dense(empty) if name == "F" else Matrix(name, "Q4_K", 16, 256, empty) for name in names]
        return [(one.place, one.bits) for one in product.beside(given, Rows(torch.zeros(1, 256)), cuda=True)]

    assert bits("A") == [(0, 0)]
    assert bits("ABA") == [(0, 1), (1, 3), (2, 2)]
    assert bits("ABCA") == [(0, 1), (1, 2), (0, 0), (0, 0)]
    assert bits("ADB") == [(0, 0)] * 3
    assert bits("AFB") == [(0, 0)] * 3
