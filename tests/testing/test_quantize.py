"""Blocks made for tests decode, by the `gguf` package, to about the numbers they were made from."""

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luce_core.testing.quantize import quantize

K_STEPS = {"Q2_K": 3, "Q3_K": 7, "Q4_K": 15, "Q5_K": 31, "Q6_K": 63}
"""Steps between the smallest and largest weight of a group."""
PACKAGE = ["BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"]


def decode(raw, name):
    return gguf.dequantize(raw, gguf.GGMLQuantizationType[name])


def weights(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("name", K_STEPS)
@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([0.02, 1.0, 40.0]),  # much smaller ones meet the end of float16
    shift=st.sampled_from([-1.0, 0.0, 0.5]),
)
def test_no_weight_is_off_by_more_than_about_a_step(name, seed, scale, shift):
    given_weights = (weights(3, 512, seed=seed) + np.float32(shift)) * np.float32(scale)
    decoded = decode(quantize(given_weights, name), name)
    groups = np.abs(given_weights).reshape(3, 2, 256)
    widest_step = 2 * groups.max(-1, keepdims=True) / K_STEPS[name]
    error = np.abs(decoded - given_weights).reshape(3, 2, 256)
    assert (error <= 1.1 * widest_step + 1e-6 * scale).all()


@pytest.mark.parametrize("name", K_STEPS)
def test_more_bits_are_closer(name):
    order, given_weights = list(K_STEPS), weights(64, 256)
    error = {kind: np.std(decode(quantize(given_weights, kind), kind) - given_weights) for kind in order}
    assert error[name] < 0.35
    assert name == "Q6_K" or error[order[order.index(name) + 1]] < 0.6 * error[name]


@pytest.mark.parametrize("name", [*K_STEPS, *PACKAGE])
def test_shapes(name):
    block_weights, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    raw = quantize(weights(2, 3, 512), name)
    assert raw.dtype == np.uint8
    assert raw.shape == (2, 3, 512 // block_weights * block_bytes)


@pytest.mark.parametrize("name", K_STEPS)
@pytest.mark.parametrize("value", [0.0, 1.0, -2.0])
def test_constant_blocks_are_exact_or_near(name, value):
    given_weights = np.full((1, 256), value, np.float32)
    np.testing.assert_allclose(decode(quantize(given_weights, name), name), given_weights, rtol=0.02)


@pytest.mark.parametrize("name", K_STEPS)
def test_every_place_of_a_block_is_its_own(name):
    """One large weight decodes at its place and nowhere else: no bits are packed into the wrong one."""
    given_weights = np.eye(256, dtype=np.float32)
    decoded = decode(quantize(given_weights, name), name)
    np.testing.assert_allclose(np.diag(decoded), 1, rtol=0.02)
    np.testing.assert_allclose(decoded - np.diag(np.diag(decoded)), 0, atol=0.02)


def test_plain_formats_change_the_dtype():
    given_weights = weights(2, 5)
    np.testing.assert_array_equal(quantize(given_weights, "F32"), given_weights)
    np.testing.assert_array_equal(quantize(given_weights, "F16"), given_weights.astype(np.float16))


def test_rows_that_end_inside_a_block():
    with pytest.raises(ValueError, match="rows of 100 weights for Q4_K; wanted a multiple of 256"):
        quantize(weights(2, 100), "Q4_K")


@pytest.mark.parametrize("name", ["IQ2_XXS", "NVFP4"])
def test_formats_nothing_can_write(name):
    with pytest.raises(ValueError, match=f"nothing here quantizes to {name}; give the tensor as `Blocks`"):
        quantize(weights(1, 256), name)
