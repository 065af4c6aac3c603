"""Composing the toy model: every factory called once with its context, no plugin machinery left."""

import gc
import os
import sys
import types
import weakref

import pluggy
import pytest
import torch
from attrs import evolve
from pydantic import BaseModel

from luce_core.compose import _quota, compose, physical_cores
from luce_core.contracts import (
    DrafterContext,
    EncoderContext,
    Equivalence,
    ExecutorContext,
    ExpertsContext,
    OpImpl,
    OpLayer,
    PartSpec,
    PlanPatch,
    ReducerContext,
    ResidencyContext,
    SchedulerContext,
    StateLayout,
)
from luce_core.errors import ModelFormatError, PluginError, UsageError
from luce_core.gguf import read_header
from luce_core.options import load_options
from luce_core.plan import make_plan, state_sizes
from luce_core.plugins import from_modules
from luce_core.registry import Registry
from luce_core.testing.fake_plugins import make_plugin
from luce_core.testing.toy import hooks as toy
from luce_core.testing.toy import write_toy_model

EMPTY = StateLayout((), ())


class Part:
    """Can do what every kind of part must."""

    name = "mine"
    taps = ()
    layout = EMPTY
    site = "host"

    def nothing(self, *arguments):
        return None

    plan = prepare = submit = observe = propose = reduce = nothing
    next_decision = select = bank = hint = rebalance = encode = nothing


class MineOptions(BaseModel):
    width: int = 4


@pytest.fixture
def factory(monkeypatch):
    """A module of factories; `calls` holds every context one was given."""
    module = types.ModuleType("made_up_parts")
    module.calls = []

    def make(context):
        module.calls.append(context)
        return Part()

    module.make = make
    module.none = lambda context: None
    module.fail = lambda context: 1 / 0
    module.deaf = lambda context: object()
    monkeypatch.setitem(sys.modules, "made_up_parts", module)
    return module


def part(kind, name="mine", made="make", needs=frozenset()):
    return PartSpec(kind, name, f"made_up_parts:{made}", Equivalence.BITS, needs)


@pytest.fixture
def world(tmp_path, factory):
    """(plan, registry) of the toy with more plugins and CLI options."""

    def make(*plugins, file=None, **cli):
        path = file or write_toy_model(tmp_path / "toy.gguf")
        registry = from_modules([toy, *plugins])
        options = load_options(registry, {k.replace("__", "."): v for k, v in cli.items()}, {}, [])
        return make_plan(options, read_header(path), registry), registry

    return make


def reachable(root):
    """Every object reachable from `root` through attributes, containers, closures and bound methods."""
    seen = {}
    queue = [root]
    while queue:
        item = queue.pop()
        if id(item) in seen or isinstance(item, (type, types.ModuleType, str, int, float, bytes)):
            continue
        seen[id(item)] = item
        if isinstance(item, types.FunctionType):
            queue += [cell.cell_contents for cell in item.__closure__ or ()]
            queue += [item.__defaults__, item.__kwdefaults__]
        else:
            queue += [found for found in gc.get_referents(item) if not isinstance(found, types.ModuleType)]
    return list(seen.values())


# --- the plain pipeline


def test_the_toy_is_composed_as_planned(world):
    plan, registry = world(max_sequences=2)
    pipeline = compose(plan, registry)
    assert pipeline.plan is plan
    assert pipeline.target is pipeline.models["target"]
    assert pipeline.target.backend.spec.arch == "toy"
    assert pipeline.state.sizes == state_sizes(plan)
    assert type(pipeline.scheduler).__module__ == "luce_core.engine.scheduler"
    assert type(pipeline.executor).__module__ == "luce_core.engine.executor"
    assert (pipeline.drafters, pipeline.reducers, pipeline.encoders) == ((), (), ())
    assert (pipeline.residency, pipeline.experts) == (None, None)
    assert pipeline.target.tokenizer.encode("hello") != []
    pipeline.blocks.check_integrity()


def test_the_state_takes_the_bytes_that_were_planned(world):
    plan, registry = world()
    pipeline = compose(plan, registry)
    tensors = pipeline.target.state.tensors()
    allocated = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert allocated == sum(claim.num_bytes for claim in plan.claims if claim.kind == "state")


def test_the_broker_knows_the_claims_and_the_limit(world):
    plan, registry = world()
    broker = compose(plan, registry).brokers["cpu"]
    claimed = sum(claim.num_bytes for claim in plan.claims if claim.device == "cpu")
    assert broker.free_bytes == plan.number("memory.limit_bytes") - claimed


def test_ops_of_the_plans_layers_are_laid_over_the_reference(world):
    plan, registry = world()
    assert "toy.fold" in compose(plan, registry).target.ops


