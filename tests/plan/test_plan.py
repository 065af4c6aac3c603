"""The planner: what is chosen, who set it, and everything wrong in one error."""

import pytest
from pydantic import BaseModel, Field

from luce_core.contracts import Equivalence, PartSpec, PlanPatch, Problem, Provenance
from luce_core.errors import ModelFormatError, PlanError, PluginError
from luce_core.options import load_options
from luce_core.plan import make_plan, state_sizes, suppliers
from luce_core.plugins import from_modules
from luce_core.testing.fake_plugins import make_plugin

from .conftest import CPU, GPU0, GPU1, guess


class Tuned(BaseModel):
    width: int = Field(4, ge=1, le=8)


def patching(name, *patches, **more):
    def luce_extend_plan(plan, devices):
        return list(patches)

    return make_plugin(name, luce_extend_plan=luce_extend_plan, **more)


def fails(make, *arguments, **more):
    with pytest.raises(PlanError) as caught:
        make(*arguments, **more)
    return caught.value.problems


# --- the plain plan


def test_a_plan_without_any_wish(plan):
    made = plan()
    (target,) = made.models
    assert (target.name, target.role, target.arch_plugin) == ("target", "target", "glim")
    assert target.path.endswith("model.gguf")
    assert target.layer_device == ("cpu", "cpu")
    assert made.number("context") == 4096
    assert made.parts["scheduler"] == ("fair",)
    assert made.parts["executor"] == ("eager",)
    assert made.parts["drafter"] == ()
    assert made.problems == ()


def test_every_field_has_a_provenance(plan):
    made = plan(patching("tuned", PlanPatch("tuned.width", 7, "because"), options=Tuned))
    assert set(made.values) == set(made.origin)
    assert all(isinstance(origin, Provenance) for origin in made.origin.values())
    assert made.origin["tuned.width"] == Provenance("plugin", "tuned", "because")
    assert made.values["tuned.width"] == 7


def test_engine_fields_carry_what_the_user_said(plan):
    made = plan(ctx_size=512, cache_type_k="bf16", max_sequences=2, chunk=64, threads=3, draft_nodes=5)
    expected = {
        "context": 512,
        "cache.k_type": "bf16",
        "cache.v_type": "f16",
        "engine.max_sequences": 2,
        "engine.row_budget": 64,
        "engine.draft_nodes": 5,
        "threads": 3,
    }
    assert {name: made.values[name] for name in expected} == expected
    assert made.origin["context"] == Provenance("cli", "--ctx-size")
    assert made.models[0].spec.details == {"asked": 512, "types": ("bf16", "f16")}


def test_settings_of_the_server_stay_out_of_the_plan(plan):
    assert not {"host", "port", "api_key"} & {name.rpartition(".")[2] for name in plan().values}


def test_the_same_question_has_the_same_answer(plan):
    assert plan() == plan()


# --- device


def test_the_best_device_is_taken(plan):
    made = plan(devices=(CPU, GPU1, GPU0))
    assert made.values["device"] == "gpu:0"
    assert made.origin["device"] == Provenance("default", "default", "the best of cpu, gpu:0, gpu:1")
    assert made.devices == (CPU, GPU1, GPU0)


@pytest.mark.parametrize(("wanted", "got"), [("cpu", "cpu"), ("gpu", "gpu:0"), ("gpu:1", "gpu:1")])
def test_a_device_is_chosen_by_id_or_by_kind(plan, wanted, got):
    made = plan(devices=(CPU, GPU0, GPU1), device=wanted)
    assert made.models[0].layer_device == (got, got)
    assert made.origin["device"].source == "cli"


def test_a_device_that_is_not_there_says_what_to_install(plan):
    (problem,) = fails(plan, device="cuda:0")
    assert "Device 'cuda:0' is not there" in problem.message
    assert "pip install luce-backend-triton" in problem.message
    assert problem.fix == "Choose one of cpu, or --device auto."


def test_no_device_at_all_says_what_to_install(plan):
    (problem,) = fails(plan, devices=())
    assert "No device was found. No installed plugin provides device 'cpu'" in problem.message
    assert "pip install luce-backend-cpu" in problem.message


def test_what_else_is_wrong_is_said_beside_a_missing_device_or_architecture(plan, model):
    problems = fails(plan, device="cuda", scheduler="rude", ctx_size=10**8)
    text = "\n".join(problem.message for problem in problems)
    for part in ("Device 'cuda'", "'rude'", "100000000 tokens is short"):
        assert part in text
    registry = from_modules([])
    options = load_options(registry, {"scheduler": "rude", "op_layer": ("ghost",)}, {}, [])
    text = "\n".join(problem.message for problem in fails(make_plan, options, model(), registry, []))
    for part in ("No device", "architecture 'glim'", "'rude'", "'ghost'"):
        assert part in text


