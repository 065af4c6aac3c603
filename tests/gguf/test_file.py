"""Opening models: one file, split sets, views that outlive the file, identity.

The reader of the `gguf` package is the oracle.
"""

import os
import pickle
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from luce_core.errors import ModelFormatError
from luce_core.gguf import FORMATS, BlockFormat, FormatRegistry, GgufFile, limits, read_header
from luce_core.testing.gguf_factory import Blocks, split_gguf, write_gguf
from luce_core.testing.gguf_raw import ARCH, ARRAY, I32, U16, U32, array, model, pair, tensor

RNG = np.random.default_rng(7)
TENSORS = {
    "token_embd.weight": RNG.normal(size=(10, 256)).astype(np.float32),
    "blk.0.ffn.weight": RNG.normal(size=(3, 4, 64)).astype(np.float32),
    "blk.0.half.weight": RNG.normal(size=(4, 6)).astype(np.float16),
    "output_norm.weight": RNG.normal(size=(256,)).astype(np.float32),
    "ids": np.arange(12, dtype=np.int32).reshape(3, 4),
}
METADATA = {
    "general.architecture": "tiny",
    "tiny.block_count": 1,
    "tiny.eps": 1e-5,
    "tokens": ["a", "b", "é"],
    "types": [1, 2, -3],
    "flag": True,
}
QUANT = {"token_embd.weight": "Q4_K", "blk.0.ffn.weight": "Q8_0"}


def refused(pattern: str):
    return pytest.raises(ModelFormatError, match=pattern)


@pytest.fixture
def path(tmp_path) -> Path:
    return write_gguf(tmp_path / "m.gguf", METADATA, TENSORS, quant=QUANT)


def assert_same_as_package(file: GgufFile, source: Path) -> None:
    reader = gguf.GGUFReader(source)
    assert list(file.header.tensors) == [entry.name for entry in reader.tensors]
    for entry in reader.tensors:
        info = file.header.tensor(entry.name)
        assert info.format.name == entry.tensor_type.name
        assert info.shape == tuple(reversed(entry.shape.tolist()))
        assert info.num_bytes == entry.n_bytes
        assert file.raw(entry.name).tobytes() == entry.data.tobytes()
        if entry.tensor_type is not gguf.GGMLQuantizationType.I32:
            np.testing.assert_array_equal(
                file.dequantize(entry.name), gguf.dequantize(entry.data, entry.tensor_type)
            )


def test_reads_what_the_package_reads(path):
    with GgufFile.open(path) as file:
        assert_same_as_package(file, path)
        for key, value in METADATA.items():
            read = file.header.metadata[key]
            assert (list(read) if isinstance(value, list) else read) == pytest.approx(value)
        assert file.header.path == path
        assert file.header.shards == (path,)


def test_offsets_are_those_of_the_file(path):
    content = path.read_bytes()
    with GgufFile.open(path) as file:
        for name, info in file.header.tensors.items():
            assert content[info.offset : info.offset + info.num_bytes] == file.raw(name).tobytes()


def test_raw_has_rows_of_bytes_in_torch_order_and_copies_nothing(path):
    with GgufFile.open(path) as file:
        raw = file.raw("blk.0.ffn.weight")
        assert raw.shape == (3, 4, 68)
        assert file.raw("output_norm.weight").shape == (1024,)
        assert not raw.flags.owndata
        assert not raw.flags.writeable
        assert np.shares_memory(raw, file.raw("blk.0.ffn.weight"))


def test_dequantize_gives_the_numbers_back(path):
    with GgufFile.open(path) as file:
        np.testing.assert_array_equal(file.dequantize("output_norm.weight"), TENSORS["output_norm.weight"])
        np.testing.assert_array_equal(file.dequantize("ids"), TENSORS["ids"].astype(np.float32))
        name = "blk.0.ffn.weight"
        np.testing.assert_allclose(file.dequantize(name), TENSORS[name], atol=0.02)
        assert file.dequantize("ids").flags.writeable


