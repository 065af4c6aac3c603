"""What the user may say about this backend: `--triton-kernels`, `--triton-capability` and so on."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from luce_backend_triton.capability import parse

Kernels = Literal["auto", "cuda", "triton"]


class TritonOptions(BaseModel):
    """Fields become `--triton-NAME`, `LUCE_TRITON_NAME` and `[triton] name`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernels: Kernels = Field(
        "auto",
        description="What multiplies few rows: cuda compiles CUDA C++ at first use (fastest), triton is "
        "slower and needs no NVRTC; auto takes cuda where NVRTC is found.",
    )
    prompt_graphs: bool = Field(
        True,
        description="Chunks of a single prompt as CUDA graphs too, filled up to one of a few sizes: the host "
        "takes longer to launch a short one than the card to compute it.",
    )
    graph_steps: int = Field(
        1,
        ge=1,
        le=8,
        description="Decode steps that one CUDA graph runs while nobody waits: fewer gaps on the card, but "
        "tokens come so many at a time, and whoever arrives or leaves waits for twice as many.",
    )
    capability: str = Field(
        "",
        description="Take every card for one of this compute capability, such as 7.5: to plan for a card "
        "that is not there, or to try the kernels of older ones.",
    )

    @field_validator("capability")
    @classmethod
    def _readable(cls, value: str) -> str:
        if value:
            parse(value)
        return value
