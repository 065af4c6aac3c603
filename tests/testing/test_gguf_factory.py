"""The factory writes what it is asked to, as the `gguf` package's own reader sees it."""

import gguf
import numpy as np
import pytest

from luce_core.testing.gguf_factory import Blocks, split_gguf, write_gguf

ARCH = {"general.architecture": "tiny"}
KINDS = gguf.GGUFValueType
RNG = np.random.default_rng(11)


def fields_of(tmp_path, metadata):
    reader = gguf.GGUFReader(write_gguf(tmp_path / "m.gguf", {**ARCH, **metadata}, {}))
    return {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (3, KINDS.UINT32), (2**32 - 1, KINDS.UINT32), (2**32, KINDS.UINT64), (-1, KINDS.INT32),
        (-(2**31), KINDS.INT32), (-(2**31) - 1, KINDS.INT64), (0.5, KINDS.FLOAT32), (True, KINDS.BOOL),
        ("text", KINDS.STRING), (np.uint8(3), KINDS.UINT8), (np.int8(-3), KINDS.INT8),
        (np.uint16(3), KINDS.UINT16), (np.int16(3), KINDS.INT16),
        (np.int64(3), KINDS.INT64), (np.uint64(3), KINDS.UINT64), (np.float64(0.1), KINDS.FLOAT64),
    ],
)  # fmt: skip
def test_scalars_take_the_documented_type(tmp_path, value, kind):
    field = fields_of(tmp_path, {"k": value})["k"]
    assert field.types == [kind]
    assert field.contents() == value


@pytest.mark.parametrize(
    ("value", "element"),
    [
        ([1, 2], KINDS.UINT32), ((1, -2), KINDS.INT32), ([1, 2**40], KINDS.UINT64),
        ([-1, 2**40], KINDS.INT64), ([0.5, 1.0], KINDS.FLOAT32), ([1, 0.5], KINDS.FLOAT32),
        ([True, False], KINDS.BOOL), (["a", ""], KINDS.STRING),
        (b"\0\xff", KINDS.UINT8), (np.array([1, 2], np.int16), KINDS.INT16), (np.array([0.1]), KINDS.FLOAT64),
    ],
)  # fmt: skip
def test_lists_take_the_documented_type(tmp_path, value, element):
    field = fields_of(tmp_path, {"k": value})["k"]
    assert field.types == [KINDS.ARRAY, element]
    assert field.contents() == list(value)


def test_metadata_keeps_its_order_and_the_architecture_comes_first(tmp_path):
    fields = fields_of(tmp_path, {"b": 1, "a": 2})
    assert list(fields) == ["general.architecture", "b", "a"]
    assert fields["general.architecture"].contents() == "tiny"


@pytest.mark.parametrize("metadata", [{}, {"general.architecture": 3}])
def test_the_architecture_is_needed(tmp_path, metadata):
    with pytest.raises(ValueError, match=r"general\.architecture"):
        write_gguf(tmp_path / "m.gguf", metadata, {})


@pytest.mark.parametrize("value", [[1, "a"], [], [True, 2], {"a": 1}, None, [[1], [2]]])
def test_what_has_no_type_is_refused(tmp_path, value):
    with pytest.raises(ValueError, match=r"metadata\['k'\]"):
        write_gguf(tmp_path / "m.gguf", {**ARCH, "k": value}, {})


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("f2", "F16"), ("f4", "F32"), ("f8", "F64"), ("i1", "I8"), ("i2", "I16"), ("i4", "I32"), ("i8", "I64")],
)
def test_tensors_keep_dtype_shape_and_values(tmp_path, dtype, kind):
    given = (RNG.normal(size=(2, 3, 4)) * 50).astype(dtype)
    (entry,) = gguf.GGUFReader(write_gguf(tmp_path / "m.gguf", ARCH, {"w": given})).tensors
    assert entry.shape.tolist() == [4, 3, 2]
    assert entry.tensor_type.name == kind
    np.testing.assert_array_equal(entry.data, given)