def test_a_header_can_go_to_another_process(path):
    header = read_header(path)
    sent = pickle.loads(pickle.dumps(header))
    assert sent.tensors == header.tensors
    assert sent.strings("tokens") == header.strings("tokens")
    raw = np.zeros((1, 144), np.uint8)
    assert sent.tensor("token_embd.weight").format.dequantize(raw).shape == (1, 256)


def test_unknown_tensor(path):
    with GgufFile.open(path) as file:
        for read in (file.raw, file.dequantize):
            with refused("tensor 'nope' is missing"):
                read("nope")


def test_views_outlive_the_file(path):
    file = GgufFile.open(path)
    raw, wanted = file.raw("output_norm.weight"), TENSORS["output_norm.weight"]
    file.close()
    file.close()
    np.testing.assert_array_equal(raw.view(np.float32), wanted)
    for read in (file.raw, file.dequantize):
        with pytest.raises(ValueError, match="is closed"):
            read("output_norm.weight")
    assert file.header.arch == "tiny"


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors through /proc")
def test_no_descriptor_leaks(path, tmp_path):
    shards = split_gguf(path, 2)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(path.read_bytes()[:-100])
    before = open_descriptors()
    for _ in range(20):
        with GgufFile.open(shards[0]) as file:
            file.identity()
        read_header(path)
        with pytest.raises(ModelFormatError):
            GgufFile.open(broken)
        with pytest.raises(ModelFormatError):
            GgufFile.open(shards[1])
    assert open_descriptors() == before


def test_a_plugins_format_is_read_with_its_registry(tmp_path):
    registry = FormatRegistry()
    registry.register(BlockFormat("MINE", 4001, 4, 1, lambda blocks: blocks.repeat(4, 1).astype(np.float32)))
    path = tmp_path / "m.gguf"
    path.write_bytes(model(tensors=[tensor(b"w", (8, 2), 4001)], data=b"\1\2\3\4"))
    with GgufFile.open(path, registry) as file:
        assert file.dequantize("w").tolist() == [[1.0] * 4 + [2.0] * 4, [3.0] * 4 + [4.0] * 4]
    with refused("tensor 'w' has unknown type id 4001"):
        read_header(path)


# Files that are none


def test_missing_file(tmp_path):
    with refused(r"nothing.gguf' cannot be read: .*No such file"):
        read_header(tmp_path / "nothing.gguf")


def test_directory(tmp_path):
    with refused("cannot be read: it is not a regular file"):
        read_header(tmp_path)


def test_empty_file(tmp_path):
    (tmp_path / "m.gguf").touch()
    with refused("the file is empty"):
        read_header(tmp_path / "m.gguf")


def test_named_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "m.gguf")
    with refused("not a regular file"):
        read_header(tmp_path / "m.gguf")


def test_device():
    with refused("not a regular file"):
        read_header("/dev/zero")


def test_a_path_no_file_can_have():
    with refused("cannot be read: .*null"):
        read_header("m\0.gguf")


def test_a_vast_sparse_file_costs_nothing(tmp_path):
    size, path = 1 << 36, tmp_path / "m.gguf"
    path.write_bytes(model(tensors=[tensor(b"w", (1 << 17, 1 << 17))]))
    os.truncate(path, size + 4096)
    with GgufFile.open(path) as file:
        assert file.header.tensor("w").num_bytes == size
        assert file.raw("w")[-1, -1] == 0
        assert len(file.identity()) == 32


# Split models


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_a_split_model_reads_like_the_whole(path, parts):
    shards = split_gguf(path, parts)
    with GgufFile.open(shards[0]) as file, GgufFile.open(path) as whole:
        assert file.header.shards == tuple(shards)
        assert list(file.header.tensors) == list(whole.header.tensors)
        assert {info.shard for info in file.header.tensors.values()} == set(range(parts))
        for name in whole.header.tensors:
            np.testing.assert_array_equal(file.raw(name), whole.raw(name))
        assert file.header.strings("tokens") == ("a", "b", "é")


