"""What the plugin declares, and which tier a plan gets with which reason."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from luce_backend_cpu import compiler, hooks, lowering, machine
from luce_backend_cpu.compiler import Library

from luce_core.ops.namespace import KNOWN_OPS
from luce_core.registry import resolve
from luce_core.testing.plugin import PluginContract


class TestContract(PluginContract):
    hooks = "luce_backend_cpu.hooks"


def plan(device="cpu", **values):
    fields = {
        "cpu.tier": "auto", "cpu.exact": False, "deterministic": False, "execution.op_layers": (),
        "cache.k_type": "f16", "cache.v_type": "f16", **values,
    }
    return SimpleNamespace(models=(SimpleNamespace(layer_device=(device, device)),), values=fields)


@pytest.fixture(params=[True, False], ids=["compiler", "no compiler"])
def has_compiler(request, monkeypatch):
    found = Library(Path("x.so"), "compiled by gcc 12")
    if not request.param:
        found = Library(None, "no C compiler: 'cc' is not there")
    monkeypatch.setattr(compiler, "library", lambda: found)
    return request.param


@pytest.mark.parametrize(
    ("values", "with_compiler", "without", "words"),
    [
        ({}, ("cpu-c",), ("cpu-torch",), ""),
        ({"cpu.tier": "torch"}, ("cpu-torch",), ("cpu-torch",), "--cpu-tier torch"),
        ({"cpu.tier": "exact"}, (), (), "--cpu-tier exact"),
        ({"cpu.exact": True}, (), (), "--cpu-exact"),
        ({"deterministic": True}, ("cpu-c-rows",), (), ""),
    ],
)
def test_hook_luce_extend_plan(has_compiler, values, with_compiler, without, words):
    (patch,) = hooks.luce_extend_plan(plan(**values))
    assert patch.field == "execution.op_layers"
    assert patch.value == (with_compiler if has_compiler else without)
    assert words in patch.reason
    if not values:
        assert compiler.library().reason in patch.reason


def test_another_device_is_left_alone(has_compiler):
    assert hooks.luce_extend_plan(plan("cuda:0")) == []
    assert hooks.luce_check_plan(plan("cuda:0", **{"cpu.tier": "c"})) == []


def test_hook_luce_check_plan_asks_for_a_compiler_that_is_needed(has_compiler):
    for values in ({"cpu.tier": "c"}, {"execution.op_layers": ("cpu-c",)}):
        problems = hooks.luce_check_plan(plan(**values))
        assert bool(problems) is not has_compiler
        if problems:
            assert "'cc' is not there" in problems[0].message


@pytest.mark.parametrize(
    ("k_type", "v_type", "layer", "left"),
    [
        ("q8_0", "f16", "cpu-c", ""),
        ("bf16", "q8_0", "cpu-c-rows", ""),
        ("q8_0", "q4_0", "cpu-c", "q4_0"),
        ("tq3_0", "fp8", "cpu-c", "tq3_0 and fp8"),
        ("q8_0", "f16", "cpu-torch", "q8_0"),
    ],
)
def test_a_cache_the_reference_reads_is_said(monkeypatch, k_type, v_type, layer, left):
    monkeypatch.setattr(compiler, "library", lambda: Library(Path("x.so"), "compiled by gcc 12"))
    types = {"cache.k_type": k_type, "cache.v_type": v_type, "execution.op_layers": (layer,)}
    found = hooks.luce_check_plan(plan(**types))
    assert len(found) == bool(left)
    assert all(f"a cache in {left} is the reference op's" in problem.message for problem in found)
    assert not any(problem.fatal for problem in found)


def test_the_codecs_named_are_those_lowered():
    assert set(hooks.NATIVE_CODECS) == set(lowering.CACHE_CODECS)


def test_contradicting_options_are_a_problem(has_compiler):
    (problem,) = hooks.luce_check_plan(plan(**{"cpu.exact": True, "cpu.tier": "torch"}))
    assert "--cpu-exact" in problem.message
    assert "--cpu-tier torch" in problem.message


def test_hook_luce_register_devices():
    (device,) = hooks.luce_register_devices()
    assert device.id == "cpu"
    assert device.memory_bytes > 1 << 28
    assert 5e8 < device.bandwidth_bytes_s < 5e12
    assert "cpu" in device.features
    assert "measured" in device.provenance


def test_features_go_by_the_kernels_names():
    assert machine.features({"avx512_vnni", "fpu", "asimd"}) == {"cpu", "avx512_vnni", "neon"}


def test_hook_luce_register_ops():
    for layer in hooks.luce_register_ops():
        for impl in layer.ops:
            assert impl.op in KNOWN_OPS or impl.op in ("*", "cpu.region")
            assert callable(resolve(impl.fn, f"op {impl.op!r}"))
    deterministic = {
        layer.name: all(impl.row_invariant for impl in layer.ops) for layer in hooks.luce_register_ops()
    }
    assert deterministic == {"cpu-c": False, "cpu-c-rows": True, "cpu-torch": False}


def test_hook_luce_plugin_info():
    info = hooks.luce_plugin_info()
    assert info.name == "cpu"
    assert importlib.import_module("luce_backend_cpu.options").CpuOptions is info.options
