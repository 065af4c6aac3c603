"""The core's own declarations, made through the same hooks as everyone's: the plugin called "core"."""

from __future__ import annotations

from luce_core.catalog.entries import ENTRIES
from luce_core.contracts import API, CatalogEntry, Equivalence, PartSpec, PluginInfo
from luce_core.hookspecs import hookimpl


@hookimpl
def luce_plugin_info() -> PluginInfo:
    """The core itself; its options are `core_options.CoreOptions`, without a prefix."""
    return PluginInfo(name="core", api=API)


@hookimpl
def luce_register_schedulers() -> list[PartSpec]:
    """Continuous batching, first come first served by priority."""
    return [
        PartSpec(
            kind="scheduler",
            name="fair",
            factory="luce_core.engine.scheduler:make_scheduler",
            equivalence=Equivalence.BITS,
            summary="decode rows first, the rest of the step for prompts in order of arrival",
        )
    ]


@hookimpl
def luce_register_parts() -> list[PartSpec]:
    """Steps run one after another, as plain calls; chat formats for files whose family names none."""
    return [
        PartSpec(
            kind="executor",
            name="eager",
            factory="luce_core.engine.executor:make_executor",
            equivalence=Equivalence.BITS,
            summary="every step as plain calls on the engine's thread",
        ),
        PartSpec(
            kind="chat",
            name="auto",
            factory="luce_core.text.chat_formats.choose:auto",
            equivalence=Equivalence.BITS,
            summary="thoughts and calls as the file's template and vocabulary show them",
        ),
        PartSpec(
            kind="chat",
            name="plain",
            factory="luce_core.text.chat_formats.choose:plain",
            equivalence=Equivalence.BITS,
            summary="thoughts and calls stay text",
        ),
    ]


@hookimpl
def luce_register_catalog() -> list[CatalogEntry]:
    """The default model and another small one."""
    return list(ENTRIES)
