"""Rows of a matrix that stays in its file: the same numbers, bounded memory, honest errors."""

from __future__ import annotations

import os
import tracemalloc
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luce_core.errors import ModelFormatError
from luce_core.gguf import GgufFile, rows
from luce_core.gguf.rows import RowReader
from luce_core.testing.gguf_factory import split_gguf, write_gguf
from luce_core.testing.gguf_header import write_header

ROWS, WIDTH = 50, 64
TABLE = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
WANTED = np.array([[3, 49, 3], [0, 17, 48]])


def model(folder, quant=None, **more):
    tensors = {"first": np.ones(5, np.float32), "table": TABLE, **more}
    formats = {"table": quant} if quant else None
    return write_gguf(folder / "m.gguf", {"general.architecture": "tiny"}, tensors, quant=formats)


def reader_of(path, kept=None):
    """A reader that keeps so many rows; None: as many as usual."""
    with GgufFile.open(path) as opened:
        if kept is None:
            return opened.rows("table")
        info = opened.header.tensor("table")
        budget = kept * (info.row_bytes + rows.ENTRY_BYTES)
        return RowReader(path, opened._shards[0].descriptor, info, budget)


@pytest.mark.parametrize("quant", [None, "F16", "BF16", "Q8_0", "Q4_0", "MXFP4"])
def test_rows_are_those_of_the_whole_tensor(tmp_path, quant):
    path = model(tmp_path, quant)
    with GgufFile.open(path) as opened:
        whole = np.array(opened.dequantize("table"))
    reader = reader_of(path)
    assert (reader.name, reader.num_rows, reader.width) == ("table", ROWS, WIDTH)
    for _ in range(2):  # from the file, then from memory
        got = reader.read(WANTED)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, whole[WANTED])


def test_rows_are_read_after_the_file_was_closed_and_unlinked(tmp_path):
    path = model(tmp_path)
    reader = reader_of(path)
    path.unlink()
    np.testing.assert_array_equal(reader.read(WANTED), TABLE[WANTED])


def test_a_table_in_a_later_file_of_a_split_model(tmp_path):
    parts = split_gguf(model(tmp_path), 2)
    with GgufFile.open(parts[0]) as opened:
        assert opened.header.tensor("table").shard == 1
        reader = opened.rows("table")
    np.testing.assert_array_equal(reader.read(WANTED), TABLE[WANTED])


def test_no_rows_are_no_rows(tmp_path):
    assert reader_of(model(tmp_path)).read(np.zeros((0, 3), np.int32)).shape == (0, 3, WIDTH)


@settings(max_examples=30, deadline=None)
@given(calls=st.lists(st.lists(st.integers(0, ROWS - 1), max_size=12), max_size=8), kept=st.integers(0, 9))
def test_a_bounded_cache_reads_only_what_it_dropped(tmp_path_factory, calls, kept):
    """Against a model of it: the newest `kept` rows are not read again."""
    reader = reader_of(model(tmp_path_factory.mktemp("rows")), kept)
    known: OrderedDict[int, None] = OrderedDict()
    with pytest.MonkeyPatch.context() as patch:
        offsets = []
        real = os.pread
        patch.setattr(os, "pread", lambda *args: (offsets.append(args[2]), real(*args))[1])
        for call in calls:
            offsets.clear()
            got = reader.read(np.array(call, np.int32))
            np.testing.assert_array_equal(got, TABLE[call].reshape(-1, WIDTH))
            read = []
            for row in sorted(set(call)):
                if row in known:
                    known.move_to_end(row)
                    continue
                read.append(row)
                if kept:
                    known[row] = None
                if len(known) > kept:
                    known.popitem(last=False)
            base = reader._info.offset
            assert [(offset - base) // (4 * WIDTH) for offset in offsets] == read
            assert reader.num_kept == len(known) <= kept


@pytest.mark.parametrize("kept", [1400, 2000, 2800])
def test_what_is_kept_has_the_size_it_is_said_to_have(tmp_path, kept):
    """The budget counts what Python adds to a row."""
    large = np.random.default_rng(1).standard_normal((4000, 68)).astype(np.float32)
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "tiny"}, {"table": large})
    reader = reader_of(path, kept)
    reader.read(np.arange(10))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for start in range(0, 4000, 100):
        reader.read(np.arange(start, start + 100))
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert reader.num_kept == reader.capacity == kept
    assert taken <= kept * (68 * 4 + rows.ENTRY_BYTES)


@pytest.mark.parametrize("row", [-1, ROWS])
def test_a_row_that_is_none_is_named(tmp_path, row):
    with pytest.raises(IndexError, match=f"Row {row} of tensor 'table'; it has {ROWS}"):
        reader_of(model(tmp_path)).read(np.array([0, row]))


def test_a_file_cut_short_meanwhile_is_refused(tmp_path):
    path = model(tmp_path)
    reader = reader_of(path)
    with path.open("rb+") as opened:
        opened.truncate(path.stat().st_size - 4 * WIDTH * 3)
    with pytest.raises(
        ModelFormatError, match=rf"tensor 'table' ends within row {ROWS - 1}; wanted all {ROWS}"
    ):
        reader.read(np.array([0, ROWS - 1]))
    np.testing.assert_array_equal(reader.read(np.array([0])), TABLE[:1])


def test_a_file_replaced_while_it_is_open_is_refused(tmp_path):
    path = model(tmp_path)
    with GgufFile.open(path) as opened:
        other = tmp_path / "other.gguf"
        other.write_bytes(path.read_bytes())
        other.rename(path)
        with pytest.raises(ModelFormatError, match=r"m.gguf' was replaced while it was being loaded"):
            opened.rows("table")


def test_only_matrices_have_rows(tmp_path):
    path = model(tmp_path, stack=np.ones((2, 3, 4), np.float32))
    with GgufFile.open(path) as opened:
        for name in ("first", "stack"):
            with pytest.raises(
                ModelFormatError, match=rf"tensor '{name}' has the shape .* wanted two dimensions"
            ):
                opened.rows(name)


def test_readers_give_their_descriptors_back(tmp_path):
    path = model(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    readers = [reader_of(path) for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) == before + 5
    readers.clear()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_table_larger_than_memory_costs_what_is_read(tmp_path):
    """400 GB, nearly all of it a hole; the file is mapped by nobody once it is closed."""
    many = 1 << 32
    path = write_header(
        tmp_path / "huge.gguf", {"general.architecture": "tiny"}, {"table": (many, 96)}, lambda *_: "Q8_0"
    )
    reader = reader_of(path, 100)
    with path.open("rb+") as opened:
        opened.seek(reader._info.offset + (many - 1) * 102)
        opened.write(np.float16(0.5).tobytes() + bytes(range(32)))
    before = file_bytes()
    got = reader.read(np.linspace(0, many - 1, 5000).astype(np.int64))
    np.testing.assert_array_equal(got[-1, :32], np.arange(32) * 0.5)
    assert not got[:-1].any()
    assert not got[-1, 32:].any()
    assert reader.num_kept == 100
    assert file_bytes() - before < 1 << 20
    with open("/proc/self/maps") as maps:
        assert str(path) not in maps.read()


def file_bytes():
    """Resident bytes of mapped files, of this process."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssFile"))
