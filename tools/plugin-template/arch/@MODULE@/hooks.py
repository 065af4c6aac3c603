"""What the plugin declares. Imports no torch."""

from __future__ import annotations

from luce_core.contracts import API, ArchSpec, PluginInfo
from luce_core.hookspecs import hookimpl


@hookimpl
def luce_plugin_info() -> PluginInfo:
    return PluginInfo(name="@NAME@", api=API)


@hookimpl
def luce_register_archs() -> list[ArchSpec]:
    return [ArchSpec(("@NAME@",), "@MODULE@.describe:describe", "@MODULE@.network:build")]
