"""What the plugin declares. Imports no torch."""

from __future__ import annotations

from pydantic import BaseModel, Field

from luce_core.contracts import API, Equivalence, PartSpec, PluginInfo
from luce_core.hookspecs import hookimpl


class Options(BaseModel):
    """Becomes `--@NAME@-FIELD`, the environment variable and the table [@NAME@] of a config file."""

    longest: int = Field(8, ge=1, le=1024, description="Candidates proposed at most.")


@hookimpl
def luce_plugin_info() -> PluginInfo:
    return PluginInfo(name="@NAME@", api=API, options=Options)


@hookimpl
def luce_register_drafters() -> list[PartSpec]:
    return [
        PartSpec(
            kind="drafter",
            name="@NAME@",
            factory="@MODULE@.drafter:make",
            equivalence=Equivalence.BITS,
            needs=frozenset({"chain"}),
            summary="what followed the same token before",
        )
    ]
