"""The registry: lookups, order, conflicts, lazy factories, and what planning must not import."""

import json
import subprocess
import sys
import types

import pytest

from luce_core.contracts import API, DeviceInfo, Equivalence, OpImpl, OpLayer, PartSpec, PluginInfo, Profile
from luce_core.errors import ModelFormatError, PluginError
from luce_core.hookspecs import hookimpl
from luce_core.plugins import from_modules, order_plugins
from luce_core.registry import guarded, resolve
from luce_core.testing.fake_plugins import make_plugin


def part(kind, name, factory="m:make"):
    return PartSpec(kind, name, factory, Equivalence.BITS)


def device(id, rank=0):
    return DeviceInfo(id, id, 1, 1.0, rank=rank)


def info(name, after=()):
    return PluginInfo(name, API, after=after)


# --- from_modules


def test_every_kind_is_found_by_kind_and_name_with_its_plugin():
    plugin = make_plugin(
        "glim",
        luce_register_ops=[OpLayer("glim-fast", (OpImpl("rms", "m:rms"),), Equivalence.ROUNDING)],
        luce_register_drafters=[part("drafter", "guess")],
        luce_register_schedulers=[part("scheduler", "rude")],
        luce_register_parts=[part("executor", "threads"), part("chat", "polite")],
        luce_register_catalog=[Profile("laptop", {}, "small")],
    )
    registry = from_modules([plugin])
    for supplied in (
        registry.op_layer("glim-fast"),
        registry.part("drafter", "guess"),
        registry.part("scheduler", "rude"),
        registry.part("executor", "threads"),
        registry.part("chat", "polite"),
        registry.profile("laptop"),
    ):
        assert supplied.plugin == "glim"
    assert registry.part("scheduler", "fair").plugin == "core"
    assert [item.value.name for item in registry.parts("scheduler")] == ["fair", "rude"]


def test_a_class_of_static_hooks_is_a_plugin_too():
    class Hooks:
        @staticmethod
        @hookimpl
        def luce_plugin_info():
            return info("glim")

        @staticmethod
        @hookimpl
        def luce_register_schedulers():
            return [part("scheduler", "rude")]

    assert from_modules([Hooks]).part("scheduler", "rude").plugin == "glim"


def test_a_hook_may_be_implemented_under_another_name():
    module = make_plugin("glim")

    @hookimpl(specname="luce_register_schedulers")
    def my_schedulers():
        return [part("scheduler", "rude")]

    module.my_schedulers = my_schedulers
    assert from_modules([module]).part("scheduler", "rude").plugin == "glim"


def test_in_tests_a_bad_module_raises_at_once():
    with pytest.raises(PluginError, match="'glim' was asked for and is broken: luce_register_parts"):
        from_modules([make_plugin("glim", luce_register_parts=3)])
    with pytest.raises(PluginError, match="duplicate"):
        from_modules([make_plugin("glim"), make_plugin("glim")])
    with pytest.raises(PluginError, match="does not implement luce_plugin_info"):
        from_modules([types.ModuleType("empty")])


@pytest.mark.parametrize(
    ("hook", "kind"),
    [
        ("luce_register_drafters", "scheduler"),
        ("luce_register_schedulers", "drafter"),
        ("luce_register_parts", "drafter"),
        ("luce_register_parts", "scheduler"),
    ],
)
def test_a_part_must_come_through_the_hook_of_its_kind(hook, kind):
    with pytest.raises(PluginError, match=f"{hook} returned the {kind} 'x'"):
        from_modules([make_plugin("glim", **{hook: [part(kind, "x")]})])


@pytest.mark.parametrize("factory", ["m", "m:", ":make", "m:make()", "m make:x", ""])
def test_a_factory_names_a_module_and_a_callable(factory):
    with pytest.raises(PluginError, match="wanted 'module:callable'"):
        from_modules([make_plugin("glim", luce_register_parts=[part("executor", "x", factory)])])


# --- order


def test_plugins_come_after_those_they_name():
    infos = {
        "core": info("core"),
        "a": info("a", ("c",)),
        "b": info("b"),
        "c": info("c", ("d", "not-installed")),
        "d": info("d"),
    }
    order, problems = order_plugins(infos)
    assert problems == []
    assert order == ["core", "b", "d", "c", "a"]


def test_a_circle_is_reported_and_everyone_is_still_there():
    infos = {
        "core": info("core"),
        "a": info("a", ("b",)),
        "b": info("b", ("c",)),
        "c": info("c", ("a",)),
        "d": info("d", ("a",)),
    }
    order, problems = order_plugins(infos)
    assert sorted(order) == ["a", "b", "c", "core", "d"]
    assert order[0] == "core"
    assert order.index("d") > order.index("a")
    assert len(problems) == 1
    assert problems[0].message.endswith("in a circle: a after b after c after a.")
    assert problems[0].fatal


def test_two_circles_are_two_problems():
    infos = {"core": info("core")} | {
        name: info(name, (other,)) for name, other in [("a", "b"), ("b", "a"), ("y", "z"), ("z", "y")]
    }
    assert len(order_plugins(infos)[1]) == 2


