"""A plugin of one drafter: `nextn-chain` runs the target's MTP block, whatever the target is. Torch-free."""

from __future__ import annotations

from typing import Any

from luce_core.contracts import API, Equivalence, Field, ModelSpec, PartSpec, PluginInfo, Slot, StateLayout
from luce_core.hookspecs import hookimpl

KEPT = "final"
"""The slot with the final of the newest committed token."""


@hookimpl
def luce_plugin_info() -> PluginInfo:
    return PluginInfo(name="nextn-chain", api=API)


@hookimpl
def luce_register_drafters() -> list[PartSpec]:
    return [
        PartSpec(
            "drafter",
            "nextn-chain",
            "luce_core.testing.nextn_drafter:NextnDrafter",
            Equivalence.BITS,
            needs=frozenset({"nextn"}),
            summary="the best guess of the target's MTP block, again and again",
            layout=f"{__name__}:layout",
        )
    ]


def layout(target: ModelSpec, options: Any) -> StateLayout:
    """The final of one token per sequence."""
    width = target.final_width
    slot = Slot(KEPT, 0, Field((1, width), "f32"), {"row": Field((width,), "f32")}, "shift")
    return StateLayout((), (), (slot,), best_effort=True)