@pytest.mark.parametrize(
    "given", [np.ones((2, 2), bool), np.ones(3, np.uint8), np.float32(1), np.ones(2, complex)]
)
def test_tensors_without_a_format_are_refused(tmp_path, given):
    with pytest.raises(ValueError, match="tensor 'w' is"):
        write_gguf(tmp_path / "m.gguf", ARCH, {"w": np.asarray(given)})


def types_of(path):
    return {entry.name: entry.tensor_type.name for entry in gguf.GGUFReader(path).tensors}


TENSORS = {
    "blk.0.q": np.ones((2, 256), np.float32),
    "blk.1.q": np.ones((2, 256), np.float32),
    "blk.0.v": np.ones((2, 256), np.float16),
    "norm": np.ones(256, np.float32),
    "ids": np.ones((2, 256), np.int32),
}


def test_one_format_goes_to_every_float_matrix(tmp_path):
    blocks = Blocks("Q8_0", np.zeros((2, 34), np.uint8))
    path = write_gguf(tmp_path / "m.gguf", ARCH, {**TENSORS, "done": blocks}, quant="Q4_0")
    assert types_of(path) == {
        "blk.0.q": "Q4_0", "blk.1.q": "Q4_0", "blk.0.v": "Q4_0", "norm": "F32", "ids": "I32", "done": "Q8_0",
    }  # fmt: skip


def test_patterns_choose_formats_and_the_first_match_wins(tmp_path):
    quant = {"blk.0.q": "Q6_K", "blk.*.q": "Q4_K", "norm": "BF16"}
    assert types_of(write_gguf(tmp_path / "m.gguf", ARCH, TENSORS, quant=quant)) == {
        "blk.0.q": "Q6_K", "blk.1.q": "Q4_K", "blk.0.v": "F16", "norm": "BF16", "ids": "I32",
    }  # fmt: skip


def test_a_pattern_that_matches_nothing_is_a_mistake(tmp_path):
    with pytest.raises(ValueError, match=r"quant names \['blk.9.\*'\], which match no tensor"):
        write_gguf(tmp_path / "m.gguf", ARCH, TENSORS, quant={"blk.9.*": "Q4_K"})


def test_alignment(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {**ARCH, "general.alignment": 256}, TENSORS)
    reader = gguf.GGUFReader(path)
    assert reader.alignment == 256
    assert all(entry.data_offset % 256 == 0 for entry in reader.tensors)


def test_split_files_hold_the_whole_between_them(tmp_path):
    metadata = {**ARCH, "n": 3, "f": 0.5, "t": ["a", "b"], "types": [1, -2], "general.alignment": 64}
    path = write_gguf(tmp_path / "m.gguf", metadata, TENSORS, quant={"blk.0.q": "Q4_K"})
    shards = split_gguf(path, 3)
    assert [shard.name for shard in shards] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    readers = [gguf.GGUFReader(shard) for shard in shards]
    whole = gguf.GGUFReader(path)
    merged = [entry for reader in readers for entry in reader.tensors]
    assert [entry.name for entry in merged] == [entry.name for entry in whole.tensors]
    for mine, theirs in zip(merged, whole.tensors, strict=True):
        assert mine.tensor_type == theirs.tensor_type
        np.testing.assert_array_equal(mine.shape, theirs.shape)
        np.testing.assert_array_equal(mine.data, theirs.data)
    for key, field in whole.fields.items():
        if not key.startswith("GGUF."):
            assert readers[0].fields[key].contents() == field.contents()
            assert readers[0].fields[key].types == field.types
    for number, reader in enumerate(readers):
        split = {key: field.contents() for key, field in reader.fields.items() if key.startswith("split.")}
        assert split == {"split.no": number, "split.count": 3, "split.tensors.count": 5}
        assert number == 0 or not [key for key in reader.fields if not key.startswith(("split.", "GGUF."))]
    assert path.exists()


@pytest.mark.parametrize("parts", [0, 6])
def test_every_part_has_a_tensor(tmp_path, parts):
    path = write_gguf(tmp_path / "m.gguf", ARCH, TENSORS)
    with pytest.raises(ValueError, match="wanted 1 to 5"):
        split_gguf(path, parts)
