"""What the toy's head keeps, for the planner: no torch."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from luce_core.contracts import ModelSpec, StateLayout


def head_layout(target: ModelSpec, options: Any) -> StateLayout:
    """What the target keeps, as far as it is there."""
    return evolve(target.layout, best_effort=True)
