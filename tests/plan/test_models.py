"""Models beside the target: asked for by plugins, described, judged, counted, shown."""

import io

import pytest
from rich.console import Console

from luce_core.contracts import (
    Equivalence,
    Field,
    Group,
    ModelRequest,
    OpLayer,
    Pages,
    PartSpec,
    PlanPatch,
    StateLayout,
)
from luce_core.errors import PlanError, PluginError
from luce_core.gguf import read_header
from luce_core.options import load_options
from luce_core.plan import make_plan, state_sizes
from luce_core.plan_memory import roofline
from luce_core.plan_render import render_plan
from luce_core.plugins import from_modules
from luce_core.testing.fake_plugins import make_plugin
from luce_core.testing.gguf_factory import write_gguf
from luce_core.testing.toy import hooks as toy
from luce_core.testing.toy import write_toy_model
from luce_core.testing.toy_vocab import toy_vocabulary

OWN = StateLayout((Group("own"),), (Pages("own", "own", 0, {"v": Field((4,), "f32")}),))
LAYOUTS = {"own": lambda target, options: OWN, "bad": lambda target, options: {"own": 1}}


@pytest.fixture(autouse=True)
def _layouts(monkeypatch):
    import sys
    import types

    module = types.ModuleType("made_up_layouts")
    module.own, module.bad = LAYOUTS["own"], LAYOUTS["bad"]
    module.dies = lambda target, options: 1 // 0
    monkeypatch.setitem(sys.modules, "made_up_layouts", module)


def drafter(name="mine", layout=""):
    return PartSpec("drafter", name, "m:make", Equivalence.BITS, layout=layout)


def asking(name, *requests, parts=("mine",), patch_parts=False, layout="", **more):
    """A plugin with drafters that asks for these models."""

    def luce_extend_plan(plan, devices):
        chosen = [PlanPatch("parts.drafter", parts, "it is here")] if patch_parts else []
        return [*chosen, *(PlanPatch("models", request, "to draft with") for request in requests)]

    specs = [drafter(part, layout) for part in parts]
    return make_plugin(name, luce_register_drafters=specs, luce_extend_plan=luce_extend_plan, **more)


@pytest.fixture
def draft(tmp_path):
    return str(write_toy_model(tmp_path / "draft.gguf", salt=5))


@pytest.fixture
def planned(tmp_path):
    """(plan, registry) of a toy target, plugins and CLI options."""

    def make(*plugins, **cli):
        path = write_toy_model(tmp_path / "target.gguf")
        registry = from_modules([toy, *plugins])
        options = load_options(registry, {"drafter": ("mine",), **cli}, {}, [])
        return make_plan(options, read_header(path), registry), registry

    return make


def request(path, name="draft", role="drafter", part="drafter.mine", **more):
    return ModelRequest(name, role, path, part, **more)


def refused(planned, *plugins, **cli):
    with pytest.raises(PlanError) as caught:
        planned(*plugins, **cli)
    return str(caught.value)


# --- what is planned


def test_a_model_that_was_asked_for_is_planned_like_the_target(planned, draft):
    plan, _ = planned(asking("asker", request(draft)))
    target, model = plan.models
    assert (model.name, model.role, model.path, model.part) == ("draft", "drafter", draft, "drafter.mine")
    assert (model.spec.arch, model.arch_plugin, model.layer_device) == ("toy", "toy", ("cpu",))
    assert model.op_layers == target.op_layers == ("toy",)
    assert model.spec.layout.best_effort
    assert not target.spec.layout.best_effort
    assert plan.origin["models.draft"].by == "asker"
    assert plan.origin["models.draft"].reason == "to draft with"


def test_its_bytes_are_lines_of_their_own_and_the_roofline_stays_the_targets(planned, draft):
    alone, _ = planned(asking("asker"))
    plan, _ = planned(asking("asker", request(draft)))
    extra = {c.owner: c for c in plan.claims if c.owner not in {c.owner for c in alone.claims}}
    assert set(extra) == {"weights of draft", "state of draft"}
    assert extra["weights of draft"].num_bytes == 4 * 64
    sizes = state_sizes(plan)
    assert sizes.num_blocks["draft/tokens"] == sizes.num_blocks["target/tokens"]
    assert roofline(plan, 100) == roofline(alone, 100)


