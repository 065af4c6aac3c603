"""What the user may say about this backend: `--triton-kernels`, `--triton-prompt-graphs`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

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
        False,
        description="Chunks of a single prompt as CUDA graphs too, filled up to one of a few sizes. Off "
        "until it was measured on a card.",
    )
