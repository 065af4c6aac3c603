"""What the plugin declares. Imports no torch."""

from __future__ import annotations

from luce_core.contracts import API, ArchSpec, Equivalence, PartSpec, PluginInfo
from luce_core.hookspecs import hookimpl


@hookimpl
def luce_plugin_info() -> PluginInfo:
    return PluginInfo(name="llama", api=API)


@hookimpl
def luce_register_archs() -> list[ArchSpec]:
    return [
        ArchSpec(
            names=("llama", "qwen2"),
            describe="luce_arch_llama.describe:describe",
            build="luce_arch_llama.network:build",
            geometries="luce_arch_llama.geometries:geometries",
            chat=("llama",),
        )
    ]


@hookimpl
def luce_register_parts() -> list[PartSpec]:
    return [
        PartSpec(
            kind="chat",
            name="llama",
            factory="luce_arch_llama.chat:make_format",
            equivalence=Equivalence.BITS,
            summary="calls as the template shows them, Llama 3's bare JSON",
        )
    ]
