"""Every lie a header can tell ends in a ModelFormatError that names its subject."""

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from luce_core.errors import ModelFormatError
from luce_core.gguf import FORMATS, limits
from luce_core.gguf.parse import parse_table
from luce_core.testing.gguf_raw import (
    ARCH,
    ARRAY,
    BOOL,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    STRING,
    U8,
    U16,
    U32,
    U64,
    array,
    model,
    pair,
    string,
    tensor,
)  # fmt: skip

F32_BYTES = bytes(128)


def parse(data: bytes):
    return parse_table(memoryview(data), Path("x.gguf"), 0, FORMATS)


def complaint(data: bytes) -> str:
    with pytest.raises(ModelFormatError) as caught:
        parse(data)
    message = str(caught.value)
    assert message.startswith("GGUF file 'x.gguf': ")
    assert len(message) < 1500
    return message


def u32_pair(key: bytes, value: int) -> bytes:
    return pair(key, U32, struct.pack("<I", value))


# What is right


def test_reads_every_scalar_type_at_its_extremes():
    values = {
        U8: ("<B", 255), I8: ("<b", -128), U16: ("<H", 65535), I16: ("<h", -32768),
        U32: ("<I", 2**32 - 1), I32: ("<i", -(2**31)), U64: ("<Q", 2**64 - 1), I64: ("<q", -(2**63)),
        F32: ("<f", 0.5), F64: ("<d", 0.1),
    }  # fmt: skip
    pairs = [pair(b"k%d" % kind, kind, struct.pack(code, value)) for kind, (code, value) in values.items()]
    table = parse(model([ARCH, *pairs, pair(b"yes", BOOL, b"\1"), pair(b"no", BOOL, b"\0")]))
    for kind, (_, value) in values.items():
        assert table.metadata[f"k{kind}"] == value
    assert table.metadata["yes"] is True
    assert table.metadata["no"] is False
    assert table.metadata["general.architecture"] == "tiny"


def test_reads_arrays_of_numbers_booleans_strings_and_arrays():
    inner = array(U8, 2, b"\1\2") + array(STRING, 1, string(b"x"))
    table = parse(
        model(
            [
                pair(b"i", ARRAY, array(I32, 3, struct.pack("<3i", 1, -2, 3))),
                pair(b"b", ARRAY, array(BOOL, 2, b"\1\0")),
                pair(b"s", ARRAY, array(STRING, 3, string(b"") + string("é".encode()) + string(b"abc"))),
                pair(b"a", ARRAY, array(ARRAY, 2, inner)),
                pair(b"none", ARRAY, array(STRING, 0, b"")),
                pair(b"zero", ARRAY, array(F64, 0, b"")),
            ]
        )
    )
    assert table.metadata["i"].tolist() == [1, -2, 3]
    assert table.metadata["i"].dtype == np.int32
    assert table.metadata["b"].tolist() == [True, False]
    assert table.metadata["s"] == ["", "é", "abc"]
    first, second = table.metadata["a"]
    assert (first.tolist(), second) == ([1, 2], ["x"])
    assert table.metadata["none"] == []
    assert table.metadata["zero"].tolist() == []


def test_arrays_are_read_only_copies_of_the_file():
    data = bytearray(model([pair(b"i", ARRAY, array(U8, 2, b"\1\2"))]))
    values = parse(data).metadata["i"]
    data[-1] = 9
    assert values.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 1


