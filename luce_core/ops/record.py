"""Recording a network as a program, replaying it, rewriting it.

While recording, a network runs on opaque values: ops note themselves down, views ([], split, view, reshape)
too, and anything else a network tries raises. So a recorded program is complete, and it holds nothing of a
batch's size: T, S and R stay free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from luce_core.contracts import OpCall, Program, Ref
from luce_core.errors import PluginError
from luce_core.ops.namespace import OpsNamespace, no_implementation

VIEWS: Mapping[str, Callable[..., Any]] = {
    "getitem": lambda x, key: x[key],
    "split": lambda x, sizes, dim=0: x.split(sizes, dim),
    "view": lambda x, *shape: x.view(*shape),
    "reshape": lambda x, *shape: x.reshape(*shape),
}

RESULTS: Mapping[str, Callable[..., int]] = {
    "norm_linear": lambda x, norm, w: len(w.members),
    "split": lambda x, sizes, dim=0: len(sizes),
    "route": lambda *args, **kwargs: 2,
    "streams_in": lambda *args, **kwargs: 2,
    "streams_gates": lambda *args, **kwargs: 2,
    "tap": lambda *args, **kwargs: 0,
    "compress": lambda *args, **kwargs: 0,
    "append": lambda *args, **kwargs: 0,
    "write_log": lambda *args, **kwargs: 0,
}
"""How many results an op gives as a tuple (none: nothing). Every other op gives one, not in a tuple."""


class Value:
    """A result that does not exist yet. Supports views only."""

    __slots__ = ("_number", "_recorder")

    def __init__(self, recorder: Recorder, number: int) -> None:
        self._recorder = recorder
        self._number = number

    def __getitem__(self, key: Any) -> Value:
        return self._recorder.call("getitem", (self, key), {})  # type: ignore[no-any-return]

    def split(self, sizes: Sequence[int], dim: int = 0) -> tuple[Value, ...]:
        if isinstance(sizes, int):
            refuse("split with one size: give the list of sizes, so that the number of parts is known")
        return self._recorder.call("split", (self, tuple(sizes), dim), {})  # type: ignore[no-any-return]

    def view(self, *shape: int) -> Value:
        return self._recorder.call("view", (self, *shape), {})  # type: ignore[no-any-return]

    def reshape(self, *shape: int) -> Value:
        return self._recorder.call("reshape", (self, *shape), {})  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> NoReturn:
        refuse(f"attribute {name!r} of a value")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        refuse(f"torch function {getattr(function, '__name__', str(function))!r}")


def refuse(operation: str) -> NoReturn:
    """Raise for something other than an op or a view."""
    raise PluginError(
        f"A network used {operation}. Architecture code may only use ops and views ([], split, view, "
        "reshape): write it with ops, or move work on weights to `build`."
    )


def _forbid(name: str) -> None:
    def method(self: Value, *args: Any) -> NoReturn:
        refuse(f"operator {name!r}")

    setattr(Value, name, method)


for _name in (
    *("__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__", "__mul__", "__rmul__"),
    *("__imul__", "__matmul__", "__rmatmul__", "__truediv__", "__rtruediv__", "__floordiv__", "__mod__"),
    *("__pow__", "__rpow__", "__neg__", "__abs__", "__invert__", "__and__", "__or__", "__xor__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__bool__", "__len__", "__iter__"),
    *("__contains__", "__int__", "__float__", "__index__", "__setitem__", "__delitem__", "__hash__"),
):
    _forbid(_name)


class Recorder:
    """Stands in for a network's ops. `build(spec, weights, recorder)`, then `recorder.record(network.trunk)`.

    Outside `record` its ops are the real ones, so that `build` may work on weights.
    """

    def __init__(self, ops: OpsNamespace) -> None:
        self._ops = ops
        self._calls: list[OpCall] | None = None
        self._values = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self._ops:
            raise PluginError(f"A network uses an op that is not there. {no_implementation(name, self._ops)}")
        if self._calls is None:
            return getattr(self._ops, name)  # type: ignore[no-any-return]
        return lambda *args, **kwargs: self.call(name, args, kwargs)

    def record(self, method: Callable[..., Any], inputs: Sequence[str] = ("batch",)) -> Program:
        """Run `method` on one opaque value per input; its result, or tuple of results, is the output."""
        self._calls, self._values = [], len(inputs)
        try:
            result = method(*(Value(self, number) for number in range(len(inputs))))
            calls = tuple(self._calls)
        finally:
            self._calls = None
        results = result if isinstance(result, tuple) else (result,)
        for value in results:
            if not isinstance(value, Value):
                refuse(f"a result that no op made ({type(value).__name__})")
        return Program(calls, tuple(inputs), tuple(value._number for value in results))

    def call(self, op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Note the call down; the values it gives."""
        if self._calls is None:
            refuse(f"{op!r} on a value kept from an earlier recording")
        count = RESULTS[op](*args, **kwargs) if op in RESULTS else None
        outs = tuple(range(self._values, self._values + (1 if count is None else count)))
        self._values += len(outs)
        named = {name: _refs(value) for name, value in kwargs.items()}
        self._calls.append(OpCall(op, tuple(_refs(value) for value in args), named, outs))
        values = tuple(Value(self, number) for number in outs)
        if count is None:
            return values[0]
        return values if count else None


def _refs(value: Any) -> Any:
    """Values become numbers, inside tuples and lists too."""
    if isinstance(value, Value):
        return Ref(value._number)
    if isinstance(value, slice) and any(isinstance(x, Value) for x in (value.start, value.stop, value.step)):
        refuse("a slice whose bounds are values")
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_refs(item) for item in value)
    return value


