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
            geometries="luce_arch_qwen35.geometries:geometries",
            chat=("qwen35",),
        ),
        ArchSpec(
            names=("clip.qwen3vl_merger",),
            describe="luce_arch_qwen35.vision:describe_vision",
            build="luce_arch_qwen35.tower:build_vision",
            encoder="qwen3vl",
        ),
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
        ),
        PartSpec(
            kind="encoder",
            name="qwen3vl",
            factory="luce_arch_qwen35.tower:make_encoder",
            equivalence=Equivalence.BITS,
            summary="images to rows of the prompt",
            processor="luce_arch_qwen35.images:make_processor",
        ),
    ]
