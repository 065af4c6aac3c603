"""Random blocks: what each format's reference decoder makes of them."""

import numpy as np
import pytest

from luce_core.errors import UsageError
from luce_core.gguf import FORMATS
from luce_core.synth.blocks import KNOWN, PLAIN, Pools, distinct, prime_from, uniform

ROW = 1024


def pools(seed=0, blocks=4096):
    return Pools(seed, dict.fromkeys(KNOWN, blocks) | dict.fromkeys(PLAIN, 64 * blocks))


def cut(made, name, format_name, rows, row=ROW):
    block = FORMATS.by_name(format_name)
    raw = b"".join(made.cut(name, block, row, rows * block.row_bytes(row)))
    return np.frombuffer(raw, np.uint8).reshape(rows, -1)


def decoded(raw, format_name):
    return FORMATS.by_name(format_name).dequantize(raw).astype(np.float64)


@pytest.mark.parametrize("name", KNOWN)
def test_weights_have_no_mean_and_the_deviation_of_their_row(name):
    weights = decoded(cut(pools(), "t", name, 256), name)
    assert np.isfinite(weights).all()
    assert abs(np.std(weights) * np.sqrt(ROW) - 1) < 0.02
    assert abs(np.mean(weights)) < 0.01 * np.std(weights)


@pytest.mark.parametrize("name", KNOWN)
def test_a_normed_input_comes_out_about_as_large(name):
    """Also a constant one: no format leans to a side."""
    weights = decoded(cut(pools(), "t", name, 256), name)
    noise = np.random.default_rng(1).standard_normal(ROW)
    for given in (noise, np.ones(ROW)):
        assert 0.7 < np.std(weights @ given) < 1.5
        assert abs(np.mean(weights @ given)) < 0.3


def test_no_two_rows_are_alike_until_every_block_was_a_start():
    raw = cut(pools(blocks=500), "t", "Q4_K", 503, row=512)  # 503 blocks, two to a row
    assert len({row.tobytes() for row in raw}) == 503
    again = cut(pools(blocks=500), "t", "Q4_K", 504, row=512)
    assert again[503].tobytes() == again[0].tobytes()


def test_tensors_start_elsewhere_and_seeds_differ():
    one, other = (cut(pools(), name, "Q4_K", 4) for name in ("a", "b"))
    assert not np.array_equal(one, other)
    assert not np.array_equal(one, cut(pools(seed=1), "a", "Q4_K", 4))
    assert np.array_equal(one, cut(pools(), "a", "Q4_K", 4))


def test_groups_have_the_same_number_as_scale_and_as_offset():
    """So the mean of each group of Q4_K's weights is 7.5 codes above its least."""
    groups = decoded(cut(pools(), "t", "Q4_K", 64), "Q4_K").reshape(-1, 32)
    assert np.all(np.abs(groups.mean(1)) < 6 * groups.std(1) / np.sqrt(32) + 1e-9)


def test_bits_are_the_same_for_ever():
    """Recorded once; another would make files of one seed differ between releases."""
    sums = {name: int(cut(pools(), "t", name, 2).astype(np.int64).sum()) for name in ("Q4_K", "Q6_K", "F32")}
    assert sums == RECORDED


RECORDED = {"Q4_K": 141700, "Q6_K": 217351, "F32": 991648}


def test_a_format_nothing_is_known_of_is_refused():
    with pytest.raises(UsageError, match=r"No random blocks of format 'I8' can be made. Choose one of F32"):
        cut(pools(), "t", "I8", 1)


def test_uniform_numbers_are_within_their_range():
    values = uniform(3, "v", 5000, -2.0, 6.0)
    assert values.dtype == np.float32
    assert -2.0 <= values.min() < -1.9
    assert 5.9 < values.max() <= 6.0
    assert np.array_equal(uniform(3, "v", 7, 1.0, 1.0), np.ones(7, np.float32))


@pytest.mark.parametrize(("row", "low", "high"), [(6, 0, 255), (6, 0, 5), (1, 3, 3), (2, 5, 6)])
def test_distinct_numbers_of_a_row(row, low, high):
    numbers = distinct(0, "t", 400, row, low, high)
    assert numbers.shape == (400, row)
    assert low <= numbers.min()
    assert numbers.max() <= high
    assert all(len(set(one)) == row for one in numbers.tolist())


def test_more_distinct_numbers_than_there_are_is_refused():
    with pytest.raises(UsageError, match="rows of 4 distinct numbers; 0 to 2 has 3"):
        distinct(0, "t", 1, 4, 0, 2)


def test_primes():
    sieve = [n for n in range(3, 2000) if all(n % d for d in range(2, n))]
    assert [prime_from(n) for n in (1, 3, 4, 14, 24, 1000)] == [3, 3, 5, 17, 29, 1009]
    assert {prime_from(n) for n in range(1900)} <= set(sieve)
