"""Each op called by itself against the reference op, on f32 matrices: the arithmetic around the products."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from luce_backend_cpu import lowering
from luce_backend_cpu.c_tier import FAST
from luce_backend_cpu.region import GEMM_ROWS, single

from luce_core.contracts import Clamp, Linear, LinearGroup, Norm, RawLinear
from luce_core.model.batch import RowSet, make_batch
from luce_core.ops import build_ops

REFERENCE = build_ops()
ROWS = [1, 3, 5, 37]
"""Few rows prepared by each thread, few prepared together, many."""


def rand(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def check(lib, op, step, args, kwargs, amx_bits=2**-6):
    assert step is not None
    got = single(op, step, lib, False)
    want = getattr(REFERENCE, op)(*args, **kwargs)
    for one, other in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
        tolerance = amx_bits if lib.amx and one.shape[0] >= GEMM_ROWS else 2e-5
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * max(1.0, float(other.abs().max())))


def swap(args, old, new):
    return [new if arg is old else arg for arg in args]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("normed", [True, False])
def test_norm_linear(lib, linear_of, rows, normed):
    pairs = [linear_of(lib, "F32", out, 50, seed=out, bias=True) for out in (16, 3)]
    pairs.insert(1, linear_of(lib, "F32", 40, 50, scale=0.5))
    norm = Norm(rand(50, seed=1), 1e-5) if normed else None
    x = rand(rows, 50)
    mine, theirs = (LinearGroup(tuple(pair[i] for pair in pairs)) for i in (0, 1))
    check(lib, "norm_linear", lowering.norm_linear(x, norm, mine), (x, norm, theirs), {})


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("post", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_linear_out(lib, linear_of, rows, post, residual):
    mine, theirs = linear_of(lib, "F32", 37, 48, bias=True)
    more = {
        "post": Norm(rand(37, seed=2), 1e-6) if post else None,
        "residual": rand(rows, 37, seed=3) if residual else None,
        "scale": torch.tensor([0.7]),
    }
    y = rand(rows, 48)
    check(lib, "linear_out", lowering.linear_out(y, mine, **more), (y, theirs), more)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "relu", "sigmoid"])
def test_gated_mlp(lib, linear_of, rows, act):
    pairs = [linear_of(lib, "F32", 70, 32, seed=i, bias=True) for i in (0, 1)]
    down = linear_of(lib, "F32", 32, 70, seed=2)
    norm = Norm(rand(32, seed=4), 1e-5)
    more = {
        "residual": rand(rows, 32, seed=5),
        "post": Norm(rand(32, seed=6), 1e-5),
        "act": act,
        "clamp": Clamp(1.5),
        "scale": 2.0,
    }
    x = rand(rows, 32)
    mine, theirs = (LinearGroup(tuple(pair[i] for pair in pairs)) for i in (0, 1))
    check(
        lib,
        "gated_mlp",
        lowering.gated_mlp(x, norm, mine, down[0], **more),
        (x, norm, theirs, down[1]),
        more,
        0.05,
    )


@pytest.mark.parametrize("rows", ROWS)
def test_head(lib, linear_of, rows):
    mine, theirs = linear_of(lib, "F32", 200, 32)
    norm, x, more = Norm(rand(32, seed=7), 1e-5), rand(rows, 32), {"softcap": 3.0, "scale": 0.3}
    check(lib, "head", lowering.head(x, norm, mine, **more), (x, norm, theirs), more)


def batch_of(tokens, **more):
    from attrs import evolve

    return evolve(make_batch("prefill", [RowSet(0, 0, tokens, {})]), **more)


@pytest.mark.parametrize("name", ["Q8_0", "Q6_K", "F16"])
def test_embed(lib, linear_of, name):
    mine, theirs = linear_of(lib, name, 50, 256, scale=1.5)
    b = batch_of([0, 49, 17, 17, 3])
    check(lib, "embed", lowering.embed(b, mine, 2.0), (b, theirs, 2.0), {}, 2e-5)


def test_embedded_rows_take_the_place_of_tokens(quick_lib, linear_of):
    mine, theirs = linear_of(quick_lib, "F32", 50, 64)
    b = batch_of([1, 0, 0, 2], embeds=rand(2, 64, seed=8), embed_rows=torch.tensor([1, 2], dtype=torch.int32))
    check(quick_lib, "embed", lowering.embed(b, mine, 2.0), (b, theirs, 2.0), {}, 2e-5)


@pytest.mark.parametrize("token", [-1, 50, 2**31 - 1])
def test_a_token_outside_the_table_is_an_error(quick_lib, linear_of, token):
    mine, _ = linear_of(quick_lib, "Q8_0", 50, 64)
    with pytest.raises(Exception, match="token id lies outside"):
        single("embed", lowering.embed(batch_of([3, token]), mine), quick_lib, False)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q8_0", "F32"])
@pytest.mark.parametrize("rows", [2, 40])
def test_row_invariant_products_do_not_know_their_batch(quick_lib, linear_of, name, rows):
    w, _ = linear_of(quick_lib, name, 48, 256)
    x = rand(rows, 256)
    group = LinearGroup((w,))
    (together,) = single("norm_linear", lowering.norm_linear(x, None, group), quick_lib, True)
    for row in range(rows):
        alone = single("norm_linear", lowering.norm_linear(x[row : row + 1], None, group), quick_lib, True)[0]
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("variant", ["native", "baseline"])
def test_any_number_of_threads_gives_the_same_bits(libraries, linear_of, variant):
    """baseline runs on threads of its own, native on torch's."""
    lib = libraries(variant)
    w, _ = linear_of(lib, "Q5_1", 300, 320)
    for rows in (1, 30):
        x = rand(rows, 320)
        seen = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            seen.append(single("linear", lowering.linear(x, w), lib, False)[0])
        assert all(torch.equal(seen[0], other) for other in seen[1:])


