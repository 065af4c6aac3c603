"""What the plugin declares, and which layer a plan gets with which reason."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
from luce_backend_triton import devices, hooks, nvrtc, product
from luce_backend_triton.devices import Card
from luce_backend_triton.formats import BLOCKS, FORMATS

from luce_core.contracts import DeviceInfo
from luce_core.ops.namespace import KNOWN_OPS
from luce_core.registry import resolve

H200 = Card(0, "NVIDIA H200", 150_000_000_000, 132, (9, 0), 4.917e12)
OLD = Card(1, "GTX 1080", 8 << 30, 20, (6, 1), 0.0)


def plan(device="cuda:0", memory=24 << 30, **values):
    fields = {"triton.kernels": "auto", "deterministic": False, "execution.op_layers": (), **values}
    return SimpleNamespace(
        models=(SimpleNamespace(layer_device=(device, device)),), values=fields,
        devices=(DeviceInfo(device, "", memory, 1.0),),
    )  # fmt: skip


@pytest.fixture(params=["13.0", ""], ids=["NVRTC", "no NVRTC"])
def version(request, monkeypatch):
    monkeypatch.setattr(nvrtc, "compiler_version", lambda: request.param)
    return request.param


@pytest.fixture
def two_cards(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(devices, "cards", lambda: (H200, OLD))


@pytest.mark.parametrize(
    ("values", "with_nvrtc", "without", "words"),
    [
        ({}, ("triton",), ("triton-portable",), "NVRTC"),
        ({"triton.kernels": "triton"}, ("triton-portable",), ("triton-portable",), "--triton-kernels triton"),
        ({"triton.kernels": "cuda"}, ("triton",), ("triton",), "CUDA C++"),
        ({"deterministic": True}, (), (), "--deterministic"),
    ],
)
def test_hook_luce_extend_plan(version, values, with_nvrtc, without, words):
    patch, *graphs = hooks.luce_extend_plan(plan(**values))
    assert [one.value for one in graphs] == ([] if "deterministic" in values else [("cuda-graphs",)])
    assert patch.field == "execution.op_layers"
    assert patch.value == (with_nvrtc if version else without)
    assert words in patch.reason


@pytest.mark.parametrize(("gib", "rows"), [(24, None), (32, None), (40, 2048), (140, 2048)])
def test_chunks_are_long_where_there_is_room(version, gib, rows):
    patches = hooks.luce_extend_plan(plan(memory=gib << 30))
    assert [one.value for one in patches if one.field == "engine.row_budget"] == [rows] * bool(rows)


def test_hook_luce_register_parts():
    (part,) = hooks.luce_register_parts()
    assert (part.kind, part.name) == ("executor", "cuda-graphs")
    assert callable(resolve(part.factory, "executor"))


def test_another_device_is_left_alone(version):
    assert hooks.luce_extend_plan(plan("cpu")) == []
    assert hooks.luce_check_plan(plan("cpu", **{"execution.op_layers": ("triton",)})) == []


def test_hook_luce_check_plan_asks_for_a_compiler_that_is_needed(version):
    problems = hooks.luce_check_plan(plan(**{"execution.op_layers": ("triton",)}))
    assert bool(problems) is not bool(version)
    assert all("NVRTC" in problem.message for problem in problems)
    assert not hooks.luce_check_plan(plan(**{"execution.op_layers": ("triton-portable",)}))


def test_hook_luce_register_devices(two_cards):
    new, old = hooks.luce_register_devices()
    assert (new.id, old.id) == ("cuda:0", "cuda:1")
    assert {"triton", "sm_90", "cuda"} <= new.features
    assert "triton" not in old.features
    assert new.bandwidth_bytes_s == pytest.approx(0.89 * 4.917e12)
    assert "bus width" in new.provenance
    assert old.bandwidth_bytes_s == 0
    assert "no memory clock" in old.provenance


def test_a_measured_bandwidth_replaces_the_data_sheets(two_cards):
    devices.keep_measured(H200.key, 4.4e12)
    devices.keep_measured(OLD.key, 2.5e11)
    new, old = hooks.luce_register_devices()
    assert (new.bandwidth_bytes_s, old.bandwidth_bytes_s) == (4.4e12, 2.5e11)
    assert "measured" in new.provenance
    assert (new.flops_s, new.flops_provenance) == (0.0, "")
    devices.keep_measured(H200.key, 7e14, "products")
    assert hooks.luce_register_devices()[0].flops_s == 7e14
    assert devices.read_measured() == {H200.key: 4.4e12, OLD.key: 2.5e11}


def test_without_a_driver_there_are_no_devices(monkeypatch):
    monkeypatch.setattr(nvrtc, "driver", lambda: None)
    devices.cards.cache_clear()
    try:
        assert devices.cards() == ()
        assert hooks.luce_register_devices() == []
    finally:
        devices.cards.cache_clear()


def test_hook_luce_register_ops():
    for layer in hooks.luce_register_ops():
        assert layer.features == {"triton"}
        kept = [fmt.bits_per_weight * BLOCKS[name][0] / 8 / BLOCKS[name][1] for name, fmt in FORMATS.items()]
        assert max(kept) <= layer.weight_share < max(kept) + 0.01
        assert layer.scratch_bytes == product.SCRATCH_BYTES
        for impl in layer.ops:
            assert impl.op in KNOWN_OPS
            assert not impl.row_invariant
            assert callable(resolve(impl.fn, f"op {impl.op!r}"))


def test_hook_luce_plugin_info():
    info = hooks.luce_plugin_info()
    assert info.name == "triton"
    assert importlib.import_module("luce_backend_triton.options").TritonOptions is info.options
