"""What the plugin declares. Imports no torch."""

from __future__ import annotations

from luce_core.contracts import API, ArchSpec, Equivalence, PartSpec, PluginInfo
from luce_core.hookspecs import hookimpl


@hookimpl
def luce_plugin_info() -> PluginInfo:
    return PluginInfo(name="deepseek4", api=API)


@hookimpl
def luce_register_archs() -> list[ArchSpec]:
    return [
        ArchSpec(
            names=("deepseek4",),
            describe="luce_arch_deepseek4.describe:describe",
            build="luce_arch_deepseek4.network:build",
            geometries="luce_arch_deepseek4.geometries:geometries",
            chat=("deepseek4",),
        ),
        ArchSpec(
            names=("deepseek41",),
            describe="luce_arch_deepseek4.v41_describe:describe",
            build="luce_arch_deepseek4.v41_network:build",
            geometries="luce_arch_deepseek4.v41_geometries:geometries",
            chat=("deepseek4",),
        ),
    ]


@hookimpl
def luce_register_parts() -> list[PartSpec]:
    return [
        PartSpec(
            kind="chat",
            name="deepseek4",
            factory="luce_arch_deepseek4.chat:make_format",
            equivalence=Equivalence.BITS,
            summary="think tags, calls in DSML, prompts without a template",
        )
    ]
