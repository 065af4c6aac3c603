"""Coarse references against their formulas, and packing against the gguf package."""

from __future__ import annotations

import attrs
import gguf
import numpy as np
import pytest
import torch

from luce_core.contracts import Linear, LinearGroup, Norm, RawLinear, Tap
from luce_core.errors import ModelFormatError
from luce_core.model.batch import RowSet, make_batch
from luce_core.ops import build_ops

OPS = build_ops()


def numbers(*shape, seed=0):
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape), dtype=torch.float32)


def linear(out, width, seed, bias=False, scale=None):
    packed = numbers(out, width, seed=seed)
    return Linear(
        name="w",
        out_features=out,
        in_features=width,
        format="F32",
        packed=packed,
        bias=numbers(out, seed=seed + 50) if bias else None,
        scale=None if scale is None else torch.tensor(scale),
    )


def applied(w, x):
    y = x @ w.packed.T
    if w.scale is not None:
        y = y * w.scale
    return y if w.bias is None else y + w.bias


def batch(tokens, **options):
    return make_batch("held", [RowSet(0, 0, tokens, {}, **options)])


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q4_0", "Q5_0", "F16", "BF16", "F32"])
def test_packing_dequantizes_to_the_numbers_of_the_gguf_package(name):
    kind = gguf.GGMLQuantizationType[name]
    weights = np.random.default_rng(1).standard_normal((6, 64)).astype(np.float32)
    data = gguf.quants.quantize(weights, kind).view(np.uint8)
    data.flags.writeable = False
    packed = OPS.pack_linear(RawLinear("w", name, (6, 64), data, "cpu"))
    want = gguf.quants.dequantize(data if name != "F32" else data.view(np.float32), kind)
    assert packed.dtype == torch.float32
    np.testing.assert_array_equal(packed.numpy(), want.reshape(6, 64))
    packed.add_(1)  # its own memory, not the file's


def test_an_unknown_format_is_said():
    with pytest.raises(ModelFormatError, match="Q9_9"):
        OPS.pack_linear(RawLinear("w", "Q9_9", (1, 1), np.zeros((1, 1), np.uint8), "cpu"))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_linear_scales_before_the_bias(bias, scale):
    w, x = linear(4, 3, 1, bias, scale), numbers(2, 3)
    torch.testing.assert_close(OPS.linear(x, w), applied(w, x))


def test_norm_linear_gives_one_result_per_member():
    x, norm = numbers(2, 3), Norm(numbers(3, seed=9), 1e-5)
    group = LinearGroup((linear(4, 3, 1), linear(2, 3, 2, bias=True)))
    n = OPS.rms(x, norm)
    for got, member in zip(OPS.norm_linear(x, norm, group), group.members, strict=True):
        torch.testing.assert_close(got, applied(member, n))
    (plain,) = OPS.norm_linear(x, None, LinearGroup(group.members[:1]))
    torch.testing.assert_close(plain, applied(group.members[0], x))


@pytest.mark.parametrize("scale", [1.0, 3.0, torch.tensor(0.25)])
def test_linear_out_norms_then_adds_then_scales(scale):
    y, residual, post = numbers(2, 3), numbers(2, 4, seed=1), Norm(numbers(4, seed=2), 1e-5)
    w = linear(4, 3, 1)
    want = (residual + OPS.rms(applied(w, y), post)) * scale
    torch.testing.assert_close(OPS.linear_out(y, w, residual, post, scale), want)
    torch.testing.assert_close(OPS.linear_out(y, w), applied(w, y))


def test_gated_mlp():
    x, norm = numbers(2, 3), Norm(numbers(3, seed=9), 1e-5)
    gate, up, down = linear(5, 3, 1), linear(5, 3, 2), linear(3, 5, 3)
    n = OPS.rms(x, norm)
    hidden = torch.nn.functional.gelu(applied(gate, n), approximate="tanh") * applied(up, n)
    got = OPS.gated_mlp(x, norm, LinearGroup((gate, up)), down, residual=x, act="gelu_tanh", scale=2.0)
    torch.testing.assert_close(got, (x + applied(down, hidden)) * 2)


def test_head_linear_applies_one_matrix_per_group():
    x, w = numbers(5, 3, 4), linear(6, 4, 1)
    got = OPS.head_linear(x, w)
    assert got.shape == (5, 3, 2)
    for g in range(3):
        torch.testing.assert_close(got[:, g], x[:, g] @ w.packed[2 * g : 2 * g + 2].T)


def test_head_scales_before_the_cap():
    x, norm, w = numbers(2, 3), Norm(numbers(3, seed=9), 1e-5), linear(7, 3, 1)
    logits = applied(w, OPS.rms(x, norm)) * 0.5
    torch.testing.assert_close(OPS.head(x, norm, w, softcap=3.0, scale=0.5), 3 * torch.tanh(logits / 3))
    torch.testing.assert_close(OPS.head(x, None, w), applied(w, x))


def test_embed_scales_tokens_but_not_given_rows():

    table = linear(9, 4, 1)
    given = numbers(2, 4, seed=3).bfloat16()
    b = attrs.evolve(batch([3, 0, 0, 8]), embeds=given, embed_rows=torch.tensor([1, 2], dtype=torch.int32))
    got = OPS.embed(b, table, 2.0)
    torch.testing.assert_close(got[[0, 3]], table.packed[[3, 8]] * 2)
    torch.testing.assert_close(got[1:3], given.float())


def test_table_rows_are_rows_of_the_scaled_matrix_without_bias():
    table = linear(9, 4, 1, bias=True, scale=3.0)
    got = OPS.table_rows(table, torch.tensor([8, 1], dtype=torch.int32))
    torch.testing.assert_close(got, table.packed[[8, 1]] * 3)


def test_tap_copies_the_layer_that_is_asked_for():

    taps = {Tap("residual", 1): torch.zeros(4, 3, dtype=torch.bfloat16), Tap("final", 1): torch.zeros(4, 3)}
    b = attrs.evolve(batch([0, 0]), taps=taps)
    x = numbers(2, 3)
    OPS.tap(b, 0, x + 1)
    OPS.tap(b, 1, x)
    assert taps[Tap("residual", 1)][:2].equal(x.bfloat16())
    assert not taps[Tap("residual", 1)][2:].any()
    assert not taps[Tap("final", 1)].any()
