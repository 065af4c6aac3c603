"""Layers over references, frozen, with errors that name what is there."""

from __future__ import annotations

import pytest
import torch

from luce_core.contracts import Linear, LinearGroup, Norm, Ops
from luce_core.errors import EngineError, PluginError
from luce_core.ops import KNOWN_OPS, build_ops
from luce_core.ops.reference import REFERENCE

X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
W = Linear("w", 2, 2, "F32", torch.tensor([[1.0, 0.0], [1.0, 1.0]]))


def test_a_later_layer_wins():
    ops = build_ops({"add": lambda ops, x, y: "first"}, {"add": lambda ops, x, y: "second"})
    assert ops.add(1, 2) == "second"


def test_a_coarse_reference_uses_an_overridden_fine_op():
    doubled = build_ops({"linear": lambda ops, x, w: 2 * REFERENCE["linear"](ops, x, w)})
    plain = build_ops()
    norm = Norm(torch.ones(2), 0.0)
    group = LinearGroup((W, W))
    for member in doubled.norm_linear(X, norm, group):
        torch.testing.assert_close(member, 2 * plain.norm_linear(X, norm, group)[0])
    torch.testing.assert_close(doubled.linear_out(X, W), 2 * plain.linear_out(X, W))
    torch.testing.assert_close(doubled.head(X, None, W), 2 * plain.head(X, None, W))


def test_an_override_can_call_the_rest_of_the_namespace():
    ops = build_ops({"add": lambda ops, x, y: ops.mul(x, y)})
    assert ops.add(X, X).equal(X * X)


def test_a_misspelt_op_is_refused_with_the_closest_name():
    with pytest.raises(PluginError, match=r"'gated_mpl'.*Did you mean 'gated_mlp'\?.*Known ops: .*attention"):
        build_ops({"gated_mpl": lambda ops: None})


def test_an_op_private_to_a_layer_carries_a_dot():
    ops = build_ops({"cpu.layer": lambda ops, x: x + 1})
    assert getattr(ops, "cpu.layer")(1) == 2


def test_an_op_without_implementation_says_so_when_called():
    with pytest.raises(EngineError, match=r"'merge_trees' has no implementation here.*attention"):
        build_ops().merge_trees(X)
    with pytest.raises(EngineError, match=r"'linaer' does not exist\. Did you mean 'linear'"):
        build_ops().linaer(X)


def test_an_op_without_reference_can_come_from_a_layer():
    ops = build_ops({"merge_trees": lambda ops, *args: "merged"})
    assert "merge_trees" in ops
    assert ops.merge_trees() == "merged"


def test_the_namespace_is_frozen():
    with pytest.raises(AttributeError, match="frozen"):
        build_ops().add = None


def test_every_reference_is_a_known_op_and_every_contract_op_is_known():
    assert set(REFERENCE) <= KNOWN_OPS
    declared = {name for name in vars(Ops) if not name.startswith("_")}
    assert declared <= KNOWN_OPS


def test_another_reference_can_be_given():
    ops = build_ops(reference={"add": lambda ops, x, y: 7})
    assert dir(ops) == ["add"]
    assert ops.add(1, 1) == 7