def test_devices_are_asked_for_when_none_are_given(arch, model):
    registry = from_modules([arch(), make_plugin("hw", luce_register_devices=[CPU])])
    assert make_plan(load_options(registry, {}, {}, []), model(), registry).devices == (CPU,)


# --- architecture


def test_an_unknown_architecture_names_file_and_package(model):
    registry = from_modules([])
    problems = fails(make_plan, load_options(registry, {}, {}, []), model(), registry, [])
    text = "\n".join(problem.message for problem in problems)
    assert "model.gguf' holds a model of architecture 'glim'" in text
    assert "Report it" not in text
    assert "pip install luce-arch-glim" in text
    assert "No device was found" in text, "both problems at once"


@pytest.mark.parametrize(
    ("describe", "message"),
    [
        ("made_up_glim:fail", "raised KeyError: 'glim.heads'"),
        ("made_up_glim:wrong", "returned {'arch': 'glim'}, wanted a ModelSpec"),
        ("made_up_glim:nothing", "has no 'nothing'"),
    ],
)
def test_a_plugin_that_cannot_describe_the_file_is_named(arch, model, describe, message):
    registry = from_modules([arch(describe)])
    (problem,) = fails(make_plan, load_options(registry, {}, {}, []), model(), registry, [CPU])
    assert "plugin 'glim'" in problem.message.lower()
    assert message in problem.message


def test_a_bad_file_stays_a_bad_file(plan, model):
    with pytest.raises(ModelFormatError, match=r"glim\.window"):
        plan(header=model(window="wide"))


def test_chat_parts_that_suit_the_architecture_are_taken_if_installed(arch, model):
    polite = PartSpec("chat", "polite", "m:make", Equivalence.BITS)
    registry = from_modules([arch(chat=("absent", "polite")), make_plugin("p", luce_register_parts=[polite])])
    made = make_plan(load_options(registry, {}, {}, []), model(), registry, [CPU])
    assert made.parts["chat"] == ("polite",)
    assert made.origin["parts.chat"].reason == "suits architecture glim"


# --- patches


def test_patches_are_applied_in_after_order_whatever_the_installation_order(plan):
    early = patching("zz", PlanPatch("threads", 1, "first"))
    late = patching("aa", PlanPatch("threads", 2, "second"), after=("zz",))
    for plugins in ((early, late), (late, early)):
        made = plan(*plugins)
        assert made.values["threads"] == 2
        assert made.origin["threads"] == Provenance("plugin", "aa", "second")


def test_order_reaches_through_a_plugin_between(plan):
    made = plan(
        patching("c", PlanPatch("threads", 3, "c"), after=("b",)),
        patching("b", after=("a",)),
        patching("a", PlanPatch("threads", 1, "a")),
    )
    assert made.values["threads"] == 3


def test_a_plugin_sees_the_patches_before_it(plan):
    seen = {}

    def luce_extend_plan(plan, devices):
        seen.update(threads=plan.values["threads"], devices=devices, claims=plan.claims, models=plan.models)
        return []

    plan(
        patching("first", PlanPatch("threads", 5, "x")),
        make_plugin("second", luce_extend_plan=luce_extend_plan, after=("first",)),
    )
    assert seen["threads"] == 5
    assert seen["devices"] == (CPU,)
    assert seen["claims"]
    assert seen["models"][0].spec.arch == "glim"


def test_two_plugins_on_one_field_without_an_order_are_both_named(plan):
    (problem,) = fails(
        plan, patching("a", PlanPatch("threads", 1, "slow")), patching("b", PlanPatch("threads", 2, "fast"))
    )
    assert problem.message == (
        "Plugin 'b' sets threads to 2 (fast), and plugin 'a' sets it to 1 (slow)."
    )
    assert "Choose one yourself with --threads" in problem.fix
    assert "--plugin-block b" in problem.fix


def test_two_plugins_that_agree_need_no_order(plan):
    made = plan(patching("a", PlanPatch("threads", 2, "x")), patching("b", PlanPatch("threads", 2, "y")))
    assert made.origin["threads"].by == "a"


def test_a_field_the_user_set_is_never_patched(plan):
    made = plan(patching("a", PlanPatch("threads", 9, "more")), threads=2)
    assert made.values["threads"] == 2
    (problem,) = made.problems
    assert problem.message == "Plugin 'a' sets threads to 9 (more); --threads keeps it at 2."
    assert not problem.fatal


