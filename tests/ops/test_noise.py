import math

import pytest
import torch

from luce_core.ops.noise import CounterNoise

NOISE = CounterNoise()


def uniforms(seed: int, index: int, count: int) -> torch.Tensor:
    return NOISE.uniform(torch.tensor([seed]), torch.tensor([index]), torch.arange(count))


def test_values_depend_on_nothing_but_their_arguments():
    alone = NOISE.gumbel(torch.tensor([[7]]), torch.tensor([[3]]), torch.tensor([[11]]))
    seeds, indices = torch.tensor([[5], [7]]), torch.tensor([[2], [3]])
    together = NOISE.gumbel(seeds, indices, torch.arange(20)[None])
    assert together[1, 11] == alone[0, 0]


@pytest.mark.parametrize(("seed", "index"), [(0, 0), (1, 0), (0, 1), (2**63 - 1, 5), (-1, 7)])
def test_uniform_lies_strictly_inside_zero_and_one_and_is_uniform(seed, index):
    values = uniforms(seed, index, 200_000).double()
    assert values.min() > 0
    assert values.max() < 1
    # Kolmogorov-Smirnov against U(0,1): 1.95 / sqrt(n) is the 0.1 % critical value.
    ordered = values.sort().values
    steps = torch.arange(1, len(ordered) + 1, dtype=torch.float64) / len(ordered)
    assert (ordered - steps).abs().max() < 1.95 / math.sqrt(len(ordered))


def test_gumbel_has_the_mean_and_variance_of_the_law():
    values = NOISE.gumbel(torch.tensor([9]), torch.tensor([4]), torch.arange(400_000)).double()
    assert values.isfinite().all()
    assert values.mean() == pytest.approx(0.57721566, abs=0.01)
    assert values.var() == pytest.approx(math.pi**2 / 6, abs=0.03)


@pytest.mark.parametrize("change", ["seed", "index", "token"])
def test_neighbouring_arguments_are_uncorrelated(change):
    many = torch.arange(100_000)
    zero = torch.zeros(1, dtype=torch.int64)
    a = {"seed": (many, zero, zero), "index": (zero, many, zero), "token": (zero, zero, many)}[change]
    b = {"seed": (many + 1, zero, zero), "index": (zero, many + 1, zero), "token": (zero, zero, many + 1)}[
        change
    ]
    both = torch.stack([NOISE.uniform(*a), NOISE.uniform(*b)]).double()
    assert abs(float(torch.corrcoef(both)[0, 1])) < 0.015


def test_seeds_that_differ_only_above_bit_32_differ():
    assert not torch.equal(uniforms(1, 0, 100), uniforms(1 + (1 << 32), 0, 100))


def test_the_fast_lanes_of_the_cpu_give_the_integers_of_every_device():
    generator = torch.Generator().manual_seed(0)
    seed = torch.randint(-(2**63), 2**63 - 1, (7, 1), generator=generator)
    index = torch.randint(0, 2**31, (7, 1), generator=generator, dtype=torch.int32)
    token = torch.arange(5000)[None]
    bits = NOISE.bits(seed, index, token)
    assert int(bits.min()) >= 0
    assert int(bits.max()) < 1 << 32
    expected = ((bits.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    assert torch.equal(NOISE.uniform(seed, index, token), expected)
