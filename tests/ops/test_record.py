"""Recording, replay, compilation, rewrites, on small odd networks; plugins test their real ones."""

from __future__ import annotations

import weakref

import attrs
import pytest
import torch

from luce_core.contracts import Linear, LinearGroup, OpCall, Program, Ref
from luce_core.errors import PluginError
from luce_core.model.batch import RowSet, make_batch
from luce_core.ops import Recorder, build_ops, check_program, compile_program, replay, rewrite, used_values
from luce_core.ops.namespace import ARCH_OPS, FINE_OPS, STATE_OPS
from luce_core.testing.op_cases import CASES, OpWorld

OPS = build_ops()
TABLE = Linear("t", 16, 6, "F32", torch.randn(16, 6, generator=torch.Generator().manual_seed(0)))
SQUARE = Linear("s", 6, 6, "F32", torch.randn(6, 6, generator=torch.Generator().manual_seed(1)))
BATCH = make_batch("held", [RowSet(0, 0, [3, 1, 4], {})])


def network(ops):
    """Every kind of call: one result, several, none, views, nested arguments, keywords."""

    def trunk(batch):
        x = ops.embed(batch, TABLE, scale=2.0)
        (y,) = ops.norm_linear(x, None, LinearGroup((SQUARE,)))
        a, b = y.split([2, 4], -1)
        c = ops.add(b[:, :2], a)
        d = ops.mul(c.view(-1, 2, 1), c.reshape(-1, 2, 1)).view(-1, 2)
        ops.tap(batch, 0, x)
        u, v = ops.norm_linear(x, None, w=LinearGroup((SQUARE, SQUARE)))
        return ops.add(ops.add(u, v)[..., 4:], d)

    return trunk


def recorded(method=network, inputs=("batch",)):
    recorder = Recorder(OPS)
    return recorder.record(method(recorder), inputs)


def test_replay_and_compiled_program_equal_the_direct_call_bit_for_bit():
    direct = network(OPS)(BATCH)
    program = recorded()
    (replayed,) = replay(program, OPS, {"batch": BATCH})
    compiled = compile_program(program, OPS)(BATCH)
    assert torch.equal(replayed, direct)
    assert torch.equal(compiled, direct)


def test_a_program_names_what_was_called():
    program = recorded()
    assert [call.op for call in program.calls] == [
        *("embed", "norm_linear", "split", "getitem", "add", "view", "reshape", "mul", "view", "tap"),
        *("norm_linear", "add", "getitem", "add"),
    ]
    assert program.inputs == ("batch",)
    assert program.calls[0].args == (Ref(0), TABLE)
    assert program.calls[0].kwargs == {"scale": 2.0}
    assert len(program.calls[2].outs) == 2


def test_a_recording_holds_for_any_number_of_rows():
    program = compile_program(recorded(), OPS)
    other = make_batch("held", [RowSet(0, 5, [7, 8, 9, 10], {}), RowSet(1, 0, [2], {})])
    assert torch.equal(program(other), network(OPS)(other))


def test_several_inputs_and_outputs():
    def method(ops):
        return lambda batch, final: (ops.add(final, final), ops.embed(batch, TABLE))

    program = recorded(method, ("batch", "final"))
    final = torch.ones(3, 6)
    for double, rows in (
        replay(program, OPS, {"batch": BATCH, "final": final}),
        compile_program(program, OPS)(BATCH, final),
    ):
        assert torch.equal(double, final * 2)
        assert torch.equal(rows, OPS.embed(BATCH, TABLE))


def test_values_inside_tuples_become_references():
    ops = build_ops({"experts": lambda ops, x, routed: routed[0] + routed[1] + x})
    recorder = Recorder(ops)

    def method(x):
        return recorder.experts(x, (recorder.scale(x, 2), recorder.scale(x, 3)))

    program = recorder.record(method, ("final",))
    x = torch.ones(1, 2)
    assert torch.equal(replay(program, ops, {"final": x})[0], x * 6)
    assert torch.equal(compile_program(program, ops)(x), x * 6)
    assert used_values(program.calls[2]) == {0, 1, 2}


FORBIDDEN = {
    "operator '__add__'": lambda x: x + 1,
    "operator '__radd__'": lambda x: 1 + x,
    "operator '__mul__'": lambda x: x * x,
    "operator '__matmul__'": lambda x: x @ x,
    "operator '__neg__'": lambda x: -x,
    "operator '__gt__'": lambda x: x > 0,
    "operator '__eq__'": lambda x: x == 0,
    "operator '__bool__'": lambda x: 1 if x else 0,
    "operator '__len__'": len,
    "operator '__iter__'": list,
    "operator '__setitem__'": lambda x: x.__setitem__(0, 1),
    "operator '__iadd__'": lambda x: x.__iadd__(1),
    "operator '__index__'": lambda x: [1, 2][x],
    "operator '__hash__'": lambda x: {x},
    "attribute 'shape'": lambda x: x.shape[0],
    "attribute 'device'": lambda x: x.device,
    "attribute 'float'": lambda x: x.float(),
    "attribute 'numpy'": lambda x: x.numpy(),
    "torch function 'relu'": torch.relu,
    "torch function 'cat'": lambda x: torch.cat([x, x]),
    "torch function 'add'": lambda x: torch.ones(2) + x,
    "split with one size": lambda x: x.split(2),
    "a slice whose bounds are values": lambda x: x[x:],
    "a result that no op made": lambda x: 7,
}