def test_an_op_that_is_off_is_what_lies_below(world):
    names = ("rms", "add", "linear")
    ops = tuple(
        OpImpl(op, f"operator:{fn}", needs=frozenset(needs))
        for op, fn, needs in zip(names, ("pos", "neg", "inv"), ((), ("rms",), ()), strict=True)
    )
    layer = make_plugin("mine", luce_register_ops=[OpLayer("odd", ops, Equivalence.BITS)])
    used = {}
    for off in ((), ("rms",), ("odd.linear",)):
        target = compose(*world(layer, op_layer=("toy", "odd"), ops_off=off)).target
        used[off] = [op for op in names if target.ops.__dict__[op].func.__module__ == "_operator"]
    assert used == {(): list(names), ("rms",): ["linear"], ("odd.linear",): ["rms", "add"]}


def test_a_layer_is_made_ready_before_anything_is_loaded(world, factory):
    seen = []
    factory.ready = lambda device, options: seen.append((device.id, options))
    layer = OpLayer("odd", (), Equivalence.BITS, prepare="made_up_parts:ready")
    compose(*world(make_plugin("mine", luce_register_ops=[layer]), op_layer=("toy", "odd")))
    assert seen == [("cpu", None)]

    def refuse(device, options):
        raise UsageError("not on this one")

    factory.ready = refuse
    with pytest.raises(UsageError, match="not on this one"):
        compose(*world(make_plugin("mine", luce_register_ops=[layer]), op_layer=("toy", "odd")))


def test_a_pipeline_is_frozen(world):
    pipeline = compose(*world())
    with pytest.raises(AttributeError):
        pipeline.scheduler = None
    with pytest.raises(TypeError):
        pipeline.models["target"] = None
    with pytest.raises(TypeError):
        pipeline.brokers["cpu"] = None


def test_loading_reports_its_progress(world):
    seen = []
    compose(*world(), progress=lambda done, total: seen.append((done, total)))
    assert all(0 <= done <= total for done, total in seen)


def test_composing_twice_gives_two_independent_pipelines(world):
    plan, registry = world()
    first, second = compose(plan, registry), compose(plan, registry)
    ours = {tensor.data_ptr() for tensor in first.target.state.tensors()}
    theirs = {tensor.data_ptr() for tensor in second.target.state.tensors()}
    assert not ours & theirs
    assert first.blocks is not second.blocks


@pytest.mark.parametrize("asked", [0, 1, 3])
def test_threads_are_those_of_the_plan_or_the_physical_cores(world, asked):
    before = torch.get_num_threads()
    try:
        compose(*world(threads=asked))
        assert torch.get_num_threads() == (asked or physical_cores())
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", 64), ("200000 100000", 2), ("50000 100000", 1), ("nonsense", 64)]
)
def test_a_containers_quota_is_obeyed(tmp_path, text, cores):
    path = tmp_path / "cpu.max"
    path.write_text(text)
    assert _quota(path, 64) == cores
    assert _quota(tmp_path / "absent", 64) == 64
    assert 1 <= physical_cores() <= os.cpu_count()


# --- nothing of the plugins' machinery is left


def test_no_plugin_manager_and_no_registry_is_reachable(world):
    watching = make_plugin(
        "watcher",
        luce_engine_started=lambda pipeline: None,
        luce_register_drafters=[part("drafter")],
        luce_register_schedulers=[part("scheduler")],
    )
    pipeline = compose(*world(watching, drafter=("mine",), scheduler="mine"))
    found = reachable(pipeline)
    assert any(item is pipeline.blocks for item in found), "the walk sees the pipeline's own parts"
    assert any(isinstance(item, Part) for item in found)
    assert [item for item in found if isinstance(item, (Registry, pluggy.PluginManager))] == []


def test_the_registry_dies_when_the_pipeline_is_all_that_is_left(world):
    plan, registry = world()
    pipeline = compose(plan, registry)
    alive = weakref.ref(registry)
    del registry
    gc.collect()
    assert alive() is None
    assert pipeline.scheduler is not None


# --- parts


CONTEXTS = {
    "scheduler": SchedulerContext,
    "executor": ExecutorContext,
    "drafter": DrafterContext,
    "reducer": ReducerContext,
    "residency": ResidencyContext,
    "experts": ExpertsContext,
    "encoder": EncoderContext,
}
HOOK = {"drafter": "luce_register_drafters", "scheduler": "luce_register_schedulers"}


def hook_of(kind):
    return HOOK.get(kind, "luce_register_parts")


@pytest.mark.parametrize("kind", CONTEXTS)
def test_a_part_is_made_once_with_the_context_of_its_kind(world, factory, kind):
    plugin = make_plugin("mine", options=MineOptions, **{hook_of(kind): [part(kind)]})
    value = "mine" if kind in ("scheduler", "executor", "residency", "experts") else ("mine",)
    plan, registry = world(plugin, **{kind: value, "mine__width": 7})
    assert factory.calls == [], "planning imports and makes nothing"
    pipeline = compose(plan, registry)
    (context,) = factory.calls
    assert type(context) is CONTEXTS[kind]
    assert context.options == MineOptions(width=7)
    slot = {"reducer": "reducers", "drafter": "drafters", "encoder": "encoders"}.get(kind, kind)
    made = getattr(pipeline, slot)
    assert isinstance(made[0] if isinstance(made, tuple) else made, Part)


