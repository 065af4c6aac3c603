"""Files of benchmark scripts: nothing is kept that does not say what it was measured on."""

import json
import sys
from argparse import ArgumentParser

import pytest

from luce_core.bench import facts
from luce_core.bench.record import FORMAT, Record, add_option
from luce_core.errors import UsageError

PLACED = {"model": "toy", "quant": "Q4_K", "context": 4096, "batch": 2}


def test_a_file_says_what_it_was_measured_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks/triton/attention.py", "--type", "f16"])
    out = tmp_path / "one.json"
    with Record(out, "cpu", {"model": "toy", "quant": "Q4_K"}) as kept:
        kept.say("reads 100 GB/s")
        kept.say("held 2x1: 3 us", "held", context=4096, batch=2, seconds=3e-6)
        assert not out.exists()
    assert capsys.readouterr().out.splitlines() == ["reads 100 GB/s", "held 2x1: 3 us"]
    data = json.loads(out.read_text())
    assert data["format"] == FORMAT
    assert data["results"] == [{"test": "held", **PLACED, "seconds": 3e-6}]
    assert data["command"] == "attention.py --type f16"
    assert data["device_name"] == data["host_cpu"]
    assert {"commit", "date", "driver", "torch", "triton", "cuda", "load", "luce_core"} <= set(data)
    assert "failed" not in data


@pytest.mark.parametrize("missing", sorted(PLACED))
def test_a_number_without_its_conditions_is_refused(missing):
    figures = {name: value for name, value in PLACED.items() if name != missing}
    with pytest.raises(ValueError, match=f"result 'held' does not say its {missing}"):
        Record(None, "cpu").say("3 us", "held", **figures, seconds=3e-6)


def test_a_run_that_fails_keeps_what_it_had(tmp_path):
    out = tmp_path / "one.json"

    def run():
        with Record(out, "cpu") as kept:
            kept.say("3 us", "held", **PLACED)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        run()
    data = json.loads(out.read_text())
    assert data["failed"] == "RuntimeError: out of memory"
    assert len(data["results"]) == 1


def test_nothing_is_written_without_a_result_or_a_file(tmp_path):
    with Record(tmp_path / "one.json", "cpu") as kept:
        kept.say("hello")
    with Record(None, "cpu") as kept:
        kept.say("3 us", "held", **PLACED)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_said_before_anything_runs(tmp_path):
    (tmp_path / "there.json").touch()
    for name, words in (
        ("there.json", "is there already"),
        ("absent/one.json", "the folder"),
        ("one.txt", r"ends in \.json"),
    ):
        with pytest.raises(UsageError, match=words):
            Record(tmp_path / name, "cpu")


def test_the_option_of_scripts(tmp_path):
    parser = ArgumentParser()
    add_option(parser)
    assert parser.parse_args([]).out is None
    assert parser.parse_args(["--out", str(tmp_path)]).out == tmp_path


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["/usr/bin/luce-core", "bench", "a model.gguf"], "luce-core bench 'a model.gguf'"),
        (["luce-core", "--api-key", "secret", "-n", "3"], "luce-core --api-key ... -n 3"),
        (["luce-core", "--api-key=secret", "--x=y"], "luce-core --api-key=... --x=y"),
    ],
)
def test_a_command_is_shown_without_its_key(words, shown):
    assert facts.command_line(words) == shown


def test_the_driver_of_a_gpu(tmp_path, monkeypatch):
    told = tmp_path / "version"
    told.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul\nGCC version: 12\n")
    assert facts.driver_version("cuda:0", told) == "580.65.06"
    assert facts.driver_version("cpu", told) == ""

    def absent(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(facts.subprocess, "run", absent)
    assert facts.driver_version("cuda:0", tmp_path / "none") == ""
