"""The tier without a compiler: 4-bit weights in torch's kernel, everything else f32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from luce_backend_cpu import torch_tier

from luce_core.contracts import Linear, RawLinear


def packed(blocks, dequantized, name, rows, cols, **more):
    data = blocks(np.random.default_rng(1), name, rows, cols)
    raw = RawLinear("w", name, (rows, cols), data, "cpu")
    return Linear("w", rows, cols, name, torch_tier.pack_linear(None, raw), **more), dequantized(data, name)


@pytest.mark.parametrize("batch", [1, 9])
@pytest.mark.parametrize(("name", "cols"), [("Q4_0", 96), ("Q4_1", 64), ("Q4_K", 512)])
def test_four_bit_weights(blocks, dequantized, name, cols, batch):
    w, dense = packed(blocks, dequantized, name, 48, cols)
    assert isinstance(w.packed, torch_tier.Int4)
    x = np.random.default_rng(2).standard_normal((batch, cols)).astype(np.float32)
    got = torch_tier.linear(None, torch.from_numpy(x), w).numpy()
    # scale and zero of a group are rounded to bf16 separately: 2^-8 of 16 scales, and the product of w and
    # x likewise
    group = np.abs(dense).reshape(48, -1, 32).max(-1).repeat(32, axis=1)
    assert (np.abs(got - x @ dense.T) <= 2**-6 * (np.abs(x) @ group.T)).all()


@pytest.mark.parametrize(("name", "rows"), [("Q8_0", 32), ("Q6_K", 32), ("Q4_0", 24), ("F16", 7)])
def test_others_are_exact(blocks, dequantized, name, rows):
    bias = torch.arange(rows, dtype=torch.float32)
    w, dense = packed(blocks, dequantized, name, rows, 256, bias=bias, scale=torch.tensor(0.5))
    x = torch.from_numpy(np.random.default_rng(3).standard_normal((2, 256)).astype(np.float32))
    want = x @ torch.from_numpy(dense.copy()).T * 0.5 + bias
    torch.testing.assert_close(torch_tier.linear(None, x, w), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K", "Q8_0"])
def test_rows_of_a_table_are_exact(blocks, dequantized, name):
    w, dense = packed(blocks, dequantized, name, 32, 256)
    ids = torch.tensor([[3, 31], [0, 3]], dtype=torch.int32)
    np.testing.assert_array_equal(torch_tier.table_rows(None, w, ids).numpy(), dense[ids.numpy()])


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K"])
def test_blocks_are_split_into_codes_scales_and_minima(blocks, dequantized, name):
    data = blocks(np.random.default_rng(4), name, 4, 512)
    codes, scale, minimum = torch_tier.SPLIT[name](data)
    together = codes * scale.repeat(32, axis=1) + minimum.repeat(32, axis=1)
    np.testing.assert_allclose(together, dequantized(data, name), rtol=1e-5, atol=1e-6)
