"""What the plugin declares. Imports no torch."""

from __future__ import annotations

from luce_core.contracts import API, ArchSpec, Equivalence, PartSpec, PluginInfo
from luce_core.hookspecs import hookimpl


@hookimpl
def luce_plugin_info() -> PluginInfo:
    return PluginInfo(name="qwen3", api=API)


@hookimpl
def luce_register_archs() -> list[ArchSpec]:
    return [
        ArchSpec(
            names=("qwen3", "qwen3moe"),
            describe="luce_arch_qwen3.describe:describe",
            build="luce_arch_qwen3.network:build",
            geometries="luce_arch_qwen3.geometries:geometries",
            chat=("qwen3",),
        )
    ]


@hookimpl
def luce_register_parts() -> list[PartSpec]:
    return [
        PartSpec(
            kind="chat",
            name="qwen3",
            factory="luce_arch_qwen3.chat:make_format",
            equivalence=Equivalence.BITS,
            summary="think tags, calls as JSON or in Coder's tags",
        )
    ]
