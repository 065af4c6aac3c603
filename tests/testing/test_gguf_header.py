"""Headers without weights: read back by the product's reader and by the `gguf` package."""

from __future__ import annotations

import gguf
import pytest

from luce_core.gguf import read_header, summarize
from luce_core.testing.gguf_header import q4_k_m, write_header

METADATA = {
    "general.architecture": "tiny",
    "tiny.count": 7,
    "tiny.eps": 0.5,
    "tiny.flag": True,
    "tiny.counts": [3, 4, 4],
    "tiny.flags": [True, False],
    "tiny.words": ["a", "b c"],
}
SHAPES = {
    "token_embd.weight": (50, 512),
    "blk.0.ffn_up.weight": (96, 256),
    "blk.0.ffn_down.weight": (256, 96),
    "blk.0.ffn_gate_inp.weight": (4, 256),
    "blk.0.ffn_up_exps.weight": (4, 32, 256),
    "blk.0.attn_norm.weight": (256,),
}


def test_what_was_said_is_read_by_both_readers(tmp_path):
    path = write_header(tmp_path / "h.gguf", METADATA, SHAPES)
    ours, theirs = read_header(path), gguf.GGUFReader(path)
    assert {name: tensor.shape for name, tensor in ours.tensors.items()} == SHAPES
    assert {t.name: tuple(int(n) for n in t.shape[::-1]) for t in theirs.tensors} == SHAPES
    assert {t.name: t.tensor_type.name for t in theirs.tensors} == {
        name: q4_k_m(name, shape) for name, shape in SHAPES.items()
    }
    for key, value in METADATA.items():
        assert theirs.fields[key].contents() == value
    assert ours.uint("tiny.count") == 7
    assert ours.uints("tiny.counts") == (3, 4, 4)
    assert ours.strings("tiny.words") == ("a", "b c")


def test_a_file_of_gigabytes_takes_no_disk(tmp_path):
    path = write_header(
        tmp_path / "h.gguf", METADATA, {"token_embd.weight": (1 << 20, 8192)}, lambda *_: "F16"
    )
    assert summarize(read_header(path)).num_weights == 1 << 33
    assert path.stat().st_size > 16 << 30
    assert path.stat().st_blocks * 512 < 1 << 20


def test_what_metadata_cannot_hold_is_refused(tmp_path):
    with pytest.raises(TypeError, match="holds None"):
        write_header(tmp_path / "h.gguf", {"tiny.nothing": None}, SHAPES)
