"""What the plugin declares: one scheduler and one option."""

from __future__ import annotations

from pydantic import BaseModel, Field

from luce_core.contracts import API, Equivalence, PartSpec, PluginInfo
from luce_core.hookspecs import hookimpl


class Options(BaseModel):
    """Becomes `--shortest-first-patience`, LUCE_SHORTEST_FIRST_PATIENCE and [shortest-first] patience."""

    patience: float = Field(
        0.01, gt=0, description="Seconds a prompt waits, per token it is longer, for one that came later."
    )


@hookimpl
def luce_plugin_info() -> PluginInfo:
    return PluginInfo(name="shortest-first", api=API, options=Options)


@hookimpl
def luce_register_schedulers() -> list[PartSpec]:
    return [
        PartSpec(
            kind="scheduler",
            name="shortest-first",
            factory="luce_shortest_first.scheduler:ShortestFirst",
            equivalence=Equivalence.BITS,
            summary="short prompts first, as far as longer ones have patience",
        )
    ]
