"""The dense model as a plugin."""

from __future__ import annotations

from luce_core.contracts import API, ArchSpec, PluginInfo
from luce_core.hookspecs import hookimpl

HERE = "luce_core.testing.dense"


@hookimpl
def luce_plugin_info() -> PluginInfo:
    return PluginInfo(name="dense", api=API)


@hookimpl
def luce_register_archs() -> list[ArchSpec]:
    return [
        ArchSpec(
            names=("dense",),
            describe=f"{HERE}.describe:describe",
            build=f"{HERE}.network:build",
            geometries=f"{HERE}.geometries:geometries",
        )
    ]