def test_a_model_card_is_stronger_than_a_plugin(plan):
    made = plan(patching("a", PlanPatch("threads", 9, "more")), model="x.gguf", card={"threads": 3})
    assert made.values["threads"] == 3
    assert "card of x.gguf keeps it at 3" in made.problems[0].message


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (PlanPatch("thread", 1, "x"), "'thread', which is no field it may set. Did you mean 'threads'"),
        (PlanPatch("state.sizes", 1, "x"), "patches 'state.sizes', which is no field it may set."),
        (PlanPatch("threads", -1, "x"), "sets threads to -1: input should be greater than or equal to 0"),
        (PlanPatch("threads", "two", "x"), "sets threads to 'two': input should be a valid integer"),
        (PlanPatch("cache.k_type", "q1", "x"), "sets cache.k_type to 'q1'"),
        (PlanPatch("parts.scheduler", ("fair", "fair"), "x"), "a plan has one scheduler"),
        (PlanPatch("parts.drafter", 3, "x"), "wanted names of parts"),
        (PlanPatch("tuned.width", 99, "x"), "less than or equal to 8"),
        (PlanPatch("memory.weight_bytes", 1.5, "x"), "wanted int"),
    ],
)
def test_a_bad_patch_is_a_problem_of_its_plugin(plan, patch, message):
    (problem,) = fails(plan, patching("tuned", patch, options=Tuned))
    assert problem.message.startswith("Plugin 'tuned' ")
    assert message in problem.message


def test_a_plugin_that_fails_while_planning_stays_out(plan):
    def luce_extend_plan(plan, devices):
        raise ZeroDivisionError("oops")

    bad = make_plugin("bad", luce_extend_plan=luce_extend_plan)
    made = plan(bad, patching("ok", PlanPatch("threads", 2, "x")))
    assert made.values["threads"] == 2
    assert "Plugin 'bad' stays out of the plan: luce_extend_plan raised ZeroDivisionError: oops." in [
        problem.message for problem in made.problems
    ]


def test_a_patched_part_that_does_not_exist_steps_aside_with_a_reason(plan):
    made = plan(patching("a", PlanPatch("parts.drafter", ("ghost",), "x")))
    assert made.parts["drafter"] == ()
    assert "a asks for the drafter 'ghost'" in made.problems[0].message
    assert "pip install luce-ghost" in made.problems[0].message


# --- parts and ops


def test_parts_named_by_the_user_are_taken_in_order(plan):
    drafters = make_plugin("d", luce_register_drafters=[guess("one"), guess("two")])
    made = plan(drafters, drafter=("two,one",))
    assert made.parts["drafter"] == ("two", "one")
    assert made.values["engine.max_held_rows"] == 17


def test_a_named_part_that_is_missing_says_what_to_install(plan):
    problems = fails(plan, scheduler="rude", drafter=("dflash",))
    text = "\n".join(f"{problem.message} {problem.fix}" for problem in problems)
    assert "--scheduler asks for the scheduler 'rude'" in text
    assert "Installed: fair." in text
    assert "--drafter asks for the drafter 'dflash'" in text
    assert "pip install luce-dflash" in text
    assert "Or name another with --drafter." in text


@pytest.mark.parametrize(
    ("needs", "devices", "tree", "missing"),
    [
        ({"taps", "tree", "loader"}, (CPU,), "any", ""),
        ({"tree"}, (CPU,), "chain", "tree"),
        ({"chain"}, (CPU,), "none", "chain"),
        ({"graphs"}, (CPU,), "any", "graphs"),
        ({"graphs"}, (GPU0,), "any", ""),
        ({"nextn"}, (CPU,), "any", "nextn"),
    ],
)
def test_a_part_gets_what_it_needs_or_says_what_it_lacks(plan, model, needs, devices, tree, missing):
    plugin = make_plugin("d", luce_register_drafters=[guess(needs=frozenset(needs))])
    header = model(tree=tree)
    if not missing:
        assert plan(plugin, drafter=("guess",), devices=devices, header=header).parts["drafter"] == ("guess",)
        return
    (problem,) = fails(plan, plugin, drafter=("guess",), devices=devices, header=header)
    assert f"Drafter 'guess' of plugin 'd' needs {missing}; this plan offers" in problem.message


def test_a_part_nobody_asked_for_steps_aside_when_it_lacks_something(plan):
    plugin = patching(
        "d",
        PlanPatch("parts.drafter", ("guess",), "faster"),
        luce_register_drafters=[guess(needs=frozenset({"graphs"}))],
    )
    made = plan(plugin)
    assert made.parts["drafter"] == ()
    assert "needs graphs" in made.problems[0].message
    assert made.values["engine.max_held_rows"] == 8


