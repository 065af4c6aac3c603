"""The op layers of a plan: each exists and runs on the device, and so do the ops that are switched off."""

from __future__ import annotations

from collections.abc import Sequence

from luce_core.contracts import DeviceInfo, OpLayer
from luce_core.errors import PluginError
from luce_core.op_layers import names_of, without
from luce_core.plan_fields import MODELS, REPORT, Fields
from luce_core.registry import Supplied, choices, closest

LAYERS, OFF = "execution.op_layers", "execution.ops_off"


def check_layers(fields: Fields, device: DeviceInfo | None) -> None:
    """Every op layer exists, runs on the device (if any), and keeps what `--deterministic` promises."""
    off = fields.values[OFF]
    another = "Choose another with --op-layer, or 'none' for the reference ops."
    used: list[OpLayer] = []
    for name in fields.values[LAYERS]:
        layer = _usable_layer(fields, name, fields.origin[LAYERS].by, device, another)
        used += [layer.value] if layer else []
        kept = without(layer.value, off).ops if layer else ()
        varying = sorted(impl.op for impl in kept if not impl.row_invariant)
        if layer and fields.values["deterministic"] and varying:
            fields.problem(
                f"Op layer {name!r} of {fields.registry.title(layer.plugin)} computes {choices(varying)} "
                "differently from batch to batch; --deterministic allows only ops whose result for a row "
                "depends on nothing but the row.",
                f"{another} Or drop --deterministic.",
            )
    for request in fields.values[MODELS]:
        by = fields.origin[f"{MODELS}.{request.name}"].by
        for name in request.op_layers or ():
            layer = _usable_layer(fields, name, f"model {request.name!r} of plugin {by!r}", device, REPORT)
            used += [layer.value] if layer else []
    _check_off(fields, used)


def _check_off(fields: Fields, used: Sequence[OpLayer]) -> None:
    """Every op that is switched off exists; one that no layer of the plan has is said."""
    here = {name for layer in used for name in names_of(layer)}
    known = here | {name for item in fields.registry.op_layers() for name in names_of(item.value)}
    by = fields.origin[OFF].by
    for name in fields.values[OFF]:
        if name not in known:
            ops = ", ".join(sorted(here or known))
            fields.problem(
                f"{by} switches op {name!r} off, which no op layer has.{closest(name, known)} There are "
                f"{ops}.",
                "Name one of them with --ops-off.",
            )
        elif name not in here:
            layers = ", ".join(layer.name for layer in used) or "none"
            fields.problem(
                f"{by} switches op {name!r} off, which no op layer of this plan ({layers}) has anyway.",
                "Leave it out of --ops-off.",
                fatal=False,
            )


def _usable_layer(
    fields: Fields, name: str, asker: str, device: DeviceInfo | None, fix: str
) -> Supplied[OpLayer] | None:
    """The layer, if it exists; reports that, and what it needs that the device lacks."""
    registry = fields.registry
    try:
        layer = registry.op_layer(name)
    except PluginError as error:
        fields.problem(f"{asker} asks for the op layer {name!r}. {error}", fix)
        return None
    missing = sorted(layer.value.features - device.features) if device else []
    if device and missing:
        who, has = f"Op layer {name!r} of {registry.title(layer.plugin)}", choices(device.features)
        fields.problem(f"{who} needs {choices(missing)}; device {device.id!r} has {has}.", fix)
    return layer