def test_formats_the_library_does_not_know_are_kept_as_f32(caplog, blocks):
    import gguf

    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (32, 84), dtype=np.uint8)  # Q2_K: 84 bytes for 256 weights
    data[:, 80:84] = np.full((32, 2), 0.01, "<f2").view(np.uint8)
    packed = FAST.pack_linear(None, RawLinear("blk.0.w", "Q2_K", (32, 256), data, "cpu"))
    assert "'blk.0.w' is stored as Q2_K" in caplog.text
    w = Linear("blk.0.w", 32, 256, "Q2_K", packed)
    want = gguf.dequantize(data, gguf.GGMLQuantizationType.Q2_K)
    np.testing.assert_array_equal(FAST.table_rows(None, w, torch.arange(32)).numpy(), want)


def test_weights_packed_by_another_layer_are_left_to_it():
    foreign = Linear("w", 4, 4, "F32", packed=torch.eye(4))
    x, group = rand(1, 4), LinearGroup((foreign, foreign))
    assert lowering.norm_linear(x, None, group) is None
    assert lowering.linear_out(x, foreign) is None
    assert lowering.gated_mlp(x, None, group, foreign) is None
    assert lowering.head(x, None, foreign) is None
    assert lowering.embed(None, foreign) is None


def test_what_the_library_cannot_do_is_left_to_the_reference(lib, linear_of):
    (gate, _), (up, _), (down, _) = (linear_of(lib, "F32", 4, 4, seed=n) for n in range(3))
    pair = LinearGroup((gate, up))
    assert lowering.gated_mlp(rand(1, 4), None, pair, down, clamp=Clamp(1.0)) is not None
    assert lowering.gated_mlp(rand(1, 4), None, pair, down, clamp=Clamp(1.0, "after")) is None
    assert lowering.embed(None, gate, 1.0) is not None
    assert lowering.embed(None, gate, 1.0, given=False) is None


@pytest.mark.parametrize("rows", ROWS)
def test_experts_read_packed_stacks(lib, linear_of, rows):
    """No op of this layer: the reference, over the layer's own rows."""
    ops = build_ops({"table_rows": FAST.table_rows})
    mine, theirs = linear_of(lib, "Q8_0", 8 * 32, 64, seed=1)
    x = rand(rows, 64)
    ids = torch.from_numpy(np.random.default_rng(2).integers(0, 8, (rows, 3)).astype(np.int32))
    torch.testing.assert_close(ops.moe_linear(x, ids, mine, 8), REFERENCE.moe_linear(x, ids, theirs, 8))


def test_only_mapped_files_are_forgotten(tmp_path):
    """Pages of other memory would be lost, not read again."""
    import mmap

    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 64)
    with path.open("r+b") as file:
        read_only = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        private = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
    assert lowering.is_mapped_file(read_only[64:].reshape(-1, 64)[1:])
    assert not lowering.is_mapped_file(private)
    assert not lowering.is_mapped_file(np.zeros(4096, np.uint8))
    assert lowering.is_mapped_file(SimpleNamespace(base=None)) is False  # type: ignore[arg-type]