def test_contexts_carry_what_the_plan_says(world, factory):
    plugin = make_plugin(
        "mine",
        luce_register_schedulers=[part("scheduler")],
        luce_register_drafters=[part("drafter")],
        luce_register_parts=[part("residency"), part("executor")],
    )
    plan, registry = world(
        plugin, scheduler="mine", drafter=("mine",), residency="mine", executor="mine",
        max_sequences=3, chunk=99, draft_nodes=5, ctx_size=128,
    )  # fmt: skip
    pipeline = compose(plan, registry)
    contexts = {type(context): context for context in factory.calls}
    scheduler, drafter = contexts[SchedulerContext], contexts[DrafterContext]
    assert (scheduler.options, scheduler.max_sequences, scheduler.row_budget) == (None, 3, 99)
    assert (drafter.capacity, drafter.target, drafter.broker) == (
        5,
        pipeline.target.target,
        pipeline.brokers["cpu"],
    )
    assert contexts[ResidencyContext] == ResidencyContext(None, 128, 32)
    assert contexts[ExecutorContext].device.id == "cpu"


def test_lists_keep_the_order_of_the_plan(world, factory):
    names = ["one", "two", "three"]

    def build(context):
        made = Part()
        made.name = names[len(factory.calls)]
        factory.calls.append(context)
        return made

    factory.make = build
    plugin = make_plugin("mine", luce_register_drafters=[part("drafter", name) for name in names])
    pipeline = compose(*world(plugin, drafter=("three", "one", "two")))
    assert pipeline.plan.parts["drafter"] == ("three", "one", "two")
    assert [drafter.name for drafter in pipeline.drafters] == names


def test_options_of_a_part_are_those_of_the_plan_patches_included(world, factory):
    def luce_extend_plan(plan):
        return [PlanPatch("mine.width", 6, "wider")]

    plugin = make_plugin(
        "mine",
        options=MineOptions,
        luce_register_schedulers=[part("scheduler")],
        luce_extend_plan=luce_extend_plan,
    )
    compose(*world(plugin, scheduler="mine"))
    assert factory.calls[0].options.width == 6


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("absent", "has no 'absent'"),
        ("fail", "raised ZeroDivisionError: division by zero"),
        ("none", "its factory returned None, wanted an object with plan"),
        ("deaf", "wanted an object with plan"),
    ],
)
def test_a_factory_that_fails_is_named_with_its_plugin(world, made, message):
    plugin = make_plugin("mine", luce_register_schedulers=[part("scheduler", made=made)])
    with pytest.raises(PluginError) as caught:
        compose(*world(plugin, scheduler="mine"))
    assert "Scheduler 'mine' of plugin 'mine'" in str(caught.value)
    assert message in str(caught.value)


def test_a_drafter_must_say_what_state_it_keeps(world, factory):
    plugin = make_plugin("mine", luce_register_drafters=[part("drafter")])
    plan, registry = world(plugin, drafter=("mine",))
    factory.make = lambda context: evolve_part(layout=None)
    with pytest.raises(PluginError, match="its layout is None, wanted a StateLayout"):
        compose(plan, registry)
    spec = plan.models[0].spec
    factory.make = lambda context: evolve_part(layout=spec.layout)
    with pytest.raises(PluginError, match=r"layout of pages 'tokens', slot .* but nothing was planned"):
        compose(plan, registry)


def evolve_part(**attributes):
    made = Part()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def test_an_op_that_cannot_be_imported_is_named(world):
    layer = OpLayer("odd", (OpImpl("rms", "made_up_parts:absent"),), Equivalence.BITS)
    with pytest.raises(PluginError, match=r"Op 'rms' of op layer 'odd' of plugin 'mine'.*has no 'absent'"):
        compose(*world(make_plugin("mine", luce_register_ops=[layer]), op_layer=("toy", "odd")))


def test_a_file_that_changed_for_the_worse_is_a_format_error(world, tmp_path):
    plan, registry = world()
    with open(plan.models[0].path, "r+b") as file:
        file.truncate(50)
    with pytest.raises(ModelFormatError):
        compose(plan, registry)


# --- observers


def test_observers_are_bound_in_after_order_and_survive_a_failure(world, caplog):
    seen = []

    def fail(pipeline):
        seen.append("a")
        raise RuntimeError("no")

    def note(pipeline):
        seen.append(pipeline)

    first = make_plugin("z", luce_engine_started=fail)
    second = make_plugin("a", luce_engine_started=note, after=("z",))
    pipeline = compose(*world(second, first))
    pipeline.observers.engine_started(pipeline)
    assert seen == ["a", pipeline]
    assert "Plugin 'z' failed in luce_engine_started" in caplog.text


def test_a_plan_can_be_evolved_and_composed_again(world):
    plan, registry = world()
    assert compose(evolve(plan, problems=()), registry).plan.problems == ()
