"""`luce-core synth`: what it lists, writes and refuses, and that Ctrl-C leaves nothing."""

import io
import json
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from rich.console import Console

from luce_core.cli import console
from luce_core.gguf import read_header
from luce_core.synth import QUANTS


@pytest.fixture
def dense(installed):
    """The dense model of the kit, whose plugin declares a geometry."""
    installed.add("dense", "luce_core.testing.dense.hooks", provides=("arch.dense",))
    return installed


def test_the_list_has_names_parameters_and_sizes(luce, dense):
    shown = luce("synth", "--list").out
    for word in ("dense-small", "19.0 M", "q4_k_m", "native", "bf16"):
        assert word in shown
    [row] = json.loads(luce("synth", "--json").out)
    assert (row["name"], row["plugin"], row["architecture"]) == ("dense-small", "dense", "dense")
    layer = 2 * 256 + 2 * 256 * 256 + 2 * 128 * 256 + 3 * 512 * 256
    assert row["parameters"] == 32 * layer + 256 + 512 * 256
    assert set(row["bytes"]) == set(QUANTS)


def test_a_model_is_written_and_read(luce, dense, tmp_path):
    told = luce("synth", "dense-small", tmp_path / "m.gguf", "--quant", "Q8_0", "--seed", "3")
    assert (told.status, told.err) == (0, "")
    assert "m.gguf: 19.3 MiB, " in told.out
    assert read_header(tmp_path / "m.gguf").tensor("blk.0.attn_q.weight").format.name == "Q8_0"
    assert "dense" in luce("inspect", tmp_path / "m.gguf").out


def test_shards_by_size(luce, dense, tmp_path):
    told = luce("synth", "dense-small", tmp_path / "m.gguf", "--shard-size", "3M")
    assert told.status == 0
    files = sorted(tmp_path.glob("m-*.gguf"))
    assert f"in {len(files)} files" in told.out
    assert len(files) > 3
    assert len(read_header(files[0]).shards) == len(files)


def test_a_header_alone(luce, dense, tmp_path):
    told = luce("synth", "dense-small", tmp_path / "m.gguf", "--header-only", "--no-tokenizer")
    assert "no weights, " in told.out
    assert "tokenizer.ggml.model" not in read_header(tmp_path / "m.gguf").metadata


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "A geometry and a file are needed"),
        (("dense-small",), "A geometry and a file are needed"),
        (("dense-smal", "m.gguf"), "Did you mean 'dense-small'?"),
        (("dense-small", "m.gguf", "--quant", "q3"), "Quantization 'q3' of 'dense-small' is unknown"),
        (("dense-small", "m.gguf", "--shard-size", "many"), "--shard-size is 'many'"),
        (("dense-small", "m.gguf", "--shards", "0"), "0 shards were asked for"),
        (("dense-small", "m.bin"), "a name that ends in .gguf"),
        (("dense-small", "no/m.gguf"), "Make it first"),
    ],
)
def test_what_is_refused(luce, dense, words, complaint):
    told = luce("synth", *words)
    assert told.status == 2
    assert complaint in told.err


def test_what_is_there_needs_force(luce, dense, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"mine")
    assert "overwrite it with --force" in luce("synth", "dense-small", tmp_path / "m.gguf").err
    assert luce("synth", "dense-small", tmp_path / "m.gguf", "--force").status == 0


@contextmanager
def heeded_ctrl_c():
    """In the background of a shell Ctrl-C is ignored, and children inherit that unless we handle it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_leaves_nothing(dense, environment, tmp_path):
    """A model of 2 GB that would take seconds, interrupted as soon as its file is seen to grow."""
    target = tmp_path / "out"
    target.mkdir()
    source = (
        "from luce_core import synth\n"
        "from luce_core.testing.dense.geometries import dense\n"
        "def geometries():\n"
        "    return [dense('huge', layers=3, width=8192, ffn=8192, vocab=512)]\n"
    )
    (dense.folder / "huge_geometries.py").write_text(source)
    dense.write(
        "huge",
        "@hookimpl\ndef luce_register_archs():\n"
        "    return [ArchSpec(('huge',), 'huge_geometries:geometries', 'huge_geometries:geometries', "
        "geometries='huge_geometries:geometries')]\n",
    )
    words = [sys.executable, "-m", "luce_core", "synth", "huge", str(target / "m.gguf"), "--quant", "f16"]
    with heeded_ctrl_c():
        running = subprocess.Popen(words, env=environment(), cwd=tmp_path)
    until = time.monotonic() + 60
    while not any(path.stat().st_size > 1 << 20 for path in target.iterdir()):
        assert running.poll() is None, "it ended by itself"
        assert time.monotonic() < until
    running.send_signal(signal.SIGINT)
    assert running.wait(timeout=60) == 130
    assert list(target.iterdir()) == []


def test_a_bar_is_shown_to_who_watches_and_goes_when_it_is_done(monkeypatch):
    screen = io.StringIO()
    watched = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr(console, "errors", lambda: watched)
    with console.byte_progress("small q8_0") as progress:
        progress(5 << 20, 10 << 20)
    assert "small q8_0" in screen.getvalue()
    assert "5.2/10.5 MB" in screen.getvalue()


def test_nothing_is_shown_to_a_pipe(luce, dense, tmp_path):
    assert luce("synth", "dense-small", tmp_path / "m.gguf").err == ""
