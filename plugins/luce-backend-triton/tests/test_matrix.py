"""Packing against the `gguf` package: every format, edges that are not whole records, groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from luce_backend_triton import formats, matrix, product
from luce_backend_triton.formats import FORMATS
from luce_backend_triton.matrix import Dense, Matrix

from luce_core.contracts import Linear, RawLinear


def packed(device, blocks, name, rows, cols, seed=0):
    data = blocks(name, rows, cols, seed)
    data.flags.writeable = False
    return matrix.pack_matrix(RawLinear("w", name, (rows, cols), data, str(device)), no_floats), data


def raw_linear(blocks, dequantized, name, rows, cols, seed):
    """On the CPU; and as float64."""
    data = blocks(name, rows, cols, seed)
    made = matrix.pack_matrix(RawLinear("w", name, (rows, cols), data, "cpu"), None)
    return Linear("w", rows, cols, name, made), torch.from_numpy(dequantized(data, name).copy()).double()


def no_floats(name, data):
    raise AssertionError(f"{name} went through floats")


def cols_of(name):
    return {256: 512, 64: 320, 32: 352}[formats.BLOCKS[name][0]]


@pytest.mark.parametrize("name", FORMATS)
def test_rows_come_back_as_they_were(device, blocks, dequantized, name):
    w, data = packed(device, blocks, name, 37, cols_of(name))
    assert isinstance(w, Matrix)
    ids = torch.tensor([36, 0, 17, 17, 8], dtype=torch.int32, device=device)
    want = dequantized(data, name)[ids.cpu().numpy()]
    np.testing.assert_allclose(product.table_rows(w, ids).cpu().numpy(), want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "IQ4_NL"])
def test_dense_weights_are_halves_of_whole_records(device, blocks, dequantized, name):
    cols = cols_of(name)
    w, data = packed(device, blocks, name, 40, cols)
    out = torch.full((20, w.blocks * 256), float("nan"), dtype=torch.float16, device=device)
    product.dense_rows(w, 16, 20, out)
    want = torch.from_numpy(dequantized(data, name)[16:36].copy()).to(torch.float16)
    torch.testing.assert_close(out[:, :cols].cpu(), want, rtol=1e-3, atol=1e-6)
    assert not out[:, cols:].any()


@pytest.mark.parametrize("name", FORMATS)
def test_a_record_takes_hardly_more_than_the_files_bytes(name):
    weights, size = formats.BLOCKS[name]
    assert FORMATS[name].bits_per_weight <= size * 8 / weights * 1.03
    assert FORMATS[name].record_bytes % 16 == 0
    assert FORMATS[name].code_bytes % 16 == 0


def test_slices_do_not_show(device, blocks, monkeypatch):
    whole, _ = packed(device, blocks, "Q5_K", 100, 256)
    monkeypatch.setattr(matrix, "SLICE_BYTES", 176 * 32)
    sliced, _ = packed(device, blocks, "Q5_K", 100, 256)
    assert torch.equal(whole.records, sliced.records)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 7, 8, 1001])
@pytest.mark.parametrize("large", [False, True])
def test_slices_come_whole(monkeypatch, rows, large):
    """By one thread or several, however many rows each has; nothing behind them is written."""
    monkeypatch.setattr(matrix, "SLICE_BYTES", 4 if large else 4 * 1001 * 33 + 4)
    taken, copiers = [], matrix._copiers
    monkeypatch.setattr(matrix, "_copiers", lambda: taken.append(1) or copiers())
    source = np.random.default_rng(rows).integers(0, 256, (rows, 33), dtype=np.uint8)
    source.flags.writeable = False
    target = np.full((rows + 2, 33), 77, np.uint8)
    matrix._copy(target[:rows], source)
    np.testing.assert_array_equal(target[:rows], source)
    assert (target[rows:] == 77).all()
    assert bool(taken) is (large and rows > 0)


def test_rows_of_a_wider_matrix_come_whole_too(monkeypatch):
    """As a member of a stack lies in its file: rows at a stride."""
    monkeypatch.setattr(matrix, "SLICE_BYTES", 4)
    wide = np.random.default_rng(0).integers(0, 256, (19, 64), dtype=np.uint8)
    target = np.zeros((19, 24), np.uint8)
    matrix._copy(target, wide[:, 8:32])
    np.testing.assert_array_equal(target, wide[:, 8:32])


def test_a_slice_that_cannot_be_read_is_an_error(monkeypatch):
    """Of whichever thread: not a matrix that lacks some of its rows."""
    monkeypatch.setattr(matrix, "SLICE_BYTES", 4)
    real = np.copyto

    def broken(target, source):
        if source[0, 0] == 9:
            raise OSError("the disk is gone")
        real(target, source)

    monkeypatch.setattr(matrix.np, "copyto", broken)
    source = np.repeat(np.arange(12, dtype=np.uint8), 8).reshape(12, 8)
    with pytest.raises(OSError, match="the disk is gone"):
        matrix._copy(np.zeros((12, 8), np.uint8), source)


@pytest.mark.parametrize("exponent", [0, 113, 144, 255])
def test_exponents_no_half_has_are_kept_as_floats(device, blocks, exponent, caplog):
    data = blocks("MXFP4", 16, 64)
    data[3, 0] = exponent
    raw = RawLinear("blk.0.w", "MXFP4", (16, 64), data, str(device))
    w = matrix.pack_matrix(raw, lambda name, given: np.zeros((16, 64), np.float32))
    assert isinstance(w, Dense)
    assert "'blk.0.w' is stored as MXFP4" in caplog.text
    data[3, 1:17] = 0x80  # zero and minus zero
    assert isinstance(matrix.pack_matrix(raw, no_floats), Matrix)


def test_every_scale_of_nvfp4_comes_back(device, blocks, dequantized):
    """All 256 bytes: signs are not read, subnormal ones are, the one that is no number is 0."""
    data = blocks("NVFP4", 64, 64)
    data[:, :4] = np.arange(256, dtype=np.uint8).reshape(64, 4)
    data[:, 4:] = 0x27  # 12 and 2, halves of them
    w = matrix.pack_matrix(RawLinear("w", "NVFP4", (64, 64), data, str(device)), no_floats)
    rows = product.table_rows(w, torch.arange(64, dtype=torch.int32, device=device)).cpu().numpy()
    np.testing.assert_array_equal(rows, dequantized(data, "NVFP4"))
    assert set(rows.reshape(-1, 16)[[0, 0x7F, 0x80]].flatten().tolist()) == {0.0}
    assert set(rows.reshape(-1, 16)[0x38].tolist()) == {6.0, 1.0}  # a scale of one


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_floats_stay_as_they_are(device, blocks, dequantized, name):
    w, data = packed(device, blocks, name, 20, 48)
    assert isinstance(w, Dense)
    np.testing.assert_array_equal(w.weight.float().cpu().numpy(), dequantized(data, name))


def bf16(device, values):
    data = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint8).numpy()
    return matrix.pack_matrix(RawLinear("w", "BF16", values.shape, data, str(device)), no_floats).weight


@pytest.mark.parametrize(
    ("scale", "outlier", "kept"),
    [
        (1.0, 0.0, torch.float16),
        (1.0, 6e4, torch.float16),
        (1.0, 1e-30, torch.float16),  # nothing beside the others
        (1.0, 7e4, torch.float32),
        (1e-6, 0.0, torch.float32),
        (0.0, 0.0, torch.float16),
        (1.0, float("inf"), torch.float32),
        (1.0, float("nan"), torch.float32),
    ],
)
def test_bf16_becomes_f16_where_that_loses_nothing(
    device, taken_for, monkeypatch, caplog, scale, outlier, kept
):
    taken_for(7, 5)
    monkeypatch.setattr(matrix, "SLICE_BYTES", 16 * 64 * 2)
    values = scale * np.random.default_rng(0).standard_normal((40, 64)).astype(np.float32)
    values[35, 3] = outlier
    exact = torch.from_numpy(values).to(torch.bfloat16).float()
    weight = bf16(device, values)
    assert weight.dtype is kept
    got = weight.float().cpu()
    torch.testing.assert_close(got, exact, rtol=2**-11, atol=2**-25 if scale else 0, equal_nan=True)
    assert ("'w' is stored as BF16" in caplog.text) is (kept is torch.float32)


def test_bf16_stays_where_it_is_multiplied(device, taken_for):
    taken_for(8, 0)
    assert bf16(device, np.ones((20, 48), np.float32)).dtype is torch.bfloat16


def linear(device, blocks, name, rows, seed, bias=False, scale=None):
    w, data = packed(device, blocks, name, rows, 256, seed)
    b = torch.arange(rows, dtype=torch.float32, device=device) if bias else None
    return Linear(f"w{seed}", rows, 256, name, w, b, scale), data


def test_neighbours_of_one_format_become_one_matrix(device, blocks, dequantized):
    pairs = [
        linear(device, blocks, "Q4_K", 32, 0),
        linear(device, blocks, "Q4_K", 24, 1, bias=True),
        linear(device, blocks, "Q6_K", 16, 2),
        linear(device, blocks, "Q4_K", 16, 3),
    ]
    members = tuple(pair[0] for pair in pairs)
    group = matrix.pack_members(members)
    assert [[one.name for one in part.members] for part in group.parts] == [["w0", "w1"], ["w2"], ["w3"]]
    joined = group.parts[0].matrix
    assert joined.rows == 56
    assert group.parts[0].bias[:32].eq(0).all()
    assert group.parts[0].bias[32:].tolist() == list(range(24))
    assert members[1].packed.records.data_ptr() == joined.records[2:].data_ptr()
    for member, data in pairs:
        ids = torch.arange(member.out_features, dtype=torch.int32, device=device)
        got = product.table_rows(member.packed, ids).cpu().numpy()
        np.testing.assert_allclose(got, dequantized(data, member.format), rtol=1e-6, atol=1e-7)


def test_a_member_whose_rows_are_not_whole_tiles_is_the_last_of_its_matrix(device, blocks):
    members = tuple(linear(device, blocks, "Q8_0", rows, rows)[0] for rows in (8, 16))
    group = matrix.pack_members(members)
    assert [part.matrix.rows for part in group.parts] == [8, 16]


def test_scaled_members_stay_alone(device, blocks):
    scaled = linear(device, blocks, "Q8_0", 16, 0, scale=torch.tensor(0.5))[0]
    assert matrix.pack_members((scaled, linear(device, blocks, "Q8_0", 16, 1)[0])) is None
