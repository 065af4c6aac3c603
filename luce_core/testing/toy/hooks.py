"""The toy as a plugin: an architecture, a device, and the op its state folds with."""

from __future__ import annotations

from luce_core.contracts import (
    API,
    ArchSpec,
    BackendPlan,
    DeviceInfo,
    Equivalence,
    OpImpl,
    OpLayer,
    PlanPatch,
    PluginInfo,
)
from luce_core.hookspecs import hookimpl


@hookimpl
def luce_plugin_info() -> PluginInfo:
    return PluginInfo(name="toy", api=API)


@hookimpl
def luce_register_devices() -> list[DeviceInfo]:
    return [
        DeviceInfo(
            id="cpu",
            name="toy device",
            memory_bytes=1 << 30,
            bandwidth_bytes_s=1e9,
            features=frozenset({"cpu"}),
            provenance="made up for tests",
        )
    ]


@hookimpl
def luce_register_archs() -> list[ArchSpec]:
    return [
        ArchSpec(("toy",), "luce_core.testing.toy.describe:describe", "luce_core.testing.toy.network:build")
    ]


@hookimpl
def luce_register_ops() -> list[OpLayer]:
    return [
        OpLayer(
            "toy",
            (OpImpl("toy.fold", "luce_core.testing.toy.network:fold", row_invariant=True),),
            Equivalence.BITS,
            frozenset({"cpu"}),
            "the toy's rolling hash",
        )
    ]


@hookimpl
def luce_extend_plan(plan: BackendPlan) -> list[PlanPatch]:
    if plan.models[0].spec.arch != "toy":
        return []
    return [PlanPatch("execution.op_layers", ("toy",), "toy models fold with the toy's op")]
