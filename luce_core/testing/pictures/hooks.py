"""The picture encoder as a plugin."""

from __future__ import annotations

from luce_core.contracts import API, ArchSpec, Equivalence, PartSpec, PluginInfo
from luce_core.hookspecs import hookimpl

HERE = "luce_core.testing.pictures"


@hookimpl
def luce_plugin_info() -> PluginInfo:
    return PluginInfo(name="pictures", api=API)


@hookimpl
def luce_register_archs() -> list[ArchSpec]:
    return [
        ArchSpec(
            names=("clip.pictures",),
            describe=f"{HERE}.model:describe",
            build=f"{HERE}.tower:build",
            encoder="pictures",
        )
    ]


@hookimpl
def luce_register_parts() -> list[PartSpec]:
    return [
        PartSpec(
            kind="encoder",
            name="pictures",
            factory=f"{HERE}.tower:make_encoder",
            equivalence=Equivalence.BITS,
            summary="squares of pixels through a matrix",
            processor=f"{HERE}.model:make_processor",
        )
    ]
