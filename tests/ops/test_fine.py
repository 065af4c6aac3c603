"""Fine ops against formulas in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luce_core.contracts import Clamp, Norm, RopeSpec
from luce_core.errors import PluginError
from luce_core.ops import build_ops
from luce_core.ops.fine import section_axes

OPS = build_ops()


def numbers(*shape, seed=0):
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape), dtype=torch.float32)


def test_rms_divides_by_the_root_mean_square():
    x, weight = numbers(3, 5), numbers(5, seed=1)
    want = x.double() / torch.sqrt(x.double().square().mean(-1, keepdim=True) + 0.01) * weight.double()
    torch.testing.assert_close(OPS.rms(x, Norm(weight, 0.01)).double(), want, rtol=1e-5, atol=1e-6)
    heads = OPS.head_rms(x[:, None, :].expand(3, 2, 5), Norm(weight, 0.01))
    torch.testing.assert_close(heads[:, 1].double(), want, rtol=1e-5, atol=1e-6)


def test_rms_of_half_precision_is_computed_in_float32():
    x = torch.full((1, 4), 300.0, dtype=torch.float16)  # its square overflows f16
    torch.testing.assert_close(OPS.rms(x, Norm(torch.ones(4), 0.0)), torch.ones(1, 4))


def test_l2norm():
    x = numbers(2, 3, 4)
    want = x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(OPS.l2norm(x), want)


@pytest.mark.parametrize(
    ("kind", "formula"),
    [
        ("silu", lambda x: x / (1 + math.exp(-x))),
        ("gelu", lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2)))),
        ("gelu_tanh", lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
        ("relu", lambda x: max(x, 0.0)),
        ("sigmoid", lambda x: 1 / (1 + math.exp(-x))),
        ("softplus", lambda x: math.log1p(math.exp(x))),
    ],
)
def test_activations(kind, formula):
    x = torch.linspace(-4, 4, 33)
    want = torch.tensor([formula(value) for value in x.tolist()])
    torch.testing.assert_close(OPS.act(x, kind), want, rtol=1e-5, atol=1e-6)


def test_an_unknown_activation_lists_the_known_ones():
    with pytest.raises(PluginError, match=r"'swish' is unknown. Known: silu, gelu"):
        OPS.act(torch.zeros(1), "swish")


def test_act_mul_clamps_the_gate_above_and_up_on_both_sides_before_the_activation():
    gate, up = torch.tensor([-20.0, 20.0]), torch.tensor([-20.0, 20.0])
    want = [(-20 / (1 + math.exp(20))) * -3, (3 / (1 + math.exp(-3))) * 3]
    torch.testing.assert_close(OPS.act_mul(gate, up, "silu", Clamp(3.0)), torch.tensor(want))
    torch.testing.assert_close(OPS.act_mul(gate, up), torch.nn.functional.silu(gate) * up)


def test_act_mul_clamps_after_the_activation_where_the_clamp_says_so():
    gate, up = torch.tensor([-20.0, 2.0, 20.0]), torch.tensor([-20.0, 1.0, 20.0])
    silu = [x / (1 + math.exp(-x)) for x in gate.tolist()]
    want = [silu[0] * -3, silu[1] * 1, 3 * 3]
    torch.testing.assert_close(OPS.act_mul(gate, up, "silu", Clamp(3.0, "after")), torch.tensor(want))


def test_softplus_is_linear_for_large_numbers():
    assert OPS.act(torch.tensor([1e4]), "softplus").tolist() == [1e4]


def test_topk_takes_the_lowest_place_on_ties():
    x = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0], [1.0] * 5])
    assert OPS.topk(x, 3).tolist() == [[1, 3, 2], [0, 1, 2]]
    assert OPS.topk(x, 3).dtype == torch.int32


def test_small_ones():
    x, y = numbers(4, 3), numbers(4, 3, seed=2)
    assert OPS.add(x, y).equal(x + y)
    assert OPS.mul(x, y).equal(x * y)
    assert OPS.scale(x, 3).equal(x * 3)
    assert OPS.mean(x, 0).equal(x.mean(0))
    assert OPS.gather(x, torch.tensor([2, 0], dtype=torch.int32)).equal(x[[2, 0]])
    assert OPS.cat((x, y)).equal(torch.tensor([a + b for a, b in zip(x.tolist(), y.tolist(), strict=True)]))
    assert OPS.cat([x, y], 0).tolist() == x.tolist() + y.tolist()
    assert OPS.expand(x, 1, 5).equal(torch.stack([x] * 5, 1))
    assert OPS.expand(x, -1, 5).equal(torch.stack([x] * 5, -1))
    torch.testing.assert_close(OPS.softcap(x, 2.0), 2 * torch.tanh(x / 2))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 99),
    half=st.integers(1, 4),
    rest=st.integers(0, 3),
    pairs=st.sampled_from(["halves", "adjacent"]),
    inverse=st.booleans(),
    magnitude=st.sampled_from([1.0, 1.3]),
)
def test_rope_turns_pairs_as_complex_numbers(seed, half, rest, pairs, inverse, magnitude):
    x = numbers(3, 2, 2 * half + rest, seed=seed)
    frequency = torch.logspace(0, -2, half)
    position = torch.tensor([[0, 5, 4097]], dtype=torch.int32)
    got = OPS.rope(x, position, RopeSpec(frequency, pairs, magnitude), inverse=inverse)
    for token, place in enumerate(position[0].tolist()):
        for j, f in enumerate(frequency.tolist()):
            a, b = (j, j + half) if pairs == "halves" else (2 * j, 2 * j + 1)
            angle = float(np.float32(place) * np.float32(f))  # angles are f32 by contract
            turn = magnitude * np.exp(1j * (-angle if inverse else angle))
            z = (x[token, :, a].double().numpy() + 1j * x[token, :, b].double().numpy()) * turn
            np.testing.assert_allclose(got[token, :, a].numpy(), z.real, atol=1e-5)
            np.testing.assert_allclose(got[token, :, b].numpy(), z.imag, atol=1e-5)
    assert got[..., 2 * half :].equal(x[..., 2 * half :])


@pytest.mark.parametrize("pairs", ["halves", "adjacent"])
@pytest.mark.parametrize("inverse", [False, True])
def test_rope_of_the_last_features_is_rope_of_those_alone(pairs, inverse):
    x, position = numbers(3, 2, 11), torch.tensor([[0, 5, 4097]], dtype=torch.int32)
    frequency = torch.logspace(0, -2, 3)
    got = OPS.rope(x, position, RopeSpec(frequency, pairs, 1.3, part="last"), inverse=inverse)
    assert got[..., :5].equal(x[..., :5])
    assert got[..., 5:].equal(
        OPS.rope(x[..., 5:], position, RopeSpec(frequency, pairs, 1.3), inverse=inverse)
    )
    whole = OPS.rope(x[..., 5:], position, RopeSpec(frequency, pairs, 1.3, part="last"), inverse=inverse)
    assert whole.equal(got[..., 5:])


def test_rope_of_equal_positions_on_all_axes_is_plain_rope():
    frequency = torch.logspace(0, -2, 8)
    x = numbers(4, 2, 16)
    place = torch.tensor([3, 7, 9, 50], dtype=torch.int32)
    plain = OPS.rope(x, place[None], RopeSpec(frequency))
    for interleaved in (False, True):
        spec = RopeSpec(frequency, sections=(3, 3, 2, 0), interleaved_sections=interleaved)
        assert OPS.rope(x, place.expand(3, 4), spec).equal(plain)


def test_rope_sections_give_each_frequency_its_axis():
    assert section_axes((2, 1, 1), False).tolist() == [0, 0, 1, 2]
    # Qwen3.5, sections 11, 11, 10: height where j % 3 == 1 and j < 33, width where j % 3 == 2 and j < 30.
    want = [1 if j % 3 == 1 and j < 33 else 2 if j % 3 == 2 and j < 30 else 0 for j in range(32)]
    assert section_axes((11, 11, 10, 0), True).tolist() == want
    # What the short axes leave over goes to the first.
    assert section_axes((4, 2, 2), True).tolist() == [0, 1, 2, 0, 1, 2, 0, 0]


def test_rope_reads_the_position_of_its_axis():
    frequency = torch.tensor([1.0, 0.5, 0.25])
    x = numbers(1, 1, 6)
    position = torch.tensor([[2], [3], [5]], dtype=torch.int32)
    got = OPS.rope(x, position, RopeSpec(frequency, sections=(1, 1, 1)))
    for j, place in enumerate((2, 3, 5)):
        one = OPS.rope(x, torch.tensor([[place]]), RopeSpec(frequency))
        assert got[..., [j, j + 3]].equal(one[..., [j, j + 3]])
