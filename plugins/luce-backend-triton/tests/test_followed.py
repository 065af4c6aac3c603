"""Which products are told what norm reads what they give: programs, as the layer rewrites them."""

from __future__ import annotations

import pytest
import torch
from luce_backend_triton import gated, hooks, normed, ops
from luce_backend_triton.matrix import Dense

from luce_core import op_layers
from luce_core.contracts import Linear, LinearGroup, Norm, OpCall, Program, Ref
from luce_core.ops import Recorder, build_ops, replay, rewrite
from luce_core.registry import resolve

from .test_matrix import linear
from .test_simt import close


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(3)


def layer_without(*off):
    """The ops of layer `triton` without some: as a namespace, and all of them by name."""
    declared = next(one for one in hooks.luce_register_ops() if one.name == "triton")
    found = {impl.op: resolve(impl.fn, impl.op) for impl in op_layers.without(declared, off).ops}
    return build_ops({name: fn for name, fn in found.items() if name != "*"}), found


@pytest.fixture
def net(device, blocks, monkeypatch):
    """Weights of a small network as on a card, and `recorded(trunk)`, its program before and behind the
    rewriting, with some ops off.
    """
    monkeypatch.setattr(gated, "useful", lambda one: True)
    norms = [Norm(torch.rand(256, device=device) + 0.5, 1e-6) for _ in range(3)]
    gate, up, down, out, inner = (linear(device, blocks, "Q4_K", 256, seed)[0] for seed in range(5))

    class Net:
        own, other, post = norms

        def __init__(self):
            self.pair = LinearGroup((gate, up), ops.CUDA.pack_group(None, (gate, up)))
            self.group = LinearGroup((inner,), ops.CUDA.pack_group(None, (inner,)))
            self.down, self.out = down, out

        def recorded(self, trunk, *off):
            namespace, layer = layer_without(*off)
            recorder = Recorder(namespace)
            before = recorder.record(lambda x: trunk(recorder, x), ("x",))
            return before, rewrite(before, (layer["*"],), namespace)

        def layers(self, ops, x):
            """A product, a gated MLP, a product, a group."""
            x = ops.linear_out(x, self.out, residual=x)
            x = ops.gated_mlp(x, self.own, self.pair, self.down, residual=x)
            x = ops.linear_out(x, self.out, residual=x)
            (y,) = ops.norm_linear(x, self.other, self.group)
            return y

    return Net()


TOLD = ["triton.linear_out", "gated_mlp", "triton.linear_out", "norm_linear"]
"""Of `layers`: the gated MLP's y is read by no norm."""


def names(program):
    return [call.op for call in program.calls]


def test_what_gives_y_is_told_which_norm_reads_it(net):
    before, after = net.recorded(net.layers)
    assert names(after) == TOLD
    first, mlp, second, group = after.calls
    assert first.kwargs["following"].norm is net.own
    assert second.kwargs["following"].norm is net.other
    most = net.own.weight.cpu().amax()
    exact = torch.stack((most, most * matrix_of(net.out).abs().sum(1).amax() * 32768))
    torch.testing.assert_close(first.kwargs["following"].bound.cpu(), exact, rtol=1e-5, atol=0)
    assert (mlp, group) == (before.calls[1], before.calls[3])
    for told, call in ((first, before.calls[0]), (second, before.calls[2])):
        kwargs = dict(told.kwargs)
        del kwargs["following"]
        assert (told.args, kwargs, told.outs) == (call.args, call.kwargs, call.outs)


def matrix_of(w):
    rows = torch.arange(w.out_features, dtype=torch.int32, device=w.packed.records.device)
    return ops.CUDA.table_rows(None, w, rows).cpu()


@pytest.mark.parametrize(
    ("off", "told"),
    [
        (["linear_out"], ["linear_out", "gated_mlp", "linear_out", "norm_linear"]),
        (["gated_mlp"], TOLD),
        (["pack_linear"], ["linear_out", "gated_mlp", "linear_out", "norm_linear"]),
    ],
)
def test_ops_that_are_off_are_left_alone(net, off, told):
    assert names(net.recorded(net.layers, *off)[1]) == told


def test_a_gated_mlp_is_told_too(net):
    def trunk(ops, x):
        y = ops.gated_mlp(x, net.own, net.pair, net.down, residual=x)
        return ops.norm_linear(y, net.other, net.group)

    assert names(net.recorded(trunk)[1]) == ["triton.gated_mlp", "norm_linear"]
    assert names(net.recorded(trunk, "gated_mlp")[1]) == ["gated_mlp", "norm_linear"]
    assert names(net.recorded(trunk, "linear_out")[1]) == ["triton.gated_mlp", "norm_linear"]