def test_tensors_have_torch_order_and_absolute_offsets():
    table = parse(
        model(
            tensors=[tensor(b"w", (64, 3), 8, 256), tensor(b"v", (32,), 0, 0)],
            data=bytes(256 + 64 // 32 * 34 * 3),
        )
    )
    w, v = table.tensors["w"], table.tensors["v"]
    assert (w.shape, w.format.name) == ((3, 64), "Q8_0")
    assert (w.num_bytes, w.num_weights, w.row_bytes) == (204, 192, 68)
    assert v.offset % 32 == 0
    assert w.offset == v.offset + 256
    assert list(table.tensors) == ["w", "v"]


def test_the_last_tensor_needs_no_padding_and_gaps_are_allowed():
    data = model(tensors=[tensor(b"a", (1,), 0, 0), tensor(b"b", (1,), 0, 96)], data=bytes(100))
    assert set(parse(data).tensors) == {"a", "b"}


def test_version_2_reads_like_version_3():
    assert parse(model(version=2)).metadata == parse(model(version=3)).metadata


def test_a_file_without_tensors_ends_where_its_table_ends():
    table = parse(model())
    assert table.tensors == {}
    assert table.header_bytes == len(model())


def test_alignment_moves_the_data():
    data = model(
        [ARCH, u32_pair(b"general.alignment", 4096)], [tensor()], F32_BYTES, alignment=4096
    )
    assert parse(data).tensors["t"].offset == 4096


# What is wrong: the start


@pytest.mark.parametrize("length", range(24))
def test_a_file_cut_off_in_the_first_24_bytes(length):
    complaint(model()[:length])


@pytest.mark.parametrize("magic", [b"GGML", b"GGUX", b"gguf", b"FUGG", b"PK\3\4"])
def test_wrong_magic(magic):
    assert f"the magic at its start is {magic!r}; wanted b'GGUF'" in complaint(model(magic=magic))


@pytest.mark.parametrize("version", [0, 1, 4, 99, 256, 2**32 - 1, 65536 + 3])
def test_unknown_version(version):
    assert f"the version is {version}; wanted 2 or 3" in complaint(model(version=version))


def test_version_1_says_to_convert_again():
    assert "Convert the model again" in complaint(model(version=1))


@pytest.mark.parametrize("version", [2, 3])
def test_big_endian(version):
    data = b"GGUF" + struct.pack(">IQQ", version, 0, 0)
    assert "big-endian; wanted little-endian" in complaint(data)


@pytest.mark.parametrize("count", [65_537, 2**31, 2**63 - 1, 2**63, 2**64 - 1])
def test_absurd_counts(count):
    assert f"tensor count is {count}; wanted at most 65536" in complaint(model(num_tensors=count))
    assert f"count of metadata keys is {count}; wanted at most 16384" in complaint(model(num_pairs=count))


def test_counts_the_file_has_no_room_for():
    assert "tensor count (60000) needs" in complaint(model(num_tensors=60_000))
    assert "metadata keys (16000) needs" in complaint(model(num_pairs=16_000))


# What is wrong: metadata


def test_an_unknown_value_type_names_the_key():
    message = complaint(model([pair(b"k", 13, b"x" * 99)]))
    assert "metadata key 'k' has value type 13; wanted a type from 0 to 12" in message


def test_an_unknown_element_type_names_the_key():
    message = complaint(model([pair(b"k", ARRAY, array(77, 1, b"x" * 9))]))
    assert "metadata key 'k' is an array of value type 77" in message


def test_a_duplicate_key():
    assert "metadata key 'general.architecture' appears twice" in complaint(model([ARCH, ARCH]))


def test_an_empty_key():
    assert "metadata key number 2 is empty" in complaint(model([ARCH, u32_pair(b"", 1)]))


def test_a_key_that_is_not_utf8():
    message = complaint(model([u32_pair(b"\xff\xfe", 1)]))
    assert "metadata key number 1 has a string that is not UTF-8" in message


def test_a_key_with_control_characters_is_escaped_in_messages():
    message = complaint(model([pair(b"\x1b[2J\n", 99, b"x" * 9)]))
    assert message.isprintable()


def test_a_very_long_key_is_cut_in_messages():
    assert "(60000 characters)" in complaint(model([pair(b"k" * 60_000, 99, b"xxxx")]))


@pytest.mark.parametrize("length", [2**63 - 1, 2**63, 2**64 - 1, 2**64 - 8, 65_536])
def test_key_lengths_near_the_ends_of_the_integers(length):
    data = model([string(b"k", length) + bytes(100)])
    assert f"has a string of {length} bytes; wanted at most 65535" in complaint(data)


@pytest.mark.parametrize("length", [2**63 - 1, 2**63, 2**64 - 1, 2**64 - 8, (64 << 20) + 1])
def test_string_lengths_near_the_ends_of_the_integers(length):
    value = string(b"v", length)
    assert f"metadata key 'k' has a string of {length} bytes" in complaint(model([pair(b"k", STRING, value)]))
    listed = complaint(model([pair(b"k", ARRAY, array(STRING, 1, value))]))
    assert f"metadata key 'k' has a string of {length} bytes at index 0" in listed


def test_a_string_longer_than_the_file():
    assert "metadata key 'k' needs 5000 bytes" in complaint(model([pair(b"k", STRING, string(b"v", 5000))]))


@pytest.mark.parametrize("count", [(1 << 22) + 1, 2**32, 2**61, 2**63, 2**64 - 1])
@pytest.mark.parametrize("kind", [U8, F64, STRING, BOOL, ARRAY])
def test_absurd_array_lengths(kind, count):
    message = complaint(model([pair(b"k", ARRAY, array(kind, count, b"\0" * 64))]))
    assert f"the array length of metadata key 'k' is {count}; wanted at most 4194304" in message


@pytest.mark.parametrize("kind", [U8, F64, STRING, BOOL, ARRAY])
def test_array_lengths_the_file_has_no_room_for(kind):
    message = complaint(model([pair(b"k", ARRAY, array(kind, 4000, b"\0" * 64))]))
    assert "the array length of metadata key 'k' (4000) needs" in message


@pytest.mark.parametrize(
    ("strings", "fault"),
    [
        (string(b"a") + string(b"\xff"), "not UTF-8"),
        (string(b"a") + string(b"\xc3") + string(b"\xa9"), "ends inside a UTF-8 character"),
        (string(b"a") + string(b"\xc3"), "not UTF-8"),
        (string(b"a") + string(b"b", 1000), "cut off by the end of the header at string 1"),
    ],
)
def test_bad_strings_in_an_array(strings, fault):
    count = 3 if strings.count(b"\xa9") else 2
    message = complaint(model([pair(b"tokens", ARRAY, array(STRING, count, strings))]))
    assert "metadata key 'tokens'" in message
    assert fault in message


def test_the_strings_of_an_array_may_not_share_one_character_even_at_the_very_start():
    strings = string(b"\xe2") + string(b"\x82\xac")
    assert "UTF-8" in complaint(model([pair(b"k", ARRAY, array(STRING, 2, strings))]))


@pytest.mark.parametrize("value", [2, 127, 255])
def test_booleans_are_0_or_1(value):
    message = complaint(model([pair(b"k", BOOL, bytes([value]))]))
    assert f"metadata key 'k' has {value} for a boolean" in message
    assert "for a boolean" in complaint(model([pair(b"k", ARRAY, array(BOOL, 2, bytes([1, value])))]))


def nested(depth: int) -> bytes:
    value = array(U8, 1, b"\7")
    for _ in range(depth - 1):
        value = array(ARRAY, 1, value)
    return model([pair(b"k", ARRAY, value)])


def test_arrays_nest_four_deep_and_no_deeper():
    value = parse(nested(4)).metadata["k"]
    assert value[0][0][0].tolist() == [7]
    for depth in (5, 100, 20_000):
        assert "metadata key 'k' has arrays in arrays in arrays too deep" in complaint(nested(depth))


def test_many_nested_arrays():
    value = array(ARRAY, 5_000, array(U8, 0, b"") * 5_000)
    assert "holds 5000 arrays; wanted at most 4096 nested" in complaint(model([pair(b"k", ARRAY, value)]))


def test_the_element_budget_counts_all_arrays_together(monkeypatch):
    monkeypatch.setattr(limits, "MAX_ARRAY_ELEMENTS", 10)
    fits = [pair(b"a", ARRAY, array(U8, 5, b"\0" * 5)), pair(b"b", ARRAY, array(U8, 5, b"\0" * 5))]
    parse(model(fits))
    more = pair(b"c", ARRAY, array(STRING, 1, string(b"")))
    assert "metadata key 'c' has 1 elements; wanted at most 10" in complaint(model([*fits, more]))


def test_the_header_as_a_whole_is_limited(monkeypatch):
    monkeypatch.setattr(limits, "MAX_HEADER_BYTES", 100)
    message = complaint(model([ARCH, pair(b"k", STRING, string(b"v" * 200))]))
    assert "metadata key 'k' ends at byte" in message
    assert "a header of at most 100 bytes" in message


@pytest.mark.parametrize("value", [0, 1, 4, 7, 24, 33, 65537, 131072, 2**31, 2**32 - 1])
def test_absurd_alignments(value):
    message = complaint(model([ARCH, u32_pair(b"general.alignment", value)]))
    assert f"'general.alignment' is the number {value}; wanted a power of two from 8 to 65536" in message


@pytest.mark.parametrize(
    ("kind", "value"),
    [(STRING, string(b"32")), (F32, struct.pack("<f", 32)), (BOOL, b"\1"), (ARRAY, array(U32, 0, b""))],
)
def test_alignments_of_the_wrong_type(kind, value):
    assert "'general.alignment' is" in complaint(model([pair(b"general.alignment", kind, value)]))


# What is wrong: tensors


@pytest.mark.parametrize("num_dims", [0, 5, 255, 2**31, 2**32 - 1])
def test_absurd_numbers_of_dimensions(num_dims):
    message = complaint(model(tensors=[tensor(b"w", (1,), num_dims=num_dims)], data=F32_BYTES))
    assert f"tensor 'w' has {num_dims} dimensions; wanted 1 to 4" in message


@pytest.mark.parametrize(
    "dims", [(0,), (32, 0), (0, 2**63), (2**63,), (2**32, 2**32), (2**16,) * 4, (2**64 - 1,) * 4]
)
def test_dimensions_of_zero_or_beyond_63_bits(dims):
    message = complaint(model(tensors=[tensor(b"w", dims)], data=F32_BYTES))
    assert f"tensor 'w' has the dimensions {list(dims)}" in message


def test_dimensions_whose_product_is_large_but_not_too_large_still_have_to_fit_the_file():
    message = complaint(model(tensors=[tensor(b"w", (2**31, 2**31))], data=F32_BYTES))
    assert "tensor 'w' covers bytes" in message


@pytest.mark.parametrize("type_id", [42, 1000, 2**32 - 1])
def test_unknown_types(type_id):
    message = complaint(model(tensors=[tensor(b"w", type_id=type_id)], data=F32_BYTES))
    assert f"tensor 'w' has unknown type id {type_id}; wanted one of F32, F16" in message


@pytest.mark.parametrize(("type_id", "name"), [(4, "Q4_2"), (31, "Q4_0_4_4"), (36, "IQ4_NL_4_4")])
def test_removed_types_are_called_by_name(type_id, name):
    message = complaint(model(tensors=[tensor(b"w", type_id=type_id)], data=F32_BYTES))
    assert f"tensor 'w' has type id {type_id} ({name}), which GGML no longer has" in message


def test_rows_that_end_inside_a_block():
    message = complaint(model(tensors=[tensor(b"w", (32, 8), 12)], data=bytes(4096)))
    assert "tensor 'w' has rows of 32 weights; wanted a multiple of 256, the block size of Q4_K" in message


def test_an_unaligned_offset():
    message = complaint(model(tensors=[tensor(b"w", offset=4)], data=bytes(256)))
    assert "tensor 'w' starts at offset 4; wanted a multiple of the alignment 32" in message


@pytest.mark.parametrize("offset", [32, 2**31, 2**63, 2**64 - 32])
def test_tensors_outside_the_file(offset):
    message = complaint(model(tensors=[tensor(b"w", offset=offset)], data=F32_BYTES))
    assert "tensor 'w' covers bytes" in message
    assert f"the file ends at byte {len(model(tensors=[tensor()], data=F32_BYTES))}" in message


def test_a_file_one_byte_short():
    data = model(tensors=[tensor(b"w")], data=F32_BYTES)
    parse(data)
    assert "tensor 'w' covers bytes" in complaint(data[:-1])


@pytest.mark.parametrize("second", [0, 32, 96])
def test_overlapping_tensors(second):
    tensors = [tensor(b"a"), tensor(b"b", offset=second)]
    message = complaint(model(tensors=tensors, data=bytes(1024)))
    assert "tensor 'b' overlaps tensor 'a'" in message


def test_tensors_may_touch_but_not_share_one_byte():
    for weights, fits in ((32, True), (33, False)):
        data = model(tensors=[tensor(b"a", (weights,), 24), tensor(b"b", (1,), 24, 32)], data=bytes(64))
        if fits:
            assert len(parse(data).tensors) == 2
        else:
            assert "tensor 'b' overlaps tensor 'a'" in complaint(data)


def test_overlap_is_found_in_any_order_of_the_table():
    tensors = [tensor(b"b", offset=128 + 32), tensor(b"c", offset=512), tensor(b"a", offset=64)]
    assert "tensor 'b' overlaps tensor 'a'" in complaint(model(tensors=tensors, data=bytes(1024)))


def test_duplicate_tensor_names():
    tensors = [tensor(b"w"), tensor(b"w", offset=128)]
    assert "tensor 'w' appears twice" in complaint(model(tensors=tensors, data=bytes(1024)))


@pytest.mark.parametrize("name", [b"", b"\xff", b"n" * 257])
def test_bad_tensor_names(name):
    assert "tensor number 1 " in complaint(model(tensors=[tensor(name)], data=F32_BYTES))


def test_a_header_cut_off_anywhere_is_an_error():
    strings = array(STRING, 2, string(b"ab") + string(b"c"))
    pairs = [ARCH, pair(b"s", ARRAY, strings), pair(b"a", ARRAY, array(ARRAY, 1, array(U16, 1, b"\1\2")))]
    whole = model(pairs, [tensor(b"w", (32, 2), 8), tensor(b"x", (1, 1, 1, 1), 0, 96)], bytes(100))
    parse(whole)
    for length in range(len(whole)):
        complaint(whole[:length])


# Cost


def test_a_large_vocabulary_costs_few_objects():
    words = [b"token%d" % i for i in range(250_000)]
    data = model([pair(b"tokens", ARRAY, array(STRING, len(words), b"".join(map(string, words))))])
    tracemalloc.start()
    table = parse(data)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert table.metadata["tokens"][249_999] == "token249999"
    assert kept < len(data) * 1.5
    assert peak < len(data) * 8


@pytest.mark.parametrize(
    "value",
    [
        array(STRING, 1 << 18, bytes(8 << 18)),
        array(U8, 1 << 22, bytes(1 << 22)),
        array(ARRAY, 4_096, array(U8, 0, b"") * 4_096),
        array(ARRAY, 4, array(ARRAY, 1_000, array(U8, 0, b"") * 1_000) * 4),
    ],
    ids=["strings", "numbers", "arrays", "arrays-of-arrays"],
)
def test_the_largest_arrays_a_file_may_hold_stay_within_a_few_times_its_size(value):
    data = model([pair(b"k", ARRAY, value)])
    tracemalloc.start()
    parse(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * len(data) + (2 << 20)
