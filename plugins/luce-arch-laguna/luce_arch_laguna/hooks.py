"""What the plugin declares. Imports no torch."""

from __future__ import annotations

from luce_core.contracts import API, ArchSpec, Equivalence, PartSpec, PluginInfo
from luce_core.hookspecs import hookimpl


@hookimpl
def luce_plugin_info() -> PluginInfo:
    return PluginInfo(name="laguna", api=API)


@hookimpl
def luce_register_archs() -> list[ArchSpec]:
    return [
        ArchSpec(
            names=("laguna",),
            describe="luce_arch_laguna.describe:describe",
            build="luce_arch_laguna.network:build",
            geometries="luce_arch_laguna.geometries:geometries",
            chat=("laguna",),
        )
    ]


@hookimpl
def luce_register_parts() -> list[PartSpec]:
    return [
        PartSpec(
            kind="chat",
            name="laguna",
            factory="luce_arch_laguna.chat:make_format",
            equivalence=Equivalence.BITS,
            summary="think tags, calls in key and value tags",
        )
    ]
