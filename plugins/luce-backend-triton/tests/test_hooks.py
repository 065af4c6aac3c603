"""What the plugin declares, and which layer a plan gets with which reason."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
from luce_backend_triton import devices, hooks, memory, nvrtc, product
from luce_backend_triton.devices import Card
from luce_backend_triton.formats import BLOCKS, FORMATS, blocks_of, tiles_of
from luce_backend_triton.options import TritonOptions
from pydantic import ValidationError

from luce_core import op_layers
from luce_core.contracts import DeviceInfo, Provenance
from luce_core.ops.namespace import KNOWN_OPS
from luce_core.registry import resolve

H200 = Card(0, "NVIDIA H200", 150_000_000_000, 132, (9, 0), 4.917e12)
OLD = Card(1, "GTX 980", 4 << 30, 16, (5, 2), 0.0)


def plan(device="cuda:0", memory=24 << 30, arch="sm_90", **values):
    fields = {
        "triton.kernels": "auto", "deterministic": False, "execution.op_layers": (), "cache.k_type": "f16",
        "cache.v_type": "f16", **values,
    }  # fmt: skip
    tags = {arch, "cuda", *(["triton"] if arch != "sm_52" else [])}
    return SimpleNamespace(
        models=(SimpleNamespace(layer_device=(device, device)),), values=fields,
        devices=(DeviceInfo(device, "a card", memory, 1.0, frozenset(tags)),),
        origin={name: Provenance("cli", f"--{name}") for name in fields},
    )  # fmt: skip


@pytest.fixture(params=["13.0", ""], ids=["NVRTC", "no NVRTC"])
def version(request, monkeypatch):
    monkeypatch.setattr(nvrtc, "compiler_version", lambda arch: request.param)
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
        ({"deterministic": True}, ("triton-invariant",), ("triton-invariant-portable",), "--deterministic"),
        (
            {"deterministic": True, "triton.kernels": "triton"},
            ("triton-invariant-portable",),
            ("triton-invariant-portable",),
            "--triton-kernels triton",
        ),
    ],
)
def test_hook_luce_extend_plan(version, values, with_nvrtc, without, words):
    patch, *graphs = hooks.luce_extend_plan(plan(**values))
    assert [one.value for one in graphs] == [("cuda-graphs",)]
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


@pytest.mark.parametrize("layer", ["triton", "triton-invariant"])
def test_hook_luce_check_plan_asks_for_a_compiler_that_is_needed(version, layer):
    problems = hooks.luce_check_plan(plan(**{"execution.op_layers": (layer,)}))
    assert bool(problems) is not bool(version)
    assert all(repr(layer) in problem.message for problem in problems)
    assert all("NVRTC" in problem.message for problem in problems)
    assert not hooks.luce_check_plan(plan(**{"execution.op_layers": ("triton-portable",)}))


def test_hook_luce_register_devices(two_cards):
    new, old = hooks.luce_register_devices(None)
    assert (new.id, old.id) == ("cuda:0", "cuda:1")
    assert {"triton", "sm_90", "cuda"} <= new.features
    assert "triton" not in old.features
    assert old.rank < 0 < new.rank
    assert new.bandwidth_bytes_s == pytest.approx(0.89 * 4.917e12)
    assert "bus width" in new.provenance
    assert old.bandwidth_bytes_s == 0
    assert "no memory clock" in old.provenance


def test_a_measured_bandwidth_replaces_the_data_sheets(two_cards):
    devices.keep_measured(H200.key, 4.4e12)
    devices.keep_measured(OLD.key, 2.5e11)
    new, old = hooks.luce_register_devices(None)
    assert (new.bandwidth_bytes_s, old.bandwidth_bytes_s) == (4.4e12, 2.5e11)
    assert "measured" in new.provenance
    assert (new.flops_s, new.flops_provenance) == (0.0, "")
    devices.keep_measured(H200.key, 7e14, "products")
    assert hooks.luce_register_devices(None)[0].flops_s == 7e14
    assert devices.read_measured() == {H200.key: 4.4e12, OLD.key: 2.5e11}


def test_a_card_is_taken_for_an_older_one(two_cards):
    new, old = hooks.luce_register_devices(TritonOptions(capability="7.5"))
    assert {"sm_75", "triton"} <= new.features & old.features
    assert "NVIDIA H200, taken for an older one by --triton-capability, compute capability 7.5" in new.name
    assert new.memory_bytes == H200.memory_bytes
    same, _ = hooks.luce_register_devices(TritonOptions(capability="9.0"))
    assert same.name == "NVIDIA H200, compute capability 9.0"


@pytest.mark.parametrize("text", ["7", "sm_75", "7.55", "-7.5", " 7.5"])
def test_what_is_no_capability_is_refused(text):
    with pytest.raises(ValidationError, match=r"no compute capability; wanted one such as 7\.5"):
        TritonOptions(capability=text)


@pytest.mark.parametrize(
    ("arch", "words"),
    [
        ("sm_61", ("compute capability 6.1", "integer products", "without tensor cores", "f16 or f32")),
        ("sm_70", ("compute capability 7.0", "integer products", "without tensor cores")),
        ("sm_75", ("compute capability 7.5: attention and DeltaNet without tensor cores",)),
        ("sm_86", ()),
    ],
)
def test_the_plan_says_what_an_older_card_does_otherwise(version, arch, words):
    patch = hooks.luce_extend_plan(plan(arch=arch))[0]
    if version:
        assert all(word in patch.reason for word in words)
        assert ("compute capability" in patch.reason) is bool(words)
    else:
        assert f"no NVRTC for {arch}" in patch.reason


def test_a_card_without_kernels_is_said_in_one_sentence(version):
    old = plan(arch="sm_52")
    assert hooks.luce_extend_plan(old) == []
    (problem,) = hooks.luce_check_plan(old)
    assert problem.fatal
    assert "a card; its kernels need 6.1" in problem.message
    assert "--device cpu" in problem.fix


@pytest.mark.parametrize(("arch", "noted"), [("sm_75", True), ("sm_80", False)])
def test_a_cache_in_bf16_is_noted_where_nothing_multiplies_it(version, arch, noted):
    found = hooks.luce_check_plan(plan(arch=arch, **{"cache.k_type": "bf16"}))
    assert [problem.fatal for problem in found] == [False] * noted
    assert all("--cache.k_type wants the cache in bf16, for its range" in one.message for one in found)
    assert not hooks.luce_check_plan(plan(arch=arch))


def test_without_a_driver_there_are_no_devices(monkeypatch):
    monkeypatch.setattr(nvrtc, "driver", lambda: None)
    devices.cards.cache_clear()
    try:
        assert devices.cards() == ()
        assert hooks.luce_register_devices(None) == []
        (planned,) = hooks.luce_register_devices(TritonOptions(capability="8.6"))
        assert "one to plan for (--triton-capability), compute capability 8.6" in planned.name
        assert {"sm_86", "triton"} <= planned.features
        assert planned.memory_bytes == 24 << 30
    finally:
        devices.cards.cache_clear()


def test_hook_luce_register_ops():
    for layer in hooks.luce_register_ops():
        assert layer.features == {"triton"}
        kept = resolve(layer.kept, "bytes it keeps")
        for name, fmt in FORMATS.items():
            weights, in_file = BLOCKS[name]
            assert kept(name, 512) == fmt.bits_per_weight * weights / 8 / in_file
        assert layer.scratch_bytes == product.SCRATCH_BYTES
        for impl in layer.ops:
            assert impl.op in KNOWN_OPS or impl.op in REWRITTEN
            assert impl.row_invariant is layer.name.startswith("triton-invariant")
            assert callable(resolve(impl.fn, f"op {impl.op!r}"))
        assert len(layer.self_checks) == 3
        assert all(callable(resolve(named, f"layer {layer.name!r}")) for named in layer.self_checks)


REWRITTEN = {"*", "triton.linear_out", "triton.gated_mlp"}


def test_programs_are_rewritten_for_the_layer_of_cuda_alone():
    """Portable products leave nothing ready, and rows of invariant ones must not know others."""
    found = {layer.name: {impl.op for impl in layer.ops} & REWRITTEN for layer in hooks.luce_register_ops()}
    assert found.pop("triton") == REWRITTEN
    assert not any(found.values())


@pytest.mark.parametrize(
    ("off", "more"),
    [
        (["linear_out"], {"triton.linear_out"}),
        (["triton.linear_out"], {"linear_out"}),
        (["gated_mlp"], {"triton.gated_mlp"}),
        (["linear_out", "gated_mlp"], {"triton.linear_out", "triton.gated_mlp"}),
        (["norm_linear"], set()),
        (["attention"], set()),
        (["pack_linear"], {*hooks.OPS, "triton.linear_out", "triton.gated_mlp"}),
        (["table_rows"], {*hooks.OPS, "triton.linear_out", "triton.gated_mlp"}),
    ],
)
def test_an_op_that_is_off_takes_its_own_for_rewritten_programs_with_it(off, more):
    layer = next(one for one in hooks.luce_register_ops() if one.name == "triton")
    assert op_layers.gone(layer, off) == {*more, *off}
    left = {impl.op for impl in op_layers.without(layer, off).ops}
    assert left == {impl.op for impl in layer.ops} - {*more, *off}
    assert "*" in left


def test_the_plan_counts_the_bytes_of_records():
    """As packing allocates them; formats without a record are kept as f16, numbers as they are."""
    for name, cols in (("Q4_K", 1024), ("Q8_0", 576), ("Q4_0", 96)):
        weights, in_file = BLOCKS[name]
        records = tiles_of(64) * blocks_of(cols) * FORMATS[name].record_bytes
        assert memory.kept(name, cols) * (64 * cols // weights * in_file) == pytest.approx(records)
    assert memory.kept("Q3_K", 256) * 110 == pytest.approx(2 * 256)
    assert {memory.kept(name, 100) for name in ("F32", "F16", "BF16", "I32")} == {1.0}


def test_hook_luce_plugin_info():
    info = hooks.luce_plugin_info()
    assert info.name == "triton"
    assert importlib.import_module("luce_backend_triton.options").TritonOptions is info.options
