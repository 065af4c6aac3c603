"""What the user may say about the CPU: `--cpu-tier`, `--cpu-exact`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Tier = Literal["auto", "c", "torch", "exact"]


class CpuOptions(BaseModel):
    """Fields become `--cpu-NAME`, `LUCE_CPU_NAME` and `[cpu] name`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tier: Tier = Field(
        "auto",
        description="How weights are multiplied: c compiles a small library, torch needs no compiler, exact "
        "is the f32 reference; auto takes c where a compiler is found.",
    )
    exact: bool = Field(False, description="The same as tier exact: every weight as f32, the reference.")