@pytest.mark.parametrize("operation", FORBIDDEN)
def test_anything_but_ops_and_views_is_refused_by_name(operation):
    with pytest.raises(PluginError, match="may only use ops and views") as raised:
        Recorder(OPS).record(FORBIDDEN[operation])
    assert operation in str(raised.value)


def test_an_op_that_is_not_there_is_refused_while_recording():
    recorder = Recorder(OPS)
    with pytest.raises(PluginError, match="'merge_trees' has no implementation"):
        recorder.record(lambda batch: recorder.merge_trees(batch, batch))


def test_a_value_kept_from_an_earlier_recording_is_refused():
    recorder = Recorder(OPS)
    kept = []
    recorder.record(lambda batch: kept.append(batch) or batch)
    with pytest.raises(PluginError, match="kept from an earlier recording"):
        kept[0][0]


def test_outside_a_recording_the_ops_are_real():
    assert torch.equal(Recorder(OPS).add(torch.ones(1), torch.ones(1)), torch.tensor([2.0]))


def test_a_failed_recording_leaves_the_recorder_usable():
    recorder = Recorder(OPS)
    with pytest.raises(PluginError):
        recorder.record(lambda batch: batch + 1)
    assert len(recorder.record(lambda batch: recorder.embed(batch, TABLE)).calls) == 1


def test_the_compiled_program_drops_values_nothing_reads_any_more():
    alive = []

    def spy(ops, x, *rest):
        alive.append([ref() is not None for ref in refs])
        made = x + 1
        refs.append(weakref.ref(made))
        return made

    refs: list = []
    ops = build_ops({"t.step": spy})
    calls = tuple(OpCall("t.step", (Ref(n),), {}, (n + 1,)) for n in range(3))
    run = compile_program(Program(calls, ("x",), (3,)), ops)
    run(torch.zeros(1))
    # While the third step runs, the first result is gone: only its input, the second, is alive.
    assert alive == [[], [True], [False, True]]


# --- every op


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_every_op_replays_bit_for_bit(case):
    direct = case.make(OpWorld(OPS)).run(OPS)
    for compiled in (False, True):
        run = case.make(OpWorld(OPS))
        recorder = Recorder(OPS)
        names = tuple(f"input {n}" for n in range(len(run.inputs)))
        program = recorder.record(lambda *values: run.call(recorder, *values), names)  # noqa: B023
        assert case.op in {call.op for call in program.calls}
        if compiled:
            results = compile_program(program, OPS)(*run.inputs)
            results = results if isinstance(results, tuple) else (results,)
        else:
            results = replay(program, OPS, dict(zip(names, run.inputs, strict=True)))
        for got, want in zip((*results, *run.state), direct, strict=True):
            assert torch.equal(got, want)


def test_every_op_an_architecture_or_layer_knows_has_a_case():
    known = ARCH_OPS | FINE_OPS | STATE_OPS
    assert known - {case.op for case in CASES} == set()


# --- rewrites


def fuse_adds(program, ops):
    """add(add(a, b), c) -> t.add3(a, b, c)"""
    made = {call.outs[0]: call for call in program.calls if call.op == "add"}
    calls = []
    for call in program.calls:
        inner = made.get(call.args[0].value) if call.op == "add" else None
        fused = inner and attrs.evolve(call, op="t.add3", args=(*inner.args, call.args[1]))
        calls.append(fused or call)
    return attrs.evolve(program, calls=tuple(calls))


def test_a_rewritten_program_runs_with_ops_private_to_its_layer():
    ops = build_ops({"t.add3": lambda ops, a, b, c: a + b + c})
    recorder = Recorder(ops)
    program = recorder.record(lambda x: recorder.add(recorder.add(x, x), x), ("final",))
    changed = rewrite(program, [fuse_adds], ops)
    assert changed.calls[-1].op == "t.add3"
    assert torch.equal(compile_program(changed, ops)(torch.ones(2)), torch.full((2,), 3.0))


def test_a_rewrite_that_breaks_the_program_is_named():
    program = recorded()
    broken = {
        "no earlier call makes": attrs.evolve(program, calls=program.calls[1:]),
        "a second time": attrs.evolve(program, calls=(*program.calls, program.calls[-1])),
        "made by no call": attrs.evolve(program, outputs=(999,)),
        "does not exist": attrs.evolve(program, calls=(*program.calls, OpCall("fused", (), {}, ()))),
    }
    for message, result in broken.items():
        with pytest.raises(PluginError, match=message):
            rewrite(program, [lambda program, ops, result=result: result], OPS)
    with pytest.raises(PluginError, match=r"changed the program's signature"):
        rewrite(program, [lambda program, ops: attrs.evolve(program, inputs=("x",))], OPS)
    check_program(program, OPS)
