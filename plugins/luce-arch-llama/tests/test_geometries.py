"""The kit's contract of published sizes, and the sizes themselves.

Parameters are those of the published checkpoints. Bytes are those of published Q4_K_M and Q8_0 files, less
their metadata: a vocabulary of 128,256 tokens and its merges take 7.8 MB of each of the Llama files.
"""

from typing import ClassVar

import pytest
from luce_arch_llama.geometries import geometries, metadata, shapes_of

from luce_core import synth
from luce_core.contracts import Geometry
from luce_core.testing.geometry_contract import GeometryContract, Published

SIZES = {"layers": 80, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 96, "vocab": 400, "context": 512}
LLAMA3_METADATA = 7_800_000


class TestLlama(GeometryContract):
    hooks = "luce_arch_llama.hooks"
    published: ClassVar = {
        "smollm2-135m": Published(134_515_008, 103_668_480, 23_040),
        "llama-3.1-8b": Published(8_030_261_248 + 64, 4_912_898_304, 131_072),
    }

    def small(self):
        for arch in ("llama", "qwen2"):
            keys = metadata(arch=arch, theta=5e5, **SIZES)
            factors = {"rope_freqs.weight": (1.0, 1.0)}
            yield Geometry(f"small-{arch}", keys, shapes_of(keys, tied=arch == "qwen2"), ranges=factors)


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [
        ("smollm2-135m", 272, 134_515_008),
        ("smollm2-360m", 290, 361_821_120),
        ("qwen2.5-0.5b", 290, 494_032_768),
        ("llama-3.2-1b", 147, 1_235_814_400 + 32),  # and the factors on its rotary frequencies
        ("llama-3.2-3b", 255, 3_212_749_824 + 64),
        ("llama-3.1-8b", 292, 8_030_261_248 + 64),
        ("llama-3.1-70b", 724, 70_553_706_496 + 64),
    ],
)
def test_tensors_and_parameters(name, tensors, parameters):
    geometry = next(one for one in geometries() if one.name == name)
    assert (len(geometry.shapes), geometry.parameters) == (tensors, parameters)


@pytest.mark.parametrize(
    ("name", "quant", "file_bytes"),
    [
        ("llama-3.2-1b", "q4_k_m", 807_694_464),
        ("llama-3.2-3b", "q4_k_m", 2_019_377_696),
        ("llama-3.1-8b", "q4_k_m", 4_920_739_232),
        ("llama-3.1-8b", "q8_0", 8_540_775_840),
    ],
)
def test_bytes_are_those_of_published_files(name, quant, file_bytes):
    geometry = next(one for one in geometries() if one.name == name)
    beside = file_bytes - synth.num_bytes(geometry, quant)
    assert LLAMA3_METADATA < beside < LLAMA3_METADATA + 100_000


def test_smollm2_in_q4_k_m():
    """Rows of 576 are no multiple of 256: Q5_0 and Q8_0 stand in."""
    smol = next(one for one in geometries() if one.name == "smollm2-135m")
    assert synth.num_bytes(smol, "q4_k_m") == 103_668_480
    assert set(synth.formats_of(smol, "q4_k_m").values()) == {"F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"}
