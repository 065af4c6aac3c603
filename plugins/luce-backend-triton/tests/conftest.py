"""Without a GPU everything Triton runs in its interpreter; decorators read the variable when they run."""

from __future__ import annotations

import os
import sys

from luce_backend_triton import capability, devices

if not devices.cards():
    os.environ["TRITON_INTERPRET"] = "1"

import gguf
import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    from . import interpreter

    interpreter.quicken()

DEVICE = torch.device("cuda:0" if devices.cards() else "cpu")
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
    "NVFP4": (),
}  # fmt: skip
"""Block format -> where its half floats lie; all other bits may be anything."""


def random_blocks(name: str, rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """u8[rows, row_bytes]: random bits with scales of ordinary size."""
    rng = np.random.default_rng(seed)
    kind = gguf.GGMLQuantizationType[name]
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    if name in ("F32", "F16", "BF16"):
        values = rng.standard_normal((rows, cols)).astype(np.float32)
        return gguf.quantize(values, kind).view(np.uint8).reshape(rows, -1)
    blocks = rng.integers(0, 256, (rows * cols // weights, size), dtype=np.uint8)
    for at in HALVES[name]:
        scale = (rng.standard_normal(len(blocks)) * 0.02).astype("<f2")
        blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(114, 130, len(blocks))
    return blocks.reshape(rows, -1)


def exact(data: np.ndarray, name: str) -> np.ndarray:
    """f32[rows, cols] by the `gguf` package."""
    if name == "F32":
        return data.view("<f4")
    if name == "F16":
        return data.view("<f2").astype(np.float32)
    return gguf.dequantize(data, gguf.GGMLQuantizationType[name])


@pytest.fixture
def taken_for(monkeypatch):
    """-> takes every card, and the interpreter, for one of a compute capability."""
    return lambda *instead: monkeypatch.setattr(capability, "_told", [instead])


@pytest.fixture
def wide_heads(monkeypatch):
    """Heads of DeltaNet as CUDA C++ takes them; of `worlds` by the name under which tests import it."""
    worlds = sys.modules["worlds"]
    for name, value in (("KH", 2), ("VH", 4), ("DK", 128), ("DV", 128), ("CHANNELS", 8 * 128)):
        monkeypatch.setattr(worlds, name, value)


@pytest.fixture(scope="session")
def device():
    return DEVICE


@pytest.fixture(scope="session")
def blocks():
    return random_blocks


@pytest.fixture(scope="session")
def dequantized():
    return exact
