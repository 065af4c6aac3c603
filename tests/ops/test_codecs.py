"""Codecs of the cache against GGUF's own, every fp8 number there is, and bytes read by hand."""

import math
from itertools import pairwise

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from luce_core.contracts import CODECS, CodedField
from luce_core.contracts.codec import BOUNDS, LEVELS, signs
from luce_core.ops.codecs import decode, encode, turn, turn_back

FIELDS = [
    CodedField(codec, width)
    for codec in CODECS.values()
    for width in (32, 64, 96, 128, 192, 256)
    if codec.fits(width)
]
IDS = [f"{field.codec.name}-{field.width}" for field in FIELDS]
ERROR = {"q8_0": 0.0075, "fp8": 0.04, "q4_0": 0.11, "tq3_0": 0.20}
"""Largest relative error of normal numbers, as a root mean square. tq3_0: √0.0345 in theory (Lloyd-Max)."""
VECTOR_BYTES = {"q8_0": {64: 68, 128: 136, 256: 272}, "q4_0": {64: 36, 128: 72, 256: 144}}
VECTOR_BYTES |= {"fp8": {64: 64, 128: 128, 256: 256}, "tq3_0": {64: 28, 128: 52, 256: 100}}
fields = pytest.mark.parametrize("field", FIELDS, ids=IDS)