def test_op_layers_may_be_its_own(planned, draft):
    layer = OpLayer("mine", (), Equivalence.BITS)
    plugin = asking("asker", request(draft, op_layers=("mine", "toy")), luce_register_ops=[layer])
    assert planned(plugin)[0].models[1].op_layers == ("mine", "toy")
    said = refused(planned, asking("asker", request(draft, op_layers=("nowhere",))))
    assert "model 'draft' of plugin 'asker' asks for the op layer 'nowhere'" in said


def test_requests_of_several_plugins_add_up_and_later_ones_see_them(planned, draft):
    seen = []

    def look(plan, devices):
        seen.append([model.name for model in plan.models])
        return [PlanPatch("models", (request(draft, "b"), request(draft, "c")), "more")]

    first = asking("asker", request(draft, "a"))
    plan, _ = planned(make_plugin("looker", after=("asker",), luce_extend_plan=look), first)
    assert seen == [["target", "a"]]
    assert [model.name for model in plan.models] == ["target", "a", "b", "c"]


def test_the_models_a_part_does_not_stay_for_are_left_out_with_a_note(planned, draft):
    plan, _ = planned(asking("asker", request(draft)), drafter=("none",))
    assert len(plan.models) == 1
    assert "models.draft" not in plan.values
    assert "state of draft" not in {claim.owner for claim in plan.claims}
    (note,) = [p for p in plan.problems if "draft" in p.message]
    assert "is for the drafter 'mine', and that is not in this plan" in note.message
    assert not note.fatal


def test_a_draft_model_trained_for_less_is_noted(planned, tmp_path):
    path = str(write_toy_model(tmp_path / "short.gguf", context=64))
    plan, _ = planned(asking("asker", request(path)))
    assert any("trained for 64 tokens; the context is 512" in p.message for p in plan.problems)


@pytest.mark.parametrize("slots", [True, False])
def test_snapshots_are_claimed_for_whoever_needs_them(planned, tmp_path, slots):
    path = str(write_toy_model(tmp_path / "d.gguf", slots=slots))
    target = write_toy_model(tmp_path / "pages.gguf", slots=False)
    registry = from_modules([toy, asking("asker", request(path))])
    options = load_options(registry, {"drafter": ("mine",)}, {}, [])
    plan = make_plan(options, read_header(target), registry)
    assert any(claim.kind == "cache" for claim in plan.claims) is slots


# --- a drafter's own state


def test_a_drafters_layout_is_planned_without_building_it(planned):
    plan, _ = planned(asking("asker", layout="made_up_layouts:own"))
    assert plan.layouts["mine"].pages == OWN.pages
    assert plan.layouts["mine"].best_effort
    sizes = state_sizes(plan)
    claim = next(c for c in plan.claims if c.owner == "state of mine")
    assert claim.num_bytes == sizes.num_blocks["mine/own"] * sizes.block_tokens * 4 * 4


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("made_up_layouts:bad", "wanted a StateLayout"),
        ("made_up_layouts:dies", "ZeroDivisionError"),
        ("made_up_layouts:absent", "has no 'absent'"),
    ],
)
def test_a_layout_that_cannot_be_costs_the_drafter_its_place(planned, layout, words):
    said = refused(planned, asking("asker", layout=layout))
    assert "Drafter 'mine' of plugin 'asker'" in said
    assert words in said
    plan, _ = planned(asking("asker", patch_parts=True, layout=layout), drafter=None)
    assert plan.parts["drafter"] == ()
    assert any(words in p.message for p in plan.problems)


def test_two_owners_of_state_cannot_share_a_name(planned, draft):
    said = refused(planned, asking("asker", request(draft, "mine"), layout="made_up_layouts:own"))
    assert "under the name 'mine', which a model of this plan has" in said


def test_a_layout_of_anything_but_a_drafter_breaks_its_plugin():
    spec = PartSpec("scheduler", "s", "m:make", Equivalence.BITS, layout="m:fn")
    with pytest.raises(PluginError, match=r"'odd' .* is broken: the scheduler 's' .* for drafters only"):
        from_modules([make_plugin("odd", luce_register_schedulers=[spec])])


# --- what does not fit