def test_shards_are_looked_for_beside_the_name_that_was_opened(path, tmp_path):
    shards = split_gguf(path, 2)
    links = tmp_path / "links"
    links.mkdir()
    for index, shard in enumerate(shards):
        blob = shard.rename(tmp_path / f"blob{index}")
        (links / shard.name).symlink_to(blob)
    assert len(read_header(links / shards[0].name).tensors) == len(TENSORS)


def test_missing_shards_are_named(path):
    shards = split_gguf(path, 5)
    shards[1].unlink()
    shards[3].unlink()
    with refused(r"lacks 2 of its 5 files: m-00002-of-00005.gguf, m-00004-of-00005.gguf; wanted"):
        read_header(shards[0])


def test_opening_a_later_shard_names_the_first(path):
    shards = split_gguf(path, 3)
    with refused(r"is number 2 of 3; wanted the first\. Open '.*m-00001-of-00003.gguf'"):
        read_header(shards[1])


def test_a_renamed_shard(path, tmp_path):
    shards = split_gguf(path, 2)
    other = shards[0].rename(tmp_path / "other.gguf")
    with refused(r"file name is 'other.gguf'; wanted a name that ends in -00001-of-00002"):
        read_header(other)


def test_shards_swapped_by_name(path, tmp_path):
    shards = split_gguf(path, 3)
    spare = shards[1].rename(tmp_path / "spare")
    shards[2].rename(shards[1])
    spare.rename(shards[2])
    with refused(r"00002-of-00003.gguf': metadata key 'split.no' is 2; wanted 1"):
        read_header(shards[0])


def test_the_first_shard_copied_over_the_second(path):
    shards = split_gguf(path, 2)
    shutil.copy(shards[0], shards[1])
    with refused(r"'split.no' is 0; wanted 1"):
        read_header(shards[0])


def split_keys(number, count, num_tensors):
    return [
        pair(b"split.no", U16, struct.pack("<H", number)),
        pair(b"split.count", U16, struct.pack("<H", count)),
        pair(b"split.tensors.count", I32, struct.pack("<i", num_tensors)),
    ]


def write_set(folder: Path, *files: bytes) -> Path:
    for index, data in enumerate(files, start=1):
        (folder / f"s-{index:05}-of-{len(files):05}.gguf").write_bytes(data)
    return folder / f"s-00001-of-{len(files):05}.gguf"


def shard(number, count, num_tensors, name, *pairs):
    return model([*pairs, *split_keys(number, count, num_tensors)], [tensor(name, (8,))], bytes(32))


def test_a_set_with_the_least_metadata(tmp_path):
    path = write_set(tmp_path, shard(0, 2, 2, b"a", ARCH), shard(1, 2, 2, b"b"))
    assert list(read_header(path).tensors) == ["a", "b"]


@pytest.mark.parametrize(
    ("second", "complaint"),
    [
        (shard(1, 3, 2, b"b"), "'split.count' is 3; wanted 2"),
        (shard(1, 2, 3, b"b"), "'split.tensors.count' is the number 3|'split.tensors.count' is 3; wanted 2"),
        (shard(1, 2, -1, b"b"), "'split.tensors.count' is the number -1; wanted a non-negative"),
        (shard(1, 2, 2, b"a"), "tensor 'a' is also in 's-00001-of-00002.gguf'"),
        (model(split_keys(1, 2, 2)), "'split.tensors.count' is 2; wanted 1"),
        (model([ARCH], [tensor(b"b", (8,))], bytes(32)), "'split.no' is missing"),
        (b"", "the file is empty"),
        (b"GGUF", "the version needs"),
    ],
)
def test_a_second_file_that_does_not_belong(tmp_path, second, complaint):
    path = write_set(tmp_path, shard(0, 2, 2, b"a", ARCH), second)
    with refused(complaint):
        read_header(path)