def numbers(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize("name", CODECS)
def test_bytes_of_a_vector(name):
    codec = CODECS[name]
    assert {width: codec.vector_bytes(width) for width in (64, 128, 256)} == VECTOR_BYTES[name]


@pytest.mark.parametrize(
    ("name", "width", "fits"),
    [("q8_0", 96, True), ("q8_0", 80, False), ("q4_0", 16, False), ("fp8", 5, False), ("fp8", 96, True),
     ("tq3_0", 96, False), ("tq3_0", 192, True), ("q8_0", 0, False)],
)  # fmt: skip
def test_which_vectors_can_be_kept(name, width, fits):
    assert CODECS[name].fits(width) is fits


def test_a_vector_that_does_not_fit_says_what_does():
    with pytest.raises(ValueError, match="q8_0 keeps multiples of 32 numbers, got 80"):
        CODECS["q8_0"].group(80)


@fields
def test_what_is_kept_is_near(field):
    low = -3 if field.codec.scaled else -1  # fp8 has no scale: its numbers are coarse below 0.016
    x = numbers(200, 3, field.width) * torch.logspace(low, 2, 200)[:, None, None]
    kept = encode(field, x)
    assert kept.dtype == torch.uint8
    assert kept.shape == (200, 3, field.codec.vector_bytes(field.width))
    error = (decode(field, kept) - x).norm(dim=-1) / x.norm(dim=-1)
    assert error.square().mean().sqrt() < ERROR[field.codec.name]
    assert error.mean() > ERROR[field.codec.name] / 2  # a bound that says something


@pytest.mark.parametrize(("name", "kind"), [("q8_0", "Q8_0"), ("q4_0", "Q4_0")])
def test_numbers_are_those_of_ggml(name, kind):
    x = numbers(500, 128) * 3
    number = gguf.GGMLQuantizationType[kind]
    turned = turn(x, 128)
    want = gguf.quants.dequantize(gguf.quants.quantize(turned.numpy(), number), number)
    field = CodedField(CODECS[name], 128)
    assert torch.equal(decode(field, encode(field, x)), turn_back(torch.from_numpy(want), 128))


def fp8_numbers():
    """Every finite e4m3fn number, from its bits."""
    for bits in range(128):
        exponent, fraction = bits >> 3, bits & 7
        if bits != 127:
            scale = 2.0 ** (max(exponent, 1) - 7)
            yield scale * (fraction / 8 + (exponent > 0))


def test_fp8_is_the_nearest_number_there_is():
    every = np.array(sorted({sign * x for x in fp8_numbers() for sign in (1, -1)}))
    sizes = torch.tensor([1e-3, 1e-2, 1, 100, 1000])
    x = (numbers(20, 5, 128) * sizes[:, None]).flatten(0, 1)
    kept = encode(CodedField(CODECS["fp8"], 128), x).numpy().ravel()
    values = list(fp8_numbers())
    got = np.array([values[byte & 127] * (-1) ** (byte >> 7) for byte in kept.tolist()])
    want = turn(x, 128).double().clamp(-448, 448).numpy().ravel()
    np.testing.assert_array_equal(np.abs(got - want), np.abs(every[None, :] - want[:, None]).min(1))
    assert np.abs(want).max() == 448


def bits_of(data, bits):
    """Small numbers, the first lowest in its byte."""
    return [byte >> place & (1 << bits) - 1 for byte in data for place in range(0, 8, bits)]


@pytest.mark.parametrize("width", [64, 128, 192, 256])
def test_tq3_from_its_bytes_by_hand(width):
    """Read as the page on codecs says it lies, turned back with a matrix made number by number."""
    field = CodedField(CODECS["tq3_0"], width)
    x = numbers(width, seed=3)
    data = encode(field, x).numpy().tobytes()
    size = 128 if width % 128 == 0 else 64
    levels, minus = bits_of(data[: width // 4], 2), bits_of(data[width // 4 : 3 * width // 8], 1)
    scales = np.frombuffer(data[3 * width // 8 :][: 2 * width // size], np.float16).astype(float)
    codes = enumerate(zip(levels, minus, strict=True))
    turned = [(-1) ** m * LEVELS[c] * scales[d // size] for d, (c, m) in codes]
    matrix = [
        [(-1) ** (i & j).bit_count() * signs(size)[j] / size**0.5 for j in range(size)] for i in range(size)
    ]
    want = np.array(turned).reshape(-1, size) @ np.array(matrix)
    got = decode(field, torch.tensor(list(data), dtype=torch.uint8))
    np.testing.assert_allclose(got, want.ravel(), atol=1e-5)
    # Every number of the turned group has the nearest of the eight levels.
    y = x.double().numpy().reshape(-1, size) @ np.array(matrix).T
    y /= np.linalg.norm(y, axis=1, keepdims=True) / size**0.5
    nearest = [min(range(4), key=lambda c: abs(LEVELS[c] - abs(number))) for number in y.ravel()]
    assert nearest == levels
    assert [number < 0 for number in y.ravel()] == [bool(m) for m in minus]


def test_bounds_lie_between_levels():
    assert list(BOUNDS) == pytest.approx([(low + high) / 2 for low, high in pairwise(LEVELS)])


@pytest.mark.parametrize("size", [64, 128])
def test_a_turn_is_orthogonal_and_spreads(size):
    x, y = numbers(5, 2 * size), numbers(5, 2 * size, seed=1)
    torch.testing.assert_close(turn_back(turn(x, size), size), x)
    torch.testing.assert_close((turn(x, size) * turn(y, size)).sum(-1), (x * y).sum(-1), rtol=1e-4, atol=1e-4)
    one = torch.zeros(size)
    one[7] = 3.0
    torch.testing.assert_close(turn(one, size).abs(), torch.full((size,), 3 / size**0.5))
    assert abs(sum(signs(size))) < size / 4  # a constant vector is spread too


@fields
def test_norms_are_kept(field):
    x = numbers(300, field.width)
    ratio = decode(field, encode(field, x)).norm(dim=-1) / x.norm(dim=-1)
    assert abs(ratio.mean() - 1) < 0.006
    if field.codec.name == "tq3_0":
        torch.testing.assert_close(ratio, torch.ones(300), rtol=1e-3, atol=0)


@fields
def test_zeros_stay_zeros(field):
    kept = encode(field, torch.zeros(2, field.width))
    assert not decode(field, kept).any()
    assert not decode(field, torch.zeros_like(kept)).any()  # pages nobody wrote


@fields
@pytest.mark.parametrize("size", [1e-30, 1e-7, 15000.0])
def test_very_small_and_very_large_numbers_stay_finite(field, size):
    x = numbers(8, field.width) * size
    got = decode(field, encode(field, x))
    assert got.isfinite().all()
    assert got.abs().max() <= 1.3 * x.abs().max() + 8 * 2**-24  # the least scale of f16


@fields
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_hidden(field, wrong):
    x = numbers(field.width)
    x[3] = wrong
    got, size = decode(field, encode(field, x)), field.codec.turn(field.width)
    lost = torch.arange(field.width) // size == 3 // size
    assert got[lost].isnan().all()
    assert got[~lost].isfinite().all()


@given(
    number=st.integers(0, len(FIELDS) - 1),
    seed=st.integers(0, 99),
    power=st.integers(-10, 8),
)
def test_a_vector_is_encoded_alone(number, seed, power):
    """Whatever lies beside it: entries are written row by row, in any company."""
    field = FIELDS[number]
    x = numbers(6, field.width, seed=seed) * 2.0**power
    alone = torch.stack([encode(field, row) for row in x])
    together = encode(field, x)
    assert (alone != together).sum() <= 2  # bytes: products of matrices differ in their last bit
    near = decode(field, alone) - decode(field, together)
    assert near.norm() < 0.01 * x.norm()
