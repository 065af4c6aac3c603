"""Every block format, on every processor variant, against the `gguf` package and float64 sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from luce_backend_cpu import lowering, native
from luce_backend_cpu.region import GEMM_ROWS, single

from luce_core.contracts import LinearGroup

BLOCK_32 = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
BLOCK_256 = ("Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
PLAIN = ("F32", "F16", "BF16")
SHAPES = [
    *((name, 35, 96) for name in BLOCK_32),
    *((name, 35, 512) for name in BLOCK_256),
    *((name, 35, 83) for name in PLAIN),
]
"""Rows no multiple of 16; an odd number of blocks of 32; floats that fill no register."""


def test_every_format_of_the_library_is_tested():
    assert {name for name, _, _ in SHAPES} == set(native.FORMATS)


def close(got, want, scale, tolerance):
    """Within tolerance · scale, where scale is the sum of the absolute products."""
    worst = float((np.abs(got - want) / scale).max())
    assert worst <= tolerance, f"off by {worst:.3g} of the sum of absolute products"


@pytest.mark.parametrize(("name", "rows", "cols"), SHAPES)
def test_rows_are_dequantized_as_the_gguf_package_does(lib, linear_of, name, rows, cols):
    w, reference = linear_of(lib, name, rows, cols)
    ids = np.array([0, 34, 17, 17, 1], np.int32)
    out = np.empty((len(ids), cols), np.float32)
    assert lib.dequantize(w.packed.bind(w), ids.ctypes.data, len(ids), out.ctypes.data) == 0
    want = reference.packed.numpy()[ids]
    np.testing.assert_allclose(out, want, rtol=1e-6, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("batch", [1, 3, 14])
@pytest.mark.parametrize(("name", "rows", "cols"), SHAPES)
def test_few_rows_are_products_of_two_int8_terms(lib, linear_of, name, rows, cols, batch):
    assert batch < GEMM_ROWS
    w, reference = linear_of(lib, name, rows, cols, seed=batch)
    x = np.random.default_rng(7).standard_normal((batch, cols)).astype(np.float32)
    got = run_linear(lib, w, x)
    dense = reference.packed.numpy().astype(np.float64)
    # two terms hold an activation to 1 / (127 · 254 · 2) of the largest of its 32; one alone misses by 4e-3
    close(got, x @ dense.T, np.abs(x) @ np.abs(dense).T, 2e-6 if name in PLAIN else 3e-5)


@pytest.mark.parametrize("batch", [GEMM_ROWS, 70])
@pytest.mark.parametrize(("name", "rows", "cols"), SHAPES)
def test_many_rows_are_products_of_dequantized_weights(lib, linear_of, name, rows, cols, batch):
    w, reference = linear_of(lib, name, rows, cols, seed=batch)
    x = np.random.default_rng(8).standard_normal((batch, cols)).astype(np.float32)
    got = run_linear(lib, w, x)
    dense = reference.packed.numpy().astype(np.float64)
    # bf16 keeps 8 bits of each factor, f32 keeps all
    close(got, x.astype(np.float64) @ dense.T, np.abs(x) @ np.abs(dense).T, 2**-8 if lib.amx else 2e-6)


def run_linear(lib, w, x: np.ndarray) -> np.ndarray:
    step = lowering.norm_linear(torch.from_numpy(x), None, LinearGroup((w,)))
    return single("norm_linear", step, lib, False)[0].numpy()


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q6_K"])
def test_long_rows_are_cut_into_k_blocks(lib, linear_of, name):
    w, reference = linear_of(lib, name, 33, 4096)
    x = np.random.default_rng(9).standard_normal((30, 4096)).astype(np.float32)
    dense = reference.packed.numpy().astype(np.float64)
    close(
        run_linear(lib, w, x),
        x.astype(np.float64) @ dense.T,
        np.abs(x) @ np.abs(dense).T,
        2**-8 if lib.amx else 2e-6,
    )


@pytest.mark.parametrize("batch", [1, 9, 30])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_activations_that_are_no_numbers_are_not_hidden(lib, linear_of, batch, bad):
    w, _ = linear_of(lib, "Q4_1", 16, 64)
    x = np.ones((batch, 64), np.float32)
    x[0, 40] = bad
    got = run_linear(lib, w, x)
    assert not np.isfinite(got[0]).any()
    assert np.isfinite(got[1:]).all()


def test_zero_activations_give_zero(lib, linear_of):
    w, _ = linear_of(lib, "Q5_K", 16, 256)
    assert not run_linear(lib, w, np.zeros((1, 256), np.float32)).any()


@pytest.mark.parametrize(("name", "rows", "cols"), SHAPES[:11])
def test_rearranging_keeps_the_bytes(libraries, blocks, name, rows, cols):
    """Same multiset of bytes per sixteen rows: nothing is recomputed."""
    lib = libraries("native")
    if not lib.wants_lanes(native.FORMATS[name]):
        pytest.skip("this processor reads the formats row by row")
    data = blocks(np.random.default_rng(3), name, 32, cols)
    moved = lowering.Packed.from_file(lib, data, name, 32, cols).bytes
    assert moved.nbytes == data.nbytes
    for start in (0, 16):
        assert sorted(moved[start : start + 16].ravel()) == sorted(data[start : start + 16].ravel())