# --- replay


def replay(program: Program, ops: OpsNamespace, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Run a program call by call; the plain meaning of a program. Bit-equal to the network's direct call."""
    values: dict[int, Any] = {number: inputs[name] for number, name in enumerate(program.inputs)}
    for call in program.calls:
        args = (_values(arg, values) for arg in call.args)
        result = _callable(call.op, ops)(*args, **{k: _values(v, values) for k, v in call.kwargs.items()})
        if _gives_tuple(call):
            values.update(zip(call.outs, result, strict=True))
        elif call.outs:
            values[call.outs[0]] = result
    return tuple(values[number] for number in program.outputs)


def _gives_tuple(call: OpCall) -> bool:
    return len(call.outs) > 1 or (len(call.outs) == 1 and call.op in RESULTS)


def _values(arg: Any, values: Mapping[int, Any]) -> Any:
    if isinstance(arg, Ref):
        return values[arg.value]
    if isinstance(arg, (tuple, list)) and not hasattr(arg, "_fields"):
        return type(arg)(_values(item, values) for item in arg)
    return arg


def _callable(op: str, ops: OpsNamespace) -> Callable[..., Any]:
    return VIEWS[op] if op in VIEWS else getattr(ops, op)


def compile_program(program: Program, ops: OpsNamespace) -> Callable[..., Any]:
    """The program as one Python function of its inputs, in order: no look-ups by name, dead values dropped.

    Returns the output, or a tuple where the program has several. `replay` says what it means.
    """
    constants: dict[str, Any] = {}

    def constant(value: Any, prefix: str) -> str:
        name = f"{prefix}{len(constants)}"
        constants[name] = value
        return name

    def text(arg: Any) -> str:
        if isinstance(arg, Ref):
            return f"v{arg.value}"
        if isinstance(arg, (tuple, list)) and not hasattr(arg, "_fields") and _has_ref(arg):
            items = "".join(f"{text(item)}, " for item in arg)
            return f"({items})" if isinstance(arg, tuple) else f"[{items}]"
        return constant(arg, "k")

    lines = []
    for call, dead in zip(program.calls, _last_uses(program), strict=True):
        args = ", ".join([*map(text, call.args), *(f"{k}={text(v)}" for k, v in call.kwargs.items())])
        left = ", ".join(f"v{out}" for out in call.outs) + "," * _gives_tuple(call)
        run = f"{constant(_callable(call.op, ops), 'f')}({args})"
        lines.append(f"{left} = {run}" if call.outs else run)
        lines += [f"del {', '.join(f'v{number}' for number in dead)}"] if dead else []
    result = ", ".join(f"v{number}" for number in program.outputs)
    inputs = ", ".join(f"v{number}" for number in range(len(program.inputs)))
    source = "\n    ".join([f"def run({inputs}):", *lines, f"return {result}"])
    exec(compile(source, "<program>", "exec"), constants)
    return constants["run"]  # type: ignore[no-any-return]


def _has_ref(arg: Any) -> bool:
    if isinstance(arg, (tuple, list)):
        return any(_has_ref(item) for item in arg)
    return isinstance(arg, Ref)


def used_values(call: OpCall) -> set[int]:
    """Numbers of the values a call reads."""

    def walk(arg: Any) -> set[int]:
        if isinstance(arg, Ref):
            return {arg.value}
        if isinstance(arg, (tuple, list)):
            return set().union(*map(walk, arg))
        return set()

    return walk((*call.args, *call.kwargs.values()))


def _last_uses(program: Program) -> list[list[int]]:
    """For every call, the values nothing reads after it (inputs and outputs stay)."""
    kept = {*range(len(program.inputs)), *program.outputs}
    dead: list[list[int]] = []
    for call in reversed(program.calls):
        last = (used_values(call) | set(call.outs)) - kept
        kept |= last
        dead.append(sorted(last))
    return dead[::-1]


# --- rewriting


def rewrite(
    program: Program, rewrites: Sequence[Callable[[Program, OpsNamespace], Program]], ops: OpsNamespace
) -> Program:
    """Apply the rewrites of all layers in order; each result is checked to be a whole program again."""
    for change in rewrites:
        before, program = program, change(program, ops)
        check_program(program, ops)
        if program.inputs != before.inputs or len(program.outputs) != len(before.outputs):
            raise PluginError(
                f"Rewrite {_name_of(change)!r} changed the program's signature: got inputs {program.inputs} "
                f"and {len(program.outputs)} outputs, wanted {before.inputs} and {len(before.outputs)}."
            )
    return program


def check_program(program: Program, ops: OpsNamespace) -> None:
    """Raise PluginError unless every op is there and every value is made once, before it is used."""
    made = set(range(len(program.inputs)))
    for place, call in enumerate(program.calls):
        where = f"Call {place} ({call.op!r}) of a program"
        if call.op not in VIEWS and call.op not in ops:
            raise PluginError(f"{where} cannot run. {no_implementation(call.op, ops)}")
        missing = used_values(call) - made
        if missing:
            raise PluginError(f"{where} reads values {sorted(missing)}, which no earlier call makes.")
        again = made.intersection(call.outs)
        if again:
            raise PluginError(f"{where} makes values {sorted(again)} a second time.")
        made.update(call.outs)
    missing = set(program.outputs) - made
    if missing:
        raise PluginError(f"A program's outputs {sorted(missing)} are made by no call of it.")


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))