def test_no_scheduler_is_no_plan(plan):
    (problem,) = fails(plan, scheduler="none")
    assert problem == Problem("The plan has no scheduler.", "Choose one with --scheduler.")


def test_op_layers_are_checked_against_the_device(plan):
    assert plan(op_layer=("fast",)).models[0].op_layers == ("fast",)
    (problem,) = fails(plan, op_layer=("gpu-only",))
    assert problem.message == "Op layer 'gpu-only' of plugin 'glim' needs gpu, x; device 'cpu' has avx2, cpu."


def test_deterministic_allows_row_invariant_layers_only(plan):
    assert plan(op_layer=("fast",), deterministic=True).values["deterministic"] is True
    (problem,) = fails(plan, op_layer=("batchy",), deterministic=True)
    assert "computes linear differently from batch to batch" in problem.message


def test_an_op_that_is_off_does_not_count(plan):
    made = plan(op_layer=("fast", "batchy"), ops_off=("linear",), deterministic=True)
    assert made.values["execution.ops_off"] == ("linear",)
    assert made.models[0].op_layers == ("fast", "batchy")


@pytest.mark.parametrize("name", ["linaer", "batchy.pack_linear", "nothing.linear"])
def test_an_op_that_no_layer_has_cannot_be_switched_off(plan, name):
    (problem,) = fails(plan, op_layer=("fast", "batchy"), ops_off=(name,))
    assert f"--ops-off switches op {name!r} off, which no op layer has." in problem.message
    assert "batchy.linear, fast.pack_linear, linear, pack_linear." in problem.message


def test_an_op_that_is_not_in_this_plan_is_a_note(plan):
    made = plan(op_layer=("fast",), ops_off=("linear", "batchy.linear", "fast.pack_linear"))
    said = [problem.message for problem in made.problems]
    assert len(said) == 2
    assert all("no op layer of this plan (fast) has anyway" in one for one in said)


def test_a_missing_op_layer_is_a_problem(plan):
    (problem,) = fails(plan, op_layer=("fats",))
    assert "Did you mean 'fast'?" in problem.message


# --- conflicts and checks


def test_all_problems_are_reported_at_once(plan):
    def luce_check_plan(plan):
        return [Problem("The moon is full.", "Wait."), Problem("It rains.", "Stay in.", fatal=False)]

    problems = fails(
        plan,
        make_plugin("x", conflicts={"y": "both want the moon"}, luce_check_plan=luce_check_plan),
        make_plugin("y", after=("z",)),
        make_plugin("z", after=("y",)),
        patching("p", PlanPatch("nonsense", 1, "x")),
        scheduler="rude",
        op_layer=("gpu-only",),
        ctx_size=100_000_000,
    )
    text = [problem.message for problem in problems]
    parts = ("circle", "both want the moon", "nonsense", "'rude'", "'gpu-only'", "100000000", "The moon is")
    for part in parts:
        assert sum(part in message for message in text) == 1, part
    assert len(text) == 7
    assert "It rains." not in text


def test_a_note_of_a_check_is_kept_in_the_plan(plan):
    def luce_check_plan(plan):
        return [Problem("It rains.", "Stay in.", fatal=False)]

    assert plan(make_plugin("x", luce_check_plan=luce_check_plan)).problems[0].message == "It rains."


def test_checks_see_the_finished_plan(plan):
    seen = []

    def luce_check_plan(plan):
        seen.append(plan)
        return []

    checking = make_plugin("x", luce_check_plan=luce_check_plan)
    made = plan(checking, patching("a", PlanPatch("threads", 7, "x")))
    assert seen[0].values == made.values
    assert seen[0].claims == made.claims


# --- suppliers


def test_everything_in_a_plan_has_a_supplier(arch, model):
    registry = from_modules([arch(), make_plugin("d", luce_register_drafters=[guess()])])
    options = load_options(registry, {"drafter": ("guess",), "op_layer": ("fast",)}, {}, [])
    made = make_plan(options, model(), registry, [CPU])
    assert {key: item.plugin for key, item in suppliers(made, registry).items()} == {
        "arch.glim": "glim",
        "ops.fast": "glim",
        "drafter.guess": "d",
        "scheduler.fair": "core",
        "executor.eager": "core",
        "chat.auto": "core",
    }


def test_sizes_of_a_plan_are_there(plan):
    assert state_sizes(plan(max_sequences=3)).num_slots == 3


def test_plugin_error_outside_planning_is_not_swallowed(plan):
    with pytest.raises(PluginError):
        plan(make_plugin("bad", luce_register_parts=1))
