"""Op layers with ops switched off (`--ops-off`), and made ready for a device."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from attrs import evolve

from luce_core.contracts import DeviceInfo, OpLayer
from luce_core.registry import Registry, Supplied, guarded, resolve


def names_of(layer: OpLayer) -> list[str]:
    """How `--ops-off` may name the ops of a layer: "attention" of every layer, "triton.attention" of one."""
    return [name for impl in layer.ops for name in (impl.op, f"{layer.name}.{impl.op}")]


def gone(layer: OpLayer, off: Collection[str]) -> set[str]:
    """The ops of a layer that are off: those `off` names, and those that need one of them."""
    found = {impl.op for impl in layer.ops if impl.op in off or f"{layer.name}.{impl.op}" in off}
    while more := {impl.op for impl in layer.ops if impl.op not in found and impl.needs & found}:
        found |= more
    return found


def without(layer: OpLayer, off: Collection[str]) -> OpLayer:
    """The layer as it is used: what lies below computes the ops that are off."""
    dropped = gone(layer, off)
    return evolve(layer, ops=tuple(impl for impl in layer.ops if impl.op not in dropped))


def prepare(layer: Supplied[OpLayer], registry: Registry, device: DeviceInfo, options: Any) -> None:
    """Call the layer's `prepare`, if it has one. options: those of its plugin. UsageError comes through."""
    if layer.value.prepare:
        subject = f"Op layer {layer.value.name!r} of {registry.title(layer.plugin)}"
        call = resolve(layer.value.prepare, subject)
        guarded(f"{subject}: its {layer.value.prepare!r}", partial(call, device, options))