def test_coming_after_oneself_is_a_circle():
    order, problems = order_plugins({"core": info("core"), "a": info("a", ("a",))})
    assert order == ["core", "a"]
    assert len(problems) == 1


def test_declared_conflicts_are_problems_only_when_both_are_there():
    first = make_plugin("first", conflicts={"second": "both own the cache", "third": "whatever"})
    assert from_modules([first]).problems == ()
    (problem,) = from_modules([first, make_plugin("second")]).problems
    assert problem.message == "Plugin 'first' and plugin 'second' cannot work together: both own the cache"
    assert "--plugin-block second or --plugin-block first" in problem.fix


# --- devices


def test_devices_are_looked_for_on_demand_best_first():
    calls = []

    def luce_register_devices():
        calls.append(1)
        return [device("cpu"), device("gpu:1", 5), device("gpu:0", 5)]

    registry = from_modules([make_plugin("glim", luce_register_devices=luce_register_devices)])
    assert calls == []
    found, problems = registry.find_devices()
    assert [item.value.id for item in found] == ["gpu:0", "gpu:1", "cpu"]
    assert problems == []


def test_a_failing_hardware_plugin_costs_its_own_devices_only():
    def luce_register_devices():
        raise OSError("driver is gone")

    bad = make_plugin("bad", luce_register_devices=luce_register_devices)
    registry = from_modules([bad, make_plugin("good", luce_register_devices=[device("cpu")])])
    found, problems = registry.find_devices()
    assert [(item.plugin, item.value.id) for item in found] == [("good", "cpu")]
    assert "luce_register_devices raised OSError: driver is gone" in problems[0].message
    assert not problems[0].fatal


def test_one_device_of_two_plugins_names_both():
    registry = from_modules([make_plugin(name, luce_register_devices=[device("cpu")]) for name in ("a", "b")])
    _, problems = registry.find_devices()
    assert problems[0].message == "Device 'cpu' is registered by plugin 'a' and by plugin 'b'."
    assert problems[0].fatal


# --- factories


@pytest.fixture
def module(monkeypatch):
    made = types.ModuleType("made_up_factories")
    made.make = lambda: "made"
    made.number = 7
    made.nested = types.SimpleNamespace(make=lambda: "nested")
    monkeypatch.setitem(sys.modules, "made_up_factories", made)
    return made


def test_a_factory_is_imported_when_resolved(module):
    assert resolve("made_up_factories:make", "x")() == "made"
    assert resolve("made_up_factories:nested.make", "x")() == "nested"


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("made_up_factories:mak", "has no 'mak'. Did you mean 'make'?"),
        ("made_up_factories:number", "is 7, not a callable"),
        ("no_such_module_anywhere:make", "raised ModuleNotFoundError"),
        ("made_up_factories", "wanted 'module:callable'"),
    ],
)
def test_a_factory_that_is_not_there_names_its_subject(module, factory, message):
    with pytest.raises(PluginError) as caught:
        resolve(factory, "Drafter 'guess'")
    assert str(caught.value).startswith("Drafter 'guess'")
    assert message in str(caught.value)


def test_the_cause_of_a_failed_import_is_kept():
    with pytest.raises(PluginError) as caught:
        resolve("no_such_module_anywhere:make", "x")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_plugin_code_that_fails_is_a_plugin_error_but_a_bad_file_stays_one():
    def fail(error):
        raise error

    with pytest.raises(PluginError, match="Drafting raised ValueError: no"):
        guarded("Drafting", lambda: fail(ValueError("no")))
    with pytest.raises(PluginError, match="raised SystemExit"):
        guarded("Drafting", lambda: fail(SystemExit(1)))
    with pytest.raises(ModelFormatError, match="bad key"):
        guarded("Drafting", lambda: fail(ModelFormatError("bad key")))
    with pytest.raises(KeyboardInterrupt):
        guarded("Drafting", lambda: fail(KeyboardInterrupt()))


# --- what planning must not import


HEAVY = ("torch", "triton", "transformers")
PROGRAM = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps([name for name in sys.argv[2:] if name in sys.modules]))
"""


def heavy_imports(module, heavy=HEAVY):
    """Those of `heavy` that importing `module` imports, found out in a fresh interpreter."""
    command = [sys.executable, "-c", PROGRAM, module, *heavy]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "name", ["hookspecs", "builtin", "plugins", "options", "plan", "plan_render", "pipeline", "contracts"]
)
def test_everything_up_to_the_plan_imports_no_torch(name):
    assert heavy_imports(f"luce_core.{name}") == []


def test_heavy_imports_are_seen():
    assert heavy_imports("json.decoder", ["json", "torch"]) == ["json"]
    with pytest.raises(AssertionError, match="no_such_module_anywhere"):
        heavy_imports("no_such_module_anywhere")


def test_unknown_record_is_a_key_error():
    with pytest.raises(KeyError):
        from_modules([]).record("glim")
