"""A plugin of drafters for toys: one with a model of its own, one with nothing but state."""

from __future__ import annotations

from pydantic import BaseModel, Field

from luce_core.contracts import (
    API,
    BackendPlan,
    Equivalence,
    ModelRequest,
    PartSpec,
    PlanPatch,
    PluginInfo,
)
from luce_core.hookspecs import hookimpl

MODULE = "luce_core.testing.toy.drafter"


class ToyDraftOptions(BaseModel):
    """`--toy-draft-model FILE`."""

    model: str = Field("", description="The file of the draft model.")


@hookimpl
def luce_plugin_info() -> PluginInfo:
    return PluginInfo(name="toy-draft", api=API, options=ToyDraftOptions, after=("toy",))


@hookimpl
def luce_register_drafters() -> list[PartSpec]:
    return [
        PartSpec(
            "drafter",
            "toy-draft",
            f"{MODULE}:make_with_model",
            Equivalence.BITS,
            summary="asks a toy model of its own",
        ),
        PartSpec(
            "drafter",
            "toy-head",
            f"{MODULE}:make_head",
            Equivalence.BITS,
            summary="follows the toy's law in state of its own",
            layout="luce_core.testing.toy.draft_layout:head_layout",
        ),
    ]


@hookimpl
def luce_extend_plan(plan: BackendPlan) -> list[PlanPatch]:
    path = plan.values["toy-draft.model"]
    if not path or "toy-draft" not in plan.parts["drafter"]:
        return []
    request = ModelRequest("draft", "drafter", path, "drafter.toy-draft")
    return [PlanPatch("models", request, "the drafter asks it")]
