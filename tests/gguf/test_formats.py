"""Block formats: the table, the registry, and dequantization.

The `gguf` package and readers that take one block weight by weight are the oracles.
"""

import struct
import subprocess
import sys

import gguf
import numpy as np
import pytest

from luce_core.contracts.plugin import QuantFormat
from luce_core.errors import ModelFormatError, PluginError
from luce_core.gguf import FORMATS, BlockFormat, FormatRegistry, declared
from luce_core.gguf import formats as formats_module

NO_DECODER = {"Q8_1"}
OWN = {"F64", "I8", "I16", "I32", "I64", "Q1_0", "Q8_K"}
IN_PACKAGE = sorted({kind.name for kind in gguf.GGMLQuantizationType} - NO_DECODER - OWN)


def raw_blocks(name: str, *shape: int) -> np.ndarray:
    block_format = FORMATS.by_name(name)
    rng = np.random.default_rng(block_format.ggml_id)
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * block_format.block_bytes), np.uint8)


@pytest.mark.parametrize("kind", gguf.GGMLQuantizationType)
def test_every_type_of_the_package_is_known_by_id_and_name(kind):
    block_format = FORMATS.by_id(int(kind))
    assert block_format == FORMATS.by_name(kind.name)
    assert block_format.name == kind.name
    assert (block_format.block_weights, block_format.block_bytes) == gguf.GGML_QUANT_SIZES[kind]


@pytest.mark.parametrize(
    ("name", "weights", "num_bytes"),
    [
        ("F32", 1, 4), ("F16", 1, 2), ("BF16", 1, 2), ("Q4_0", 32, 18), ("Q8_0", 32, 34), ("Q2_K", 256, 84),
        ("Q3_K", 256, 110), ("Q4_K", 256, 144), ("Q5_K", 256, 176), ("Q6_K", 256, 210), ("IQ4_XS", 256, 136),
        ("IQ2_XXS", 256, 66), ("TQ1_0", 256, 54), ("MXFP4", 32, 17),
    ],
)  # fmt: skip
def test_sizes_of_the_common_formats(name, weights, num_bytes):
    block_format = FORMATS.by_name(name)
    assert (block_format.block_weights, block_format.block_bytes) == (weights, num_bytes)
    assert block_format.row_bytes(weights * 3) == num_bytes * 3


@pytest.mark.parametrize("name", IN_PACKAGE)
def test_any_bytes_dequantize_as_in_the_package(name):
    raw = raw_blocks(name, 3, 5, 2)
    block_format = FORMATS.by_name(name)
    got = block_format.dequantize(raw)
    with np.errstate(all="ignore"):
        wanted = gguf.dequantize(raw, gguf.GGMLQuantizationType[name])
    assert got.dtype == np.float32
    assert got.shape == (3, 5, 2 * block_format.block_weights)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", [*IN_PACKAGE, *sorted(OWN)])
def test_chunks_do_not_show(name, monkeypatch):
    raw = raw_blocks(name, 7, 3)
    whole = FORMATS.by_name(name).dequantize(raw)
    monkeypatch.setattr(formats_module, "DEQUANT_CHUNK_BLOCKS", 4)
    np.testing.assert_array_equal(FORMATS.by_name(name).dequantize(raw), whole)


def half(raw: bytes) -> np.float32:
    return np.float32(np.frombuffer(raw, "<f2")[0])


