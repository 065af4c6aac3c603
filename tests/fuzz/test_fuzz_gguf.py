"""The fuzzing harness itself: its seeds are models, and it sees what it should see."""

import importlib.util
from pathlib import Path

import pytest

from luce_core.gguf import FORMATS, GgufFile

SPEC = importlib.util.spec_from_file_location("fuzz_gguf", Path(__file__).with_name("fuzz_gguf.py"))
fuzz_gguf = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fuzz_gguf)


@pytest.mark.parametrize("seed", fuzz_gguf.seeds())
def test_every_seed_is_a_model_and_small_enough(seed, tmp_path):
    assert fuzz_gguf.one_input(seed, tmp_path)
    assert len(seed) <= fuzz_gguf.MAX_INPUT_BYTES


def test_the_seeds_hold_every_format_and_a_split_set(tmp_path):
    formats, shards = set(), set()
    for seed in fuzz_gguf.seeds():
        fuzz_gguf.one_input(seed, tmp_path)
        with GgufFile.open(tmp_path / "m-00001-of-00002.gguf") as file:
            formats |= {info.format for info in file.header.tensors.values()}
            shards.add(len(file.header.shards))
    assert formats == set(FORMATS)
    assert shards == {1, 2}


@pytest.mark.parametrize("data", [b"", b"\0", b"\0\0", b"\0\0GGUF", b"\xff\xff" + bytes(64)])
def test_nonsense_is_no_model(data, tmp_path):
    assert not fuzz_gguf.one_input(data, tmp_path)


def test_another_exception_than_the_promised_one_gets_out(tmp_path, monkeypatch):
    def broken(*arguments):
        raise IndexError("unchecked")

    monkeypatch.setattr("luce_core.gguf.file.parse_table", broken)
    with pytest.raises(IndexError):
        fuzz_gguf.one_input(fuzz_gguf.seeds()[0], tmp_path)
