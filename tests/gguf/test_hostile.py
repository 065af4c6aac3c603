"""Whatever the bytes: a header whose every promise holds, or a ModelFormatError; in little time and memory.

`tests/fuzz/fuzz_gguf.py` asks the same of a million inputs.
"""

import itertools
import math
import struct
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from luce_core.errors import ModelFormatError
from luce_core.gguf import FORMATS, GgufFile, summarize
from luce_core.gguf.parse import ShardTable, parse_table
from luce_core.testing.gguf_factory import write_gguf
from luce_core.testing.gguf_raw import ARCH, ARRAY, BOOL, STRING, U8, array, model, pair, string, tensor

WITHIN_10_S = settings(deadline=10_000, max_examples=150)


def valid_file() -> bytes:
    rng = np.random.default_rng(3)
    with tempfile.TemporaryDirectory() as folder:
        path = write_gguf(
            Path(folder, "m.gguf"),
            {
                "general.architecture": "tiny",
                "general.alignment": 32,
                "tiny.block_count": 2,
                "tiny.eps": 0.5,
                "tiny.flags": [True, False],
                "tiny.sizes": [1, 2, 3],
                "tokenizer.tokens": ["a", "bc", "", "é"],
                "tokenizer.scores": [0.5, 1.5],
                "wide": 2**40,
            },
            {
                "w": rng.normal(size=(2, 256)).astype(np.float32),
                "e": rng.normal(size=(2, 2, 32)).astype(np.float32),
                "n": rng.normal(size=8).astype(np.float32),
            },
            quant={"w": "Q4_K", "e": "Q8_0"},
        )
        return path.read_bytes()


VALID = valid_file()
INTERESTING = [0, 1, 2, 7, 8, 9, 31, 32, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**32]
INTERESTING += [2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 8, 2**64 - 1]


def check_promises(table: ShardTable, file_bytes: int) -> None:
    assert 24 <= table.header_bytes <= file_bytes
    spans = []
    for name, info in table.tensors.items():
        assert info.name == name
        assert name
        assert 1 <= len(info.shape) <= 4
        assert all(size > 0 for size in info.shape)
        assert info.num_bytes * info.format.block_weights == math.prod(info.shape) * info.format.block_bytes
        assert info.shape[-1] % info.format.block_weights == 0
        spans.append((info.offset, info.offset + info.num_bytes))
    spans.sort()
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    if spans:
        assert table.header_bytes <= spans[0][0]
        assert spans[-1][1] <= file_bytes


def survives(data: bytes) -> ShardTable | None:
    """The table if it was accepted. Fails on any other exception, a broken promise or too much memory."""
    tracemalloc.start()
    try:
        table = parse_table(memoryview(data), Path("x.gguf"), 0, FORMATS)
    except ModelFormatError as error:
        table, message = None, str(error)
        assert message.startswith("GGUF file 'x.gguf': "), message
        assert message.isprintable()
        assert len(message) < 2000
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 16 * len(data) + (1 << 20)
    if table is not None:
        check_promises(table, len(data))
    return table


def test_the_valid_file_is_valid():
    assert len(survives(VALID).tensors) == 3


@WITHIN_10_S
@given(st.integers(0, len(VALID) - 1))
def test_truncation_at_any_byte(length):
    survives(VALID[:length])


@WITHIN_10_S
@given(st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 7)), min_size=1, max_size=6))
def test_flipped_bits(flips):
    data = bytearray(VALID)
    for position, bit in flips:
        data[position] ^= 1 << bit
    survives(bytes(data))


HEADER_BYTES = parse_table(memoryview(VALID), Path("x"), 0, FORMATS).header_bytes
EDITS = st.tuples(
    st.integers(0, HEADER_BYTES - 8),
    st.sampled_from(["<I", "<Q"]),
    st.sampled_from(INTERESTING) | st.integers(0, 2**64 - 1),
)


@WITHIN_10_S
@given(st.lists(EDITS, min_size=1, max_size=3))
def test_integers_written_over_any_place_of_the_header(edits):
    data = bytearray(VALID)
    for position, code, value in edits:
        struct.pack_into(code, data, position, value % (2**32 if code == "<I" else 2**64))
    survives(bytes(data))


def test_every_aligned_and_unaligned_field_set_to_the_extremes():
    for position in range(HEADER_BYTES - 8):
        for value in (0, 2**63 - 1, 2**63, 2**64 - 1):
            data = bytearray(VALID)
            struct.pack_into("<Q", data, position, value)
            survives(bytes(data))