def test_readers_have_to_agree(net):
    """Of two norms one would have to be made again; those without a norm read y itself."""

    def two(ops, x, *norms):
        y = ops.linear_out(x, net.out, residual=x)
        made = [ops.norm_linear(y, norm, net.group)[0] for norm in norms]
        return (*made, y)

    def first(*norms):
        return net.recorded(lambda ops, x: two(ops, x, *norms))[1].calls[0].op

    assert first(net.own, net.own) == "triton.linear_out"
    assert first(net.own, None) == "triton.linear_out"
    assert first(net.own, net.other) == "linear_out"
    assert first(net.own, Norm(net.own.weight, net.own.eps)) == "linear_out"
    assert first(None) == first() == "linear_out"


def test_parts_of_y_are_not_y(net):
    def trunk(ops, x):
        y = ops.linear_out(x, net.out, residual=x)
        return ops.norm_linear(y[1:], net.own, net.group)

    assert names(net.recorded(trunk)[1]) == ["linear_out", "getitem", "norm_linear"]


@pytest.mark.parametrize("what", ["floats", "an uneven norm", "uneven rows", "another device"])
def test_products_that_leave_nothing_are_left_alone(net, device, monkeypatch, what):
    if what == "floats":
        net.out = Linear("w", 256, 256, "F32", Dense(torch.zeros(256, 256, device=device)))
    elif what == "an uneven norm":
        monkeypatch.setattr(normed, "UNEVEN", 1.0)
    elif what == "uneven rows":
        monkeypatch.setattr(normed, "UNEVEN_ROWS", 1.0)
    else:
        monkeypatch.setattr(gated, "useful", lambda one: False)
    before, after = net.recorded(net.layers)
    assert after == before


def test_calls_by_others_are_left_alone(net):
    """Whoever gives y, but for a product."""
    calls = (
        OpCall("rms", (Ref(0), net.post), {}, (1,)),
        OpCall("norm_linear", (Ref(1), net.own, net.group), {}, (2,)),
    )
    program = Program(calls, ("x",), (2,))
    assert normed.rewrite(program, layer_without()[0]) is program


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_rewritten_program_gives_the_same_bits_where_nothing_is_left(net, device, rows):
    """With a post norm and a scale, which are passed on."""

    def trunk(ops, x):
        x = ops.linear_out(x, net.out, residual=x, post=net.post, scale=0.5)
        x = ops.gated_mlp(x, net.own, net.pair, net.down, residual=x, post=net.post, act="gelu", scale=2.0)
        x = ops.linear_out(x, net.out, residual=x)
        x = ops.gated_mlp(x, net.other, net.pair, net.down, residual=x)
        return ops.norm_linear(x, net.own, net.group)

    before, after = net.recorded(trunk)
    given = ["triton.linear_out", "gated_mlp", "triton.linear_out", "triton.gated_mlp", "norm_linear"]
    assert names(after) == given
    assert after.calls[0].kwargs["post"] is net.post
    assert after.calls[0].kwargs["scale"] == 0.5
    namespace, _ = layer_without()
    x = torch.randn(rows, 256, device=device)
    (want,), (got,) = (replay(program, namespace, {"x": x}) for program in (before, after))
    if str(device) == "cpu":
        assert torch.equal(got, want)
    else:
        close(got, want, 2e-3)


def test_calls_may_name_their_arguments(net):
    """All, or those behind the first."""

    def trunk(ops, x):
        x = ops.linear_out(x, w=net.out, residual=x)
        x = ops.gated_mlp(x=x, norm=net.own, gate_up=net.pair, down=net.down, residual=x)
        (y,) = ops.norm_linear(x, norm=net.other, w=net.group)
        return y

    assert names(net.recorded(trunk)[1]) == ["triton.linear_out", "triton.gated_mlp", "norm_linear"]


def test_ops_of_layers_above_are_left_alone(net):
    """Whoever lays their own over this layer's wants theirs."""
    _, layer = layer_without()
    above = {**layer, "linear_out": lambda ops, y, w, **more: y}
    namespace = build_ops({name: fn for name, fn in above.items() if name != "*"})
    recorder = Recorder(namespace)
    program = recorder.record(lambda x: net.layers(recorder, x), ("x",))
    assert names(normed.rewrite(program, namespace)) == names(program)


def test_networks_with_experts_are_left_alone(net):
    def trunk(ops, x):
        y = net.layers(ops, x)
        return ops.experts(y, net.own, (y, y), None, residual=y)

    before, after = net.recorded(trunk)
    assert after is before