@pytest.mark.parametrize("count", [0, 1025, 65535])
def test_absurd_numbers_of_files(tmp_path, count):
    path = tmp_path / f"s-00001-of-{count:05}.gguf"
    path.write_bytes(model([ARCH, *split_keys(0, count, 1)]))
    with refused(f"'split.count' is {count}; wanted 1 to 1024"):
        read_header(path)


def test_hundreds_of_missing_files_are_not_all_listed(tmp_path):
    path = tmp_path / "s-00001-of-00900.gguf"
    path.write_bytes(model([ARCH, *split_keys(0, 900, 1)]))
    with refused(r"lacks 899 of its 900 files: .*-00011-of-00900.gguf and 889 more;"):
        read_header(path)


@pytest.mark.parametrize("kind", [(U32, struct.pack("<I", 1)), (ARRAY, array(U16, 1, b"\1\0"))])
def test_split_keys_of_another_type(tmp_path, kind):
    path = tmp_path / "m.gguf"
    path.write_bytes(model([ARCH, pair(b"split.count", *kind)]))
    if kind[0] == U32:
        assert read_header(path).shards == (path,)
    else:
        with refused("'split.count' is an array of 1 uint16 value;"):
            read_header(path)


def test_the_number_of_tensors_is_limited_over_all_files(tmp_path, monkeypatch):
    path = write_set(tmp_path, shard(0, 2, 2, b"a", ARCH), shard(1, 2, 2, b"b"))
    monkeypatch.setattr(limits, "MAX_TENSORS", 1)
    with refused("the split model has 2 tensors; wanted at most 1"):
        read_header(path)


# Identity


def identity(path: Path) -> str:
    with GgufFile.open(path) as file:
        assert file.identity() == file.identity()
        return file.identity()


def test_identity_goes_with_the_content_not_the_place(path, tmp_path):
    copy = tmp_path / "elsewhere.gguf"
    shutil.copy(path, copy)
    os.utime(copy, (1, 1))
    assert identity(copy) == identity(path)
    assert int(identity(path), 16) >= 0
    assert len(identity(path)) == 32


@pytest.mark.parametrize("name", TENSORS)
def test_identity_changes_with_every_tensor(path, tmp_path, name):
    changed = dict(TENSORS, **{name: TENSORS[name] + TENSORS[name].dtype.type(1)})
    other = write_gguf(tmp_path / "other.gguf", METADATA, changed, quant=QUANT)
    assert identity(other) != identity(path)


@pytest.mark.parametrize("key", [key for key in METADATA if key != "general.architecture"])
def test_identity_changes_with_every_key(path, tmp_path, key):
    metadata = {name: value for name, value in METADATA.items() if name != key}
    assert identity(write_gguf(tmp_path / "other.gguf", metadata, TENSORS, quant=QUANT)) != identity(path)


def test_identity_of_a_split_model_covers_every_file(path):
    shards = split_gguf(path, 2)
    before = identity(shards[0])
    with GgufFile.open(shards[0]) as file:
        info = next(info for info in file.header.tensors.values() if info.shard == 1)
    content = bytearray(shards[1].read_bytes())
    content[info.offset + info.num_bytes // 2] ^= 1
    shards[1].write_bytes(content)
    assert identity(shards[0]) != before


def test_identity_of_a_closed_file(path):
    file = GgufFile.open(path)
    file.close()
    with pytest.raises(ValueError, match="is closed"):
        file.identity()


def test_finished_blocks_of_every_format_come_back(tmp_path):
    blocks = {
        f"w.{kind.name}": Blocks(kind.name, RNG.integers(0, 256, (2, 3 * kind.block_bytes), np.uint8))
        for kind in FORMATS
    }
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "tiny"}, blocks)
    with GgufFile.open(path) as file:
        for name, given in blocks.items():
            assert file.header.tensor(name).format.name == given.format
            np.testing.assert_array_equal(file.raw(name), given.data)
