"""What `luce-core plan` prints: parts and their plugins, memory by claimant, roofline, what stayed out."""

import io

import pytest
from attrs import evolve
from rich.console import Console

from luce_core.contracts import Equivalence, PlanPatch, QuantFormat
from luce_core.errors import PluginError
from luce_core.options import load_options
from luce_core.plan import block_formats, make_plan
from luce_core.plan_render import render_plan, roofline_lines, stayed_out
from luce_core.plugins import from_modules
from luce_core.testing.fake_plugins import make_plugin

from .conftest import CPU, guess


def tune(plan, devices):
    return [PlanPatch("threads", 6, "six cores")]


def tight(plan, devices):
    return [PlanPatch("context", 64, "small is fast")]


@pytest.fixture
def planned(arch, model):
    plugins = [
        arch(),
        make_plugin("tuner", luce_extend_plan=tune),
        make_plugin("tighter", luce_extend_plan=tight),
        make_plugin("idle", luce_register_drafters=[guess()]),
    ]
    registry = from_modules(plugins)
    options = load_options(registry, {"ctx_size": 1024, "op_layer": ("fast",)}, {}, [])
    return make_plan(options, model(), registry, [CPU]), registry


def text(renderable):
    out = io.StringIO()
    Console(file=out, width=200).print(renderable)
    return out.getvalue()


def line(shown, *words):
    found = [item for item in shown.splitlines() if all(word in item for word in words)]
    assert len(found) == 1, (words, found)
    return found[0]


def test_ops_that_are_off_are_said(arch, model):
    registry = from_modules([arch()])
    said = "Op layer 'fast' leaves pack_linear to what lies below"
    for off, words in ((("pack_linear",), said), ((), None)):
        options = load_options(registry, {"op_layer": ("fast",), "ops_off": off}, {}, [])
        plan = make_plan(options, model(), registry, [CPU])
        for verbose in (True, False):
            shown = text(render_plan(plan, registry, verbose=verbose))
            assert (words in shown) if words else ("lies below" not in shown)


def test_every_part_is_named_with_its_plugin_and_class(planned):
    shown = text(render_plan(*planned))
    assert "glim" in line(shown, "arch", "the model itself")
    assert Equivalence.ROUNDING.value in line(shown, "ops", "fast", "glim")
    assert "same bits" in line(shown, "scheduler", "fair", "luce-core 0.1.0")
    assert "model.gguf: glim, 0.0 M parameters" in shown


def test_what_stays_in_the_file_is_said(arch, model):
    registry = from_modules([arch()])
    options = load_options(registry, {"ctx_size": 64}, {}, [])
    shown = text(render_plan(make_plan(options, model(tables=2), registry, [CPU]), registry))
    said = "2,000,000.0 M parameters more in 2 tables stay in the file, 1862.6 GiB, and are read by row."
    assert said in " ".join(shown.split())


def test_every_claim_is_a_line_and_the_total_adds_up(planned):
    plan, registry = planned
    shown = text(render_plan(plan, registry))
    for claim in plan.claims:
        line(shown, claim.owner, claim.kind, claim.device)
    total = sum(claim.num_bytes for claim in plan.claims)
    assert f"{total / 2**20:.2f} MiB" in line(shown, "total", "cpu")
    assert "Memory of cpu, at most 870.4 MiB" in shown


def test_a_bandwidth_nobody_knows_bounds_nothing(arch, model):
    registry = from_modules([arch()])
    blank = evolve(CPU, bandwidth_bytes_s=0.0, provenance="measured when a model is first loaded")
    plan = make_plan(load_options(registry, {}, {}, []), model(), registry, [blank])
    said = "What memory bandwidth allows is not known: that of cpu is measured when a model is first loaded."
    assert roofline_lines(plan) == [said]


def test_the_roofline_names_bandwidth_and_its_source(planned):
    shown = text(render_plan(*planned))
    assert "Memory bandwidth allows 50,000,000 tokens/s for one sequence 0 tokens deep" in shown
    deep = line(shown, "1,024 tokens deep")
    assert "1000 B of weights and 128.0 KiB of state per token at 50.0 GB/s of cpu (measured in a" in deep


def test_the_bound_of_prompts_is_shown_where_the_device_has_a_figure(planned):
    plan, registry = planned
    assert "Arithmetic" not in text(render_plan(plan, registry))
    able = [evolve(device, flops_s=1e12, flops_provenance="measured in a test") for device in plan.devices]
    shown = text(render_plan(evolve(plan, devices=tuple(able)), registry))
    deep = line(shown, "Arithmetic allows 1,000,000,000 tokens/s of prompts")
    assert "0.00 G weights at 1 TFLOP/s of cpu (measured in a test)" in deep


def test_every_field_is_shown_with_who_set_it(planned):
    plan, registry = planned
    shown = text(render_plan(plan, registry))
    for name in plan.values:
        assert f"{name} " in shown, name
    assert "plugin tuner" in line(shown, "threads ", "six cores")
    assert "--ctx-size" in line(shown, "context ", "1024 ")
    banner = text(render_plan(plan, registry, verbose=False))
    assert "six cores" not in banner
    assert "4 sequences; target/full: 136 blocks of 32 tokens" in shown
    assert "Memory bandwidth allows" in banner


def test_what_stayed_out_has_a_reason(planned):
    shown = text(render_plan(*planned))
    assert "Plugin 'tighter' sets context to 64 (small is fast); --ctx-size keeps it at 1024." in shown
    assert "To let the plugin decide, remove --ctx-size." in shown
    assert "Plugin 'idle' has no part in this plan; it offers --drafter guess." in shown
    assert "'tuner' has no part" not in shown
    assert [sentence.split("'")[1] for sentence in stayed_out(*planned)] == ["idle", "tighter"]


def test_a_plugin_that_is_not_loaded_is_shown_with_its_reason(planned):
    from attrs import evolve

    plan, registry = planned
    record = evolve(registry.record("idle"), status="broken", reason="importing it raised OSError: no")
    others = tuple(item for item in registry.records if item.name != "idle")
    shown = text(render_plan(plan, evolve(registry, records=(*others, record))))
    assert "Plugin 'idle' is broken: importing it raised OSError: no." in shown


# --- block formats of plugins


def test_block_formats_of_plugins_are_added_to_the_cores(made_up_module):
    own = QuantFormat("OWN", 4242, 32, 20, "made_up_glim:describe")
    formats = block_formats(from_modules([make_plugin("q", luce_register_quants=[own])]))
    assert (formats.by_id(4242).name, formats.by_name("OWN").block_bytes) == ("OWN", 20)
    assert formats.by_name("Q4_K").block_weights == 256
    clash = QuantFormat("OWN", 0, 32, 20, "made_up_glim:describe")
    with pytest.raises(PluginError, match="clashes"):
        block_formats(from_modules([make_plugin("q", luce_register_quants=[clash])]))
