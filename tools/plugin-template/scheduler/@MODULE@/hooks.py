"""What the plugin declares. Imports no torch."""

from __future__ import annotations

from luce_core.contracts import API, Equivalence, PartSpec, PluginInfo
from luce_core.hookspecs import hookimpl


@hookimpl
def luce_plugin_info() -> PluginInfo:
    return PluginInfo(name="@NAME@", api=API)


@hookimpl
def luce_register_schedulers() -> list[PartSpec]:
    return [
        PartSpec(
            kind="scheduler",
            name="@NAME@",
            factory="@MODULE@.scheduler:make",
            equivalence=Equivalence.BITS,
            summary="in order of arrival",
        )
    ]
