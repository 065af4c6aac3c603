"""Op layers with ops switched off (`--ops-off`), and made ready for a device."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from attrs import evolve

from luce_core.contracts import DeviceInfo, OpLayer
from luce_core.registry import guarded, resolve


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


def prepare(layer: OpLayer, title: str, device: DeviceInfo, options: Any) -> None:
    """Call the layer's `prepare`, if it has one. title: the plugin's; options: its own. UsageError comes
    through.
    """
    if layer.prepare:
        subject = f"Op layer {layer.name!r} of {title}"
        call = resolve(layer.prepare, subject)
        guarded(f"{subject}: its {layer.prepare!r}", partial(call, device, options))
