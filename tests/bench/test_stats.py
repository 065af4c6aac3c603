import statistics
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce_core.bench.stats import percentile, percentiles, spread

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


@given(NUMBERS, st.floats(0, 100))
def test_a_percentile_is_numpys(values, percent):
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-6)


@given(NUMBERS)
def test_percentiles_stay_within_the_values_and_rise(values):
    found = [percentile(values, percent) for percent in (0, 10, 50, 90, 100)]
    assert found[0] == min(values)
    assert found[-1] == max(values)
    assert all(a <= b + 1e-9 for a, b in pairwise(found))


def test_known_percentiles():
    found = percentiles([10.0, 20.0, 30.0, 40.0, 50.0])
    assert (found.p50, found.p90, found.p99) == (30.0, pytest.approx(46.0), pytest.approx(49.6))
    assert percentiles([]) is None
    assert percentile([7.0], 99) == 7.0


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_no_percentile_of_nothing_or_beyond(values, percent):
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, percent)


@given(st.lists(st.floats(1, 1e4), min_size=2, max_size=20))
def test_a_spread_is_what_its_words_say(values):
    found = spread(values)
    assert found.median == np.median(values)
    assert (found.low, found.high) == (sorted(values)[0], sorted(values)[-1])
    assert found.stddev == pytest.approx(np.std(values, ddof=1), rel=1e-6, abs=1e-6)
    assert found.samples == tuple(values)


def test_one_value_has_no_deviation_and_none_no_spread():
    assert spread([3.0]).stddev is None
    assert spread([2.0, 4.0]).stddev == statistics.stdev([2.0, 4.0])
    with pytest.raises(ValueError, match="no values"):
        spread([])