def other_vocabulary(folder):
    metadata = {
        "general.architecture": "toy", "toy.context_length": 64, "toy.salt": 1, "toy.slots": True,
        "toy.window": 0, **toy_vocabulary("spm"),
    }  # fmt: skip
    import numpy as np

    return str(write_gguf(folder / "other.gguf", metadata, {"toy.weight": np.zeros((8, 8), np.float32)}))


def unknown_arch(folder):
    import numpy as np

    return str(
        write_gguf(folder / "x.gguf", {"general.architecture": "odd"}, {"w": np.zeros((2, 32), np.float32)})
    )


def no_model(folder):
    path = folder / "junk.gguf"
    path.write_bytes(b"not a model")
    return str(path)


BAD = {
    "missing": (lambda folder: str(folder / "absent.gguf"), ["absent.gguf", "cannot be used"]),
    "junk": (no_model, ["junk.gguf", "cannot be used"]),
    "architecture": (unknown_arch, ["'odd'", "luce-arch-odd"]),
    "vocabulary": (other_vocabulary, ["386 tokens", "289", "target.gguf"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_does_not_fit_is_named_with_both_sides_and_the_way_out(planned, tmp_path, case):
    make, words = BAD[case]
    plugin = asking("asker", request(make(tmp_path)))
    said = refused(planned, plugin)
    for word in ["Model 'draft'", "plugin 'asker'", "--drafter none", *words]:
        assert word in said


@pytest.mark.parametrize("case", BAD)
def test_a_drafter_nobody_asked_for_steps_aside_with_its_model(planned, tmp_path, case):
    make, words = BAD[case]
    plan, _ = planned(asking("asker", request(make(tmp_path)), patch_parts=True), drafter=None)
    assert plan.parts["drafter"] == ()
    assert [model.name for model in plan.models] == ["target"]
    (note,) = [p for p in plan.problems if "draft" in p.message]
    assert all(word in note.message for word in words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "target"}, "that name is the target's"),
        ({"name": "a/b"}, "not made of lower-case letters"),
        ({"name": ""}, "not made of lower-case letters"),
        ({"role": "target"}, "its role is 'target', wanted one of drafter, encoder, scorer"),
        ({"part": "scheduler.fair"}, "is run by a part 'drafter.NAME', not by 'scheduler.fair'"),
        ({"part": "drafter."}, "not by 'drafter.'"),
        ({"role": "scorer"}, "'reducer.NAME' or 'residency.NAME'"),
        ({"role": "oracle"}, "role is 'oracle'"),
        ({"op_layers": "toy"}, "its op_layers is 'toy'"),
    ],
)
def test_a_request_that_makes_no_sense_is_its_plugins_fault(planned, draft, change, words):
    said = refused(planned, asking("asker", request(draft, **change)))
    assert "lugin 'asker'" in said
    assert words in said


def test_something_else_than_a_request_is_refused(planned):
    assert "asks for the model 'x.gguf', wanted a ModelRequest" in refused(planned, asking("a", "x.gguf"))


def test_two_models_of_one_name_are_a_problem_naming_both(planned, draft, tmp_path):
    other = str(write_toy_model(tmp_path / "other.gguf"))
    second = asking("second", request(other), parts=("theirs",), after=("first",))
    said = refused(planned, second, asking("first", request(draft)))
    for word in ("plugin 'second'", "plugin 'first'", "other.gguf", "draft.gguf", "--plugin-block second"):
        assert word.lower() in said.lower()


@pytest.mark.parametrize("field", ["models.draft", "models.x"])
def test_what_a_model_is_cannot_be_patched_from_outside(planned, draft, field):
    def meddle(plan, devices):
        return [PlanPatch(field, "elsewhere.gguf", "because")]

    meddler = make_plugin("meddler", after=("asker",), luce_extend_plan=meddle)
    assert "is no field it may set" in refused(planned, asking("asker", request(draft)), meddler)


# --- shown


def test_the_banner_names_role_part_and_plugin(planned, draft):
    plan, registry = planned(asking("asker", request(draft)))
    for verbose in (True, False):
        out = io.StringIO()
        Console(file=out, width=300).print(render_plan(plan, registry, verbose=verbose))
        (line,) = [one for one in out.getvalue().splitlines() if one.startswith("draft, ")]
        for word in ("drafter model of drafter mine", "plugin 'asker'", draft, "toy", "on cpu"):
            assert word in line
        assert "state of draft" in out.getvalue()
