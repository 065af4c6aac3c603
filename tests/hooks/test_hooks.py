"""What each hook does for a plugin that implements it. One test per hook; a meta-test sees to it."""

import logging

import pytest
from pydantic import BaseModel

from luce_core.contracts import (
    API,
    ArchSpec,
    CatalogEntry,
    CommandSpec,
    DeviceInfo,
    Done,
    Equivalence,
    OpImpl,
    OpLayer,
    PartSpec,
    PlanPatch,
    PluginInfo,
    Problem,
    Profile,
    QuantFormat,
    RequestRecord,
)
from luce_core.options import load_options, option_fields
from luce_core.pipeline import Observer, Observers
from luce_core.plan import block_formats
from luce_core.plan_fields import Fields
from luce_core.plugins import from_modules
from luce_core.testing.fake_plugins import make_plugin


class GlimOptions(BaseModel):
    width: int = 4


def part(kind):
    return PartSpec(kind, "mine", "m:make", Equivalence.BITS)


def registry_with(**hooks):
    return from_modules([make_plugin("glim", **hooks)])


def test_hook_luce_plugin_info():
    registry = from_modules([make_plugin("glim", options=GlimOptions, after=("core",))])
    info = registry.record("glim").info
    assert info == PluginInfo("glim", API, GlimOptions, ("core",))
    assert "--glim-width" in {item.flag for item in option_fields(registry)}


def test_hook_luce_register_devices():
    device = DeviceInfo("abacus:0", "beads", 1, 1.0)
    found, problems = registry_with(luce_register_devices=[device]).find_devices()
    assert ([(item.plugin, item.value) for item in found], problems) == ([("glim", device)], [])


def test_hook_luce_register_devices_is_told_the_plugins_options():
    def luce_register_devices(options):
        return [DeviceInfo("abacus:0", repr(options), 1, 1.0)]

    registry = registry_with(luce_register_devices=luce_register_devices, options=GlimOptions)
    asked = {"glim": GlimOptions(width=7), "other": None}
    names = [registry.find_devices(given)[0][0].value.name for given in (None, {}, asked)]
    assert names == ["None", "None", repr(GlimOptions(width=7))]


def test_hook_luce_register_archs():
    spec = ArchSpec(("glim", "glim2"), "m:describe", "m:build")
    registry = registry_with(luce_register_archs=[spec])
    assert registry.arch("glim").value is registry.arch("glim2").value
    assert registry.names("arch") == ["glim", "glim2"]


def test_hook_luce_register_ops():
    layer = OpLayer("beads", (OpImpl("rms", "m:rms"),), Equivalence.ROUNDING)
    assert registry_with(luce_register_ops=[layer]).op_layer("beads").value == layer


def test_hook_luce_register_quants():
    registry = registry_with(luce_register_quants=[QuantFormat("OWN", 4242, 32, 20, "m:d")])
    assert block_formats(registry).by_name("OWN").ggml_id == 4242


def test_hook_luce_register_drafters():
    assert registry_with(luce_register_drafters=[part("drafter")]).part("drafter", "mine").plugin == "glim"


def test_hook_luce_register_schedulers():
    registry = registry_with(luce_register_schedulers=[part("scheduler")])
    assert registry.names("scheduler") == ["fair", "mine"]


def test_hook_luce_register_parts():
    kinds = ("executor", "reducer", "residency", "experts", "encoder", "chat")
    registry = registry_with(luce_register_parts=[part(kind) for kind in kinds])
    assert all(registry.part(kind, "mine").plugin == "glim" for kind in kinds)


def test_hook_luce_register_catalog():
    entry = CatalogEntry("tiny", ("file:/x",), "0" * 64, 1, "MIT", "tiny", {"top-k": 5})
    registry = registry_with(luce_register_catalog=[entry, Profile("small", {"ctx-size": 9}, "small")])
    options = load_options(registry, {"model": "tiny", "profile": "small"}, {}, [])
    assert (options.core.top_k, options.core.ctx_size) == (5, 9)


def test_hook_luce_register_commands():
    command = CommandSpec("dance", "m:dance", "Dances.")
    registry = registry_with(luce_register_commands=[command])
    assert [item.value for item in registry.commands()] == [command]
    assert registry.command("dance").plugin == "glim"


def test_hook_luce_extend_plan():
    def luce_extend_plan(plan, devices):
        return [PlanPatch("threads", len(devices) + plan, "counted")]

    registry = registry_with(luce_extend_plan=luce_extend_plan)
    fields = Fields(load_options(registry, {}, {}, []), registry)
    (bound,) = registry.hooks["luce_extend_plan"]
    for patch in bound(plan=1, devices=("a", "b")):
        fields.apply(bound.plugin, patch)
    assert fields.values["threads"] == 3
    assert (fields.origin["threads"].by, fields.origin["threads"].reason) == ("glim", "counted")


def test_hook_luce_check_plan():
    def luce_check_plan(plan):
        return [Problem(f"{plan} is odd.", "Add one.")]

    answers, failures = registry_with(luce_check_plan=luce_check_plan).ask("luce_check_plan", Problem, plan=3)
    assert answers == [("glim", [Problem("3 is odd.", "Add one.")])]
    assert failures == []


@pytest.fixture
def observed():
    seen = []

    def watch(name, broken=False):
        def call(**values):
            seen.append((name, values))
            if broken:
                raise RuntimeError("observer broke")

        return Observer(name, call)

    both = (watch("bad", broken=True), watch("good"))
    return seen, Observers(both, both, both)


def test_hook_luce_engine_started(observed, caplog):
    seen, observers = observed
    observers.engine_started("pipeline")
    assert seen == [("bad", {"pipeline": "pipeline"}), ("good", {"pipeline": "pipeline"})]
    assert "Plugin 'bad' failed in luce_engine_started" in caplog.text
    assert "observer broke" in caplog.text


def test_hook_luce_engine_stopping(observed, caplog):
    seen, observers = observed
    observers.engine_stopping("pipeline")
    assert [name for name, _ in seen] == ["bad", "good"]
    assert "Plugin 'bad' failed in luce_engine_stopping" in caplog.text


def test_hook_luce_request_finished(observed, caplog):
    seen, observers = observed
    record = RequestRecord("r1", "chat", "tiny", Done("r1", "stop", {}, {}))
    with caplog.at_level(logging.ERROR):
        observers.request_finished(record)
    assert seen[1] == ("good", {"record": record})
    assert "Plugin 'bad' failed in luce_request_finished" in caplog.text


def test_observers_may_leave_arguments_out():
    calls = []

    def luce_engine_started():
        calls.append("started")

    (bound,) = registry_with(luce_engine_started=luce_engine_started).hooks["luce_engine_started"]
    Observers(started=(Observer(bound.plugin, bound),)).engine_started("pipeline")
    assert calls == ["started"]
