"""constraints.txt can be installed where torch comes with CUDA, which no machine without a GPU shows."""

from __future__ import annotations

from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
TRITON_OF_TORCH = {"2.13.0": "3.7.1"}
"""What the metadata of torch's CUDA wheels for Linux requires, exactly; its CPU wheels require none."""


def test_torch_and_triton_are_those_that_pip_installs_together():
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    pinned = dict(line.split("==") for line in lines)
    torch, triton = pinned["torch"], pinned["triton"]
    assert triton == TRITON_OF_TORCH.get(torch), (
        f"constraints.txt has torch {torch} and triton {triton}. Look up which triton this torch's "
        "CUDA wheels require, pin that one, and note the pair in TRITON_OF_TORCH."
    )