@WITHIN_10_S
@given(st.integers(0, len(VALID)), st.integers(0, 64), st.binary(max_size=64))
def test_bytes_replaced_by_more_or_fewer(position, removed, inserted):
    survives(VALID[:position] + inserted + VALID[position + removed :])


@WITHIN_10_S
@given(st.binary(max_size=300))
def test_noise_behind_a_good_start(noise):
    survives(b"GGUF\3\0\0\0" + noise)


COUNTS = st.integers(0, 4) | st.sampled_from(INTERESTING)


@st.composite
def values(draw, depth=3):
    """A type and a value that may not fit it."""
    kind = draw(st.integers(0, 13))
    if kind == STRING:
        text = draw(st.binary(max_size=8))
        return kind, string(text, draw(st.none() | COUNTS))
    if kind == ARRAY and depth:
        element, value = draw(values(depth - 1))
        copies = draw(st.integers(0, 3))
        return kind, array(element, draw(st.just(copies) | COUNTS), value * copies)
    if kind == BOOL:
        return kind, bytes([draw(st.integers(0, 2))])
    return kind, draw(st.binary(max_size=8))


KEYS = st.sampled_from([b"general.architecture", b"general.alignment", b"a", b"b"]) | st.binary(max_size=6)
TENSORS = st.builds(
    tensor,
    st.sampled_from([b"w", b"v", b"x"]) | st.binary(max_size=4),
    st.lists(st.sampled_from([1, 2, 32, 256]) | COUNTS, max_size=6),
    st.integers(0, 45) | st.sampled_from([2**31, 2**32 - 1]),
    st.sampled_from([0, 32, 64, 128, 256]) | COUNTS,
    num_dims=st.none() | st.integers(0, 2**32 - 1),
)
MODELS = st.builds(
    model,
    st.lists(st.builds(lambda key, value: pair(key, *value), KEYS, values()), max_size=4),
    st.lists(TENSORS, max_size=4),
    st.integers(0, 2048).map(bytes),
    version=st.sampled_from([1, 2, 3]),
    num_pairs=st.none() | COUNTS,
    num_tensors=st.none() | COUNTS,
    alignment=st.sampled_from([8, 32, 64]),
)


@settings(WITHIN_10_S, max_examples=400)
@given(MODELS)
def test_headers_put_together_at_random(data):
    survives(data)


GOOD_TENSORS = st.lists(
    st.tuples(st.sampled_from(list(FORMATS)), st.lists(st.integers(1, 3), max_size=3)), max_size=5
)


@WITHIN_10_S
@given(GOOD_TENSORS, st.sampled_from([8, 32, 128]), st.integers(0, 2))
def test_headers_put_together_correctly_are_accepted(tensors, alignment, gap):
    lines, offset = [], 0
    for index, (kind, outer) in enumerate(tensors):
        dims = [kind.block_weights * 2, *outer]
        lines.append(tensor(b"t%d" % index, dims, kind.ggml_id, offset))
        used = math.prod(outer) * 2 * kind.block_bytes
        offset += -(-used // alignment) * alignment + gap * alignment
    aligned = pair(b"general.alignment", 4, struct.pack("<I", alignment))
    table = survives(model([ARCH, aligned], lines, bytes(offset), alignment=alignment))
    assert table is not None
    assert [info.format for info in table.tensors.values()] == [kind for kind, _ in tensors]
    assert [info.shape for info in table.tensors.values()] == [
        (*outer[::-1], kind.block_weights * 2) for kind, outer in tensors
    ]


@settings(WITHIN_10_S, max_examples=60)
@given(st.lists(EDITS, max_size=2), st.integers(0, 200))
def test_what_opens_can_be_used(edits, cut):
    data = bytearray(VALID[: len(VALID) - cut])
    for position, code, value in edits:
        struct.pack_into(code, data, position, value % (2**32 if code == "<I" else 2**64))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.gguf")
        path.write_bytes(data)
        try:
            file = GgufFile.open(path)
        except ModelFormatError:
            return
        with file:
            summarize(file.header)
            file.identity()
            for name, info in file.header.tensors.items():
                assert file.raw(name).nbytes == info.num_bytes
                assert info.format.name == "Q8_1" or file.dequantize(name).shape == info.shape


def test_error_messages_do_not_grow_with_the_file():
    assert survives(model([pair(b"k" * 60_000, ARRAY, array(U8, 2**40, b""))])) is None
    value = pair(b"general.alignment", STRING, string(b"v" * 60_000))
    assert survives(model([value])) is None
