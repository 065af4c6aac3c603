"""What the plugin declares. Imports no torch."""

from __future__ import annotations

from luce_core.contracts import API, ArchSpec, Equivalence, PartSpec, PluginInfo
from luce_core.hookspecs import hookimpl


@hookimpl
def luce_plugin_info() -> PluginInfo:
    return PluginInfo(name="gemma", api=API)


@hookimpl
def luce_register_archs() -> list[ArchSpec]:
    return [
        ArchSpec(
            names=("gemma3", "gemma4"),
            describe="luce_arch_gemma.describe:describe",
            build="luce_arch_gemma.network:build",
            geometries="luce_arch_gemma.geometries:geometries",
            chat=("gemma",),
        )
    ]


@hookimpl
def luce_register_parts() -> list[PartSpec]:
    return [
        PartSpec(
            kind="chat",
            name="gemma",
            factory="luce_arch_gemma.chat:make_format",
            equivalence=Equivalence.BITS,
            summary="channels and calls of Gemma 4",
        )
    ]
