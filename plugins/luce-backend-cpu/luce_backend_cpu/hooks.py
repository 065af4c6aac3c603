"""What the plugin declares. Imports no torch."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import psutil

from luce_backend_cpu import compiler, machine
from luce_backend_cpu.options import CpuOptions
from luce_core.contracts import (
    API,
    CODECS,
    BackendPlan,
    DeviceInfo,
    Equivalence,
    OpImpl,
    OpLayer,
    PlanPatch,
    PluginInfo,
    Problem,
)
from luce_core.hookspecs import hookimpl

OP_LAYERS = "execution.op_layers"

C_OPS = (
    "pack_linear", "linear", "table_rows", "embed", "norm_linear", "linear_out", "gated_mlp", "attention",
    "head",
)  # fmt: skip
TORCH_OPS = ("pack_linear", "linear", "table_rows")
NATIVE_CODECS = ("q8_0",)
"""Of caches: those the C library reads and writes."""
PACKER, READERS = "pack_linear", ("linear", "table_rows")
"""Who packs weights, and who reads them whatever other ops are on."""


@hookimpl
def luce_plugin_info() -> PluginInfo:
    return PluginInfo(name="cpu", api=API, options=CpuOptions)


@hookimpl
def luce_register_devices() -> list[DeviceInfo]:
    cores = machine.physical_cores()
    return [
        DeviceInfo(
            id="cpu",
            name=f"{machine.cpu_name()}, {cores} {'core' if cores == 1 else 'cores'}",
            memory_bytes=psutil.virtual_memory().total,
            bandwidth_bytes_s=machine.read_bandwidth(),
            features=machine.features(machine.cpu_flags()),
            provenance="measured here: numpy reading 32 MiB per core; models that fit the caches are faster",
        )
    ]


@hookimpl
def luce_register_ops() -> list[OpLayer]:
    return [
        _c_layer(
            "cpu-c",
            "FAST",
            False,
            "two int8 terms per activation, bf16 or f32 panels, on the file's own bytes",
        ),
        _c_layer(
            "cpu-c-rows", "ROWS", True, "the same, every row by itself: bits do not depend on the batch",
        ),
        OpLayer(
            "cpu-torch",
            tuple(OpImpl(op, f"luce_backend_cpu.torch_tier:{op}", needs=_needs(op)) for op in TORCH_OPS),
            Equivalence.ROUNDING,
            frozenset({"cpu"}),
            "4-bit weights through torch's bf16 kernel, the rest as f32; needs no compiler",
        ),
    ]


def _c_layer(name: str, tier: str, row_invariant: bool, summary: str) -> OpLayer:
    whole = frozenset((*C_OPS, "cpu.region"))  # a region computes every one of them
    needs = {**{op: _needs(op) for op in C_OPS}, "cpu.region": whole - {"cpu.region"}, "*": whole}
    named, path = {"*": "rewrite", "cpu.region": "region"}, f"luce_backend_cpu.c_tier:{tier}"
    ops = [
        OpImpl(op, f"{path}.{named.get(op, op)}", row_invariant=row_invariant, needs=needed)
        for op, needed in needs.items()
    ]
    return OpLayer(name, tuple(ops), Equivalence.ROUNDING, frozenset({"cpu"}), summary)


def _needs(op: str) -> frozenset[str]:
    """Of an op of this plugin: packed weights are made for those that read them, and read by no others."""
    if op == PACKER:
        return frozenset(READERS)
    return frozenset() if op == "attention" else frozenset({PACKER})


@hookimpl
def luce_extend_plan(plan: BackendPlan) -> Sequence[PlanPatch]:
    if set(plan.models[0].layer_device) != {"cpu"}:
        return []
    tier, why = _tier(plan)
    deterministic = bool(plan.values["deterministic"])
    layers, what = {
        "c": (("cpu-c-rows",) if deterministic else ("cpu-c",), "C tier"),
        "torch": (() if deterministic else ("cpu-torch",), "torch tier"),
        "exact": ((), "exact tier: every weight as f32"),
    }[tier]
    if deterministic and tier == "torch":
        why += "; torch's 4-bit kernel depends on the batch, so --deterministic takes f32 instead"
    return [PlanPatch(OP_LAYERS, layers, f"{what}: {why}")]


def _tier(plan: BackendPlan) -> tuple[str, str]:
    """c, torch or exact, and why."""
    asked = plan.values["cpu.tier"]
    if plan.values["cpu.exact"]:
        return "exact", "--cpu-exact"
    if asked in ("torch", "exact"):
        return asked, f"--cpu-tier {asked}"
    built = compiler.library()
    if built.path is not None:
        return "c", built.reason
    return "torch", built.reason


@hookimpl
def luce_check_plan(plan: BackendPlan) -> Sequence[Problem]:
    if set(plan.models[0].layer_device) != {"cpu"}:
        return []
    asked, exact = plan.values["cpu.tier"], plan.values["cpu.exact"]
    if exact and asked not in ("auto", "exact"):
        return [
            Problem(
                f"--cpu-exact asks for the f32 reference and --cpu-tier {asked} for another tier.",
                "Drop one of the two.",
            )
        ]
    return [*_compiler(plan), *_caches(plan)]


def _uses_c(plan: BackendPlan) -> bool:
    return any(layer.startswith("cpu-c") for layer in plan.values[OP_LAYERS])


def _compiler(plan: BackendPlan) -> list[Problem]:
    """The C tier without a compiler."""
    if not _uses_c(plan) and plan.values["cpu.tier"] != "c":
        return []
    built = compiler.library()
    if built.path is None:
        return [
            Problem(
                f"The C tier of the CPU was asked for, but {built.reason}.",
                f"Install a C compiler for {platform.machine()} (gcc or clang), or choose --cpu-tier torch.",
            )
        ]
    return []


def _caches(plan: BackendPlan) -> list[Problem]:
    """A cache whose codes only the reference op reads."""
    native = NATIVE_CODECS if _uses_c(plan) else ()
    kinds = dict.fromkeys(plan.values[name] for name in ("cache.k_type", "cache.v_type"))
    left = [kind for kind in kinds if kind in CODECS and kind not in native]
    if not left:
        return []
    kept = " and ".join(left)
    message = f"Attention over a cache in {kept} is the reference op's here, slow in long texts."
    faster = f"f16 and {' and '.join(NATIVE_CODECS)} are read by the C tier; or keep it for its size."
    return [Problem(message, faster, fatal=False)]
