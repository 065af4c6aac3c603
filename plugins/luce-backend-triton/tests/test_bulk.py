"""Copies in bulk of csrc/mma.cu, run on the CPU: the products they give, beside those of copies lane by lane,
and that the ways in which they can be wrong are seen.
"""

from __future__ import annotations

import pytest
import torch
from luce_backend_triton.few_rows import Shape

from . import simt

pytestmark = pytest.mark.skipif(simt.GXX is None, reason="no g++ here to compile CUDA C++ for the CPU with")


@pytest.fixture
def product(tmp_path, blocks, dequantized):
    """The relative error of some rows of x, by a shape."""

    def error(name="Q4_K", shape=None, grid=3, cols=1024, m=11):
        shape = shape or Shape("mma", 8, 2, 2, 3)
        torch.manual_seed(5)
        rows = 72
        data, x = blocks(name, rows, cols), torch.randn(m, cols)
        more = torch.randn(rows), torch.randn(m, rows)
        want = x.double() @ torch.from_numpy(dequantized(data, name).copy()).double().T
        want += more[0].double() + more[1].double()
        y = simt.product(tmp_path, name, data, x, shape, grid, *more)
        return float((y.double() - want).norm() / want.norm())

    return error


@pytest.mark.parametrize("bulk", [True, False])
@pytest.mark.parametrize(
    ("name", "shape", "grid", "cols"),
    [
        ("Q4_K", Shape("mma", 8, 2, 2, 2), 3, 1024),  # two or more turns of a gate
        ("Q6_K", Shape("mma", 16, 2, 4, 3), 1, 2048),  # owners one after the other
        ("Q8_0", Shape("mma", 8, 1, 1, 2), 40, 768),  # one record for each
        ("IQ4_XS", Shape("mma", 24, 1, 2, 4), 2, 512),  # fewer records than stages
    ],
)
def test_ways_of_copying(product, monkeypatch, bulk, name, shape, grid, cols):
    monkeypatch.setattr(simt, "BULK", bulk)
    assert product(name, shape, grid, cols) <= 2e-3


WRONG = [
    ("pass_gate(shared + stage + GATE, odd);", "", "more arrive"),
    ("stage = 0, odd ^= 1;", "stage = 0;", "more arrive"),
    ("expect(stage + GATE, TILES * RECORD);", "expect(stage + GATE, TILES * RECORD + 16);", "never comes"),
    ("expect(stage + GATE, pieces * 16);", "", "never comes"),
    ("show_gates();\n", "\n", "cannot see"),
    ("if (!BULK) wait();\n        __syncthreads();", "", "error"),
    ("#define GATE (SLAB + X_ROWS * X_BYTES)", "#define GATE (SLAB + X_ROWS * X_BYTES - 16)", "written over"),
]
"""(What stands in the source, what stands there instead, what is said of it; error: a wrong product)."""


@pytest.mark.parametrize(("there", "instead", "says"), WRONG)
def test_what_is_wrong_is_seen(product, monkeypatch, there, instead, says):
    source = simt.source_of("sums.cuh", "mma")
    assert source.count(there) == 1
    monkeypatch.setattr(simt, "source_of", lambda *_: source.replace(there, instead))
    try:
        wrong = product(shape=Shape("mma", 16, 2, 4, 3), grid=1, cols=2048, m=21) > 2e-3
        said = "error" if wrong else ""
    except AssertionError as fault:
        said = str(fault)
    assert says in said
