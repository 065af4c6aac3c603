"""Compiled libraries for several processors, random matrices of every format, and a small network."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from luce_backend_cpu import compiler, native
from luce_backend_cpu.lowering import Packed

from luce_core.contracts import Linear

X86 = platform.machine() == "x86_64"
VARIANTS = {
    "native": (compiler.native_flags(), True),
    "no-amx": (compiler.native_flags(), False),
}
if X86:
    VARIANTS["avx2"] = (("-march=x86-64-v3", "-O1"), False)
    VARIANTS["baseline"] = (("-march=x86-64", "-O1"), False)
"""Name -> (target flags, AMX allowed). -O1 keeps the compilers of the suite quick."""

HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip
"""Block format -> where its half floats lie; all other bits may be anything."""


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """name -> opened library. Copies, since one file opened twice is one library with one set of settings."""
    opened: dict[str, native.Native] = {}

    def get(name: str) -> native.Native:
        if name not in opened:
            target, amx = VARIANTS[name]
            if name == "avx2" and "avx2" not in compiler.cpu_flags():
                pytest.skip("this processor has no AVX2")
            built = compiler.build(os.environ, compiler.cache_folder(os.environ), target)
            assert built.path is not None, built.reason
            copy = tmp_path_factory.mktemp(name) / "luce_cpu.so"
            shutil.copy(built.path, copy)
            opened[name] = native.open_library(copy, amx=amx, share_threads=name != "baseline")
        return opened[name]

    return get


@pytest.fixture(params=list(VARIANTS))
def lib(request, libraries):
    return libraries(request.param)


@pytest.fixture(scope="session")
def quick_lib(libraries):
    """The library of this machine."""
    return libraries("native")


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def random_blocks(rng, format_name: str, rows: int, cols: int) -> np.ndarray:
    """u8[rows, row_bytes]: random bits with scales of ordinary size."""
    kind = gguf.GGMLQuantizationType[format_name]
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    if format_name in ("F32", "F16", "BF16"):
        values = rng.standard_normal((rows, cols)).astype(np.float32)
        return gguf.quantize(values, kind).view(np.uint8).reshape(rows, -1)
    blocks = rng.integers(0, 256, (rows * cols // weights, size), dtype=np.uint8)
    for at in HALVES[format_name]:
        scale = (rng.standard_normal(len(blocks)) * 0.02).astype("<f2")
        blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    if format_name == "MXFP4":
        blocks[:, 0] = rng.integers(110, 125, len(blocks))
    return blocks.reshape(rows, -1)


def exact(data: np.ndarray, format_name: str) -> np.ndarray:
    """f32[rows, cols] by the `gguf` package."""
    kind = gguf.GGMLQuantizationType[format_name]
    if format_name == "F32":
        return data.view("<f4")
    if format_name == "F16":
        return data.view("<f2").astype(np.float32)
    return gguf.dequantize(data, kind)


@pytest.fixture(scope="session")
def blocks():
    return random_blocks


@pytest.fixture(scope="session")
def dequantized():
    return exact


@pytest.fixture(scope="session")
def linear_of():
    """(lib, format, rows, cols, seed, bias, scale) -> (handle for the library, handle for the reference)."""

    def make(lib, format_name, rows, cols, seed=0, *, bias=False, scale=None):
        rng = np.random.default_rng(seed)
        data = random_blocks(rng, format_name, rows, cols)
        common = {
            "name": f"{format_name} {rows}x{cols}",
            "out_features": rows,
            "in_features": cols,
            "format": format_name,
            "bias": torch.from_numpy(rng.standard_normal(rows).astype(np.float32)) if bias else None,
            "scale": None if scale is None else torch.tensor(scale),
        }
        packed = Packed.from_file(lib, data, format_name, rows, cols)
        return Linear(packed=packed, **common), Linear(
            packed=torch.from_numpy(exact(data, format_name).copy()), **common,
        )

    return make


@pytest.fixture(scope="session")
def sources() -> Path:
    return compiler.SOURCES
