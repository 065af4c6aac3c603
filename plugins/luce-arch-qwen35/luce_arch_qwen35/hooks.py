"""What the plugin declares. Imports no torch."""

from __future__ import annotations

from luce_core.contracts import API, ArchSpec, Equivalence, PartSpec, PluginInfo
from luce_core.hookspecs import hookimpl


@hookimpl
def luce_plugin_info() -> PluginInfo:
    return PluginInfo(name="qwen35", api=API)


@hookimpl
def luce_register_archs() -> list[ArchSpec]:
    return [
        ArchSpec(
            names=("qwen35", "qwen35moe"),
            describe="luce_arch_qwen35.describe:describe",
            build="luce_arch_qwen35.network:build",
            chat=("qwen35",),
        )
    ]


@hookimpl
def luce_register_parts() -> list[PartSpec]:
    return [
        PartSpec(
            kind="chat",
            name="qwen35",
            factory="luce_arch_qwen35.chat:make_format",
            equivalence=Equivalence.BITS,
            summary="think tags, calls in function and parameter tags",
        )
    ]
