"""What `inspect` shows: every key and tensor, on one line each, with true totals."""

import numpy as np

from luce_core.gguf import read_header, summarize
from luce_core.testing.gguf_factory import split_gguf, write_gguf

METADATA = {
    "general.architecture": "tiny",
    "tiny.block_count": 2,
    "tiny.eps": 0.5,
    "tiny.flag": True,
    "tokens": [f"t{i}" for i in range(1000)],
    "types": list(range(5)),
    "flags": [True, False],
    "template": "{% for m in messages %}\n" * 50,
    "evil\x1b[2J": "a\x1b]0;title\x07b\u202e",
}
TENSORS = {
    "embed": np.ones((10, 64), np.float32),
    "other": np.ones((2, 32), np.float32),
    "norm": np.ones(64, np.float32),
    "half": np.ones((3, 5), np.float16),
}


def summary_of(tmp_path, parts=1):
    path = write_gguf(tmp_path / "m.gguf", METADATA, TENSORS, quant={"embed": "Q8_0", "other": "Q8_0"})
    return summarize(read_header(split_gguf(path, parts)[0] if parts > 1 else path))


def test_metadata_rows(tmp_path):
    rows = {row.key: (row.kind, row.text) for row in summary_of(tmp_path).metadata}
    assert len(rows) == len(METADATA)
    assert rows["general.architecture"] == ("string", "tiny")
    assert rows["tiny.block_count"] == ("integer", "2")
    assert rows["tiny.eps"] == ("number", "0.5")
    assert rows["tiny.flag"] == ("boolean", "true")
    assert rows["tokens"] == ("1000 strings", "['t0', 't1', 't2', 't3', 't4', 't5', ...]")
    assert rows["types"] == ("5 uint32 values", "[0, 1, 2, 3, 4]")
    assert rows["flags"] == ("2 bool values", "[True, False]")
    assert rows["template"][1].startswith("{% for m in messages %}\\n{%")
    assert rows["template"][1].endswith("...")


def test_rows_are_short_and_harmless_to_a_terminal(tmp_path):
    for row in summary_of(tmp_path).metadata:
        assert len(row.text) <= 100
        assert row.text.isprintable()
        assert row.key.isprintable()


def test_nested_arrays_are_shown(tmp_path):
    from luce_core.testing.gguf_raw import ARRAY, U8, array, model, pair

    path = tmp_path / "n.gguf"
    path.write_bytes(model([pair(b"n", ARRAY, array(ARRAY, 2, array(U8, 2, b"\1\2") * 2))]))
    (row,) = summarize(read_header(path)).metadata
    assert (row.kind, row.text) == ("2 arrays", "[[1, 2], [1, 2]]")


def test_tensor_rows_and_totals(tmp_path):
    summary = summary_of(tmp_path)
    rows = {row.name: (row.format, row.shape, row.num_bytes, row.shard) for row in summary.tensors}
    assert rows == {
        "embed": ("Q8_0", (10, 64), 680, 0),
        "other": ("Q8_0", (2, 32), 68, 0),
        "norm": ("F32", (64,), 256, 0),
        "half": ("F16", (3, 5), 30, 0),
    }
    totals = [(each.format, each.num_tensors, each.num_weights, each.num_bytes) for each in summary.totals]
    assert totals == [("Q8_0", 2, 704, 748), ("F32", 1, 64, 256), ("F16", 1, 15, 30)]
    assert [total.bits_per_weight for total in summary.totals] == [8.5, 32, 16]
    assert (summary.num_weights, summary.num_bytes, summary.num_shards) == (783, 1034, 1)


def test_a_split_model_is_summed_over_its_files(tmp_path):
    whole, split = summary_of(tmp_path), summary_of(tmp_path, parts=3)
    assert split.totals == whole.totals
    assert split.num_shards == 3
    assert {row.shard for row in split.tensors} == {0, 1, 2}


def test_a_model_without_tensors(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "tiny"}, {})
    summary = summarize(read_header(path))
    assert (summary.tensors, summary.totals, summary.num_weights) == ((), (), 0)
