"""What the plugin declares. Imports no torch."""

from __future__ import annotations

from luce_core.contracts import API, ArchSpec, PluginInfo
from luce_core.hookspecs import hookimpl


@hookimpl
def luce_plugin_info() -> PluginInfo:
    return PluginInfo(name="glimmer", api=API)


@hookimpl
def luce_register_archs() -> list[ArchSpec]:
    return [ArchSpec(("glimmer",), "luce_arch_glimmer.describe:describe", "luce_arch_glimmer.network:build")]