def read_q4_0(block: bytes) -> list[np.float32]:
    d = half(block[:2])
    return [d * np.float32((block[2 + i % 16] >> (4 * (i // 16)) & 15) - 8) for i in range(32)]


def read_q8_0(block: bytes) -> list[np.float32]:
    return [half(block[:2]) * np.float32(q) for q in struct.unpack("<32b", block[2:])]


def six_bits(packed: bytes, group: int) -> tuple[int, int]:
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    low = packed[group + 4]
    return (low & 15) | packed[group - 4] >> 6 << 4, low >> 4 | packed[group] >> 6 << 4


def read_q4_k(block: bytes) -> list[np.float32]:
    d, dmin, values = half(block[:2]), half(block[2:4]), []
    for i in range(256):
        scale, minimum = six_bits(block[4:16], i // 32)
        q = block[16 + i // 64 * 32 + i % 32] >> (4 * (i // 32 % 2)) & 15
        values.append(d * np.float32(scale) * np.float32(q) - dmin * np.float32(minimum))
    return values


def read_q6_k(block: bytes) -> list[np.float32]:
    d, values = half(block[208:]), []
    scales = struct.unpack("<16b", block[192:208])
    for i in range(256):
        part, place = divmod(i, 128)
        quarter, column = divmod(place, 32)
        low = block[part * 64 + quarter % 2 * 32 + column] >> (4 * (quarter // 2)) & 15
        high = block[128 + part * 32 + column] >> (2 * quarter) & 3
        values.append(d * np.float32(scales[i // 16]) * np.float32((low | high << 4) - 32))
    return values


def read_bf16(block: bytes) -> list[np.float32]:
    return [np.float32(struct.unpack("<f", b"\0\0" + block)[0])]


def read_q1_0(block: bytes) -> list[np.float32]:
    return [half(block[:2]) * (1 if block[2 + i // 8] >> (i % 8) & 1 else -1) for i in range(128)]


def read_q8_k(block: bytes) -> list[np.float32]:
    d = np.float32(struct.unpack("<f", block[:4])[0])
    return [d * np.float32(q) for q in struct.unpack("<256b", block[4:260])]


def number(code: str):
    return lambda block: [np.float32(struct.unpack(code, block)[0])]


READERS = {
    "Q4_0": read_q4_0, "Q8_0": read_q8_0, "Q4_K": read_q4_k, "Q6_K": read_q6_k, "BF16": read_bf16,
    "Q1_0": read_q1_0, "Q8_K": read_q8_k, "F32": number("<f"), "F16": number("<e"), "F64": number("<d"),
    "I8": number("<b"), "I16": number("<h"), "I32": number("<i"), "I64": number("<q"),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_blocks_dequantize_as_a_weight_by_weight_reading_says(name):
    block_format = FORMATS.by_name(name)
    raw = raw_blocks(name, 40, 1)
    with np.errstate(all="ignore"):
        wanted = np.array([READERS[name](block.tobytes()) for block in raw], np.float32)
    np.testing.assert_array_equal(block_format.dequantize(raw), wanted)


def test_a_non_contiguous_slice_dequantizes_like_its_copy():
    raw = raw_blocks("Q4_0", 6, 4)
    part = raw[::2, 18:54]
    block_format = FORMATS.by_name("Q4_0")
    np.testing.assert_array_equal(block_format.dequantize(part), block_format.dequantize(part.copy()))


def test_nothing_dequantizes_to_nothing():
    assert FORMATS.by_name("Q4_K").dequantize(np.empty((0, 144), np.uint8)).shape == (0, 256)


@pytest.mark.parametrize(
    "raw", [np.zeros(143, np.uint8), np.zeros(144, np.int8), np.zeros((144, 2), np.uint8), np.uint8(3)]
)
def test_what_are_not_rows_of_blocks_is_refused(raw):
    with pytest.raises(ValueError, match="wanted uint8 with rows of a multiple of 144 bytes"):
        FORMATS.by_name("Q4_K").dequantize(np.asarray(raw))


@pytest.mark.parametrize("name", sorted(NO_DECODER))
def test_a_format_no_model_uses_says_so(name):
    with pytest.raises(ModelFormatError, match=f"'{name}' has no dequantization"):
        FORMATS.by_name(name).dequantize(raw_blocks(name, 1, 1))


def test_unknown_ids_and_names():
    with pytest.raises(ModelFormatError, match="unknown type id 999; wanted one of F32, F16, "):
        FORMATS.by_id(999)
    with pytest.raises(ModelFormatError, match="format 'Q9_Z' is unknown; wanted one of F32, F16, "):
        FORMATS.by_name("Q9_Z")


def two_bits(blocks: np.ndarray) -> np.ndarray:
    return np.stack([(blocks[:, 0] >> shift & 3).astype(np.float32) for shift in (0, 2, 4, 6)], 1)


def test_a_plugins_format_is_found_and_decodes():
    registry = FormatRegistry()
    mine = BlockFormat("MINE", 4001, 4, 1, two_bits)
    registry.register(mine)
    registry.register(mine)
    assert registry.by_id(4001) is mine
    assert registry.by_name("MINE").dequantize(np.array([[0b11100100, 0]], np.uint8)).tolist() == [
        [0, 1, 2, 3, 0, 0, 0, 0]
    ]
    assert mine in list(registry)
    with pytest.raises(ModelFormatError):
        FORMATS.by_id(4001)


def test_a_declared_format_imports_its_code_when_it_is_first_used():
    imported = []

    def resolve(factory):
        imported.append(factory)
        return two_bits

    mine = declared(QuantFormat("MINE", 4001, 4, 1, "plugin.quants:two_bits"), resolve)
    registry = FormatRegistry()
    registry.register(mine)
    assert registry.by_id(4001).row_bytes(8) == 2
    assert imported == []
    assert mine.dequantize(np.array([[0b11100100]], np.uint8)).tolist() == [[0, 1, 2, 3]]
    assert imported == ["plugin.quants:two_bits"]


@pytest.mark.parametrize("shape", [(3, 1), (3, 5), (12,), (1, 4)])
def test_a_plugin_that_decodes_to_the_wrong_shape_is_named(shape):
    wrong = BlockFormat("MINE", 4001, 4, 1, lambda blocks: np.zeros(shape, np.float32))
    with pytest.raises(PluginError, match=r"'MINE' decoded \[3, 1\] bytes to the shape .*; wanted \[3, 4\]"):
        wrong.dequantize(np.zeros(3, np.uint8))


def test_a_second_decoder_for_one_format_is_a_clash_not_a_silent_replacement():
    core = FORMATS.by_name("Q4_K")
    registry = FormatRegistry()
    with pytest.raises(PluginError, match="clashes with 'Q4_K'"):
        registry.register(BlockFormat("Q4_K", core.ggml_id, core.block_weights, core.block_bytes, two_bits))
    assert registry.by_name("Q4_K") == core


def test_declaring_the_same_twice_changes_nothing():
    registry, quant = FormatRegistry(), QuantFormat("MINE", 4001, 4, 1, "plugin.quants:two_bits")
    registry.register(declared(quant, str))
    registry.register(declared(quant, str))
    with pytest.raises(PluginError, match="clashes with 'MINE'"):
        registry.register(declared(QuantFormat("MINE", 4001, 4, 1, "other.quants:two_bits"), str))


@pytest.mark.parametrize(("name", "ggml_id"), [("MINE", 12), ("Q4_K", 4001), ("Q4_K", 12)])
def test_a_clash_names_both(name, ggml_id):
    pattern = rf"'{name}' \(type id {ggml_id}\) clashes with 'Q4_K' \(type id 12\)"
    with pytest.raises(PluginError, match=pattern):
        FormatRegistry().register(BlockFormat(name, ggml_id, 4, 1, two_bits))


@pytest.mark.parametrize(("weights", "num_bytes"), [(0, 1), (1, 0), (-4, 1)])
def test_block_sizes_are_positive(weights, num_bytes):
    with pytest.raises(ValueError, match="must be >= 1"):
        BlockFormat("X", 4001, weights, num_bytes, two_bits)


def test_importing_the_reader_imports_neither_torch_nor_the_gguf_package():
    code = "import sys, luce_core.gguf; assert not {'torch', 'gguf'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
