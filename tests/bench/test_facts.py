import subprocess

import pytest
from attrs import evolve

from luce_core.bench import facts
from luce_core.bench.facts import commit_of, cpu_name, host_facts, peak_rss_bytes
from luce_core.testing.pipeline import make_pipeline
from luce_core.testing.plugin import registry_of
from luce_core.testing.toy import write_toy_model

from .conftest import HOST


def git(folder, *words):
    done = subprocess.run(
        ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-C", str(folder), *words],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def test_the_commit_of_a_checkout_and_whether_it_was_changed(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    found = commit_of(tmp_path)
    assert commit.startswith(found)
    assert len(found) >= 10
    (tmp_path / "untracked").write_text("")
    assert commit_of(tmp_path) == found
    (tmp_path / "file").write_text("two")
    assert commit_of(tmp_path) == f"{found} with changes"


def test_a_folder_inside_a_checkout_is_not_one(tmp_path):
    git(tmp_path, "init", "-q")
    inside = tmp_path / "site-packages"
    inside.mkdir()
    assert commit_of(inside) is None
    assert commit_of(tmp_path) is None  # nothing was committed yet
    assert host_facts(inside).commit == host_facts(inside).luce_core


def test_the_processor_by_its_name(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: A fast one @ 3 GHz\n\nmodel name : another\n")
    assert cpu_name(info) == "A fast one @ 3 GHz"
    assert cpu_name(tmp_path / "none")


@pytest.mark.parametrize(
    ("load", "busy"), [(None, False), (0.0, False), (1.0, False), (1.01, True), (9.6, True)]
)
def test_a_busy_machine_is_said(load, busy):
    host = evolve(HOST, load=load, host_cpus=2)
    assert bool(host.busy) == busy
    if busy:
        assert f"load {load:.1f} on 2 processors" in host.busy


def test_memory_is_in_bytes():
    assert 10 << 20 < peak_rss_bytes() < 1 << 42
    assert facts.peak_device_bytes("cpu") is None
    assert facts.gpu_uuid("cpu") is None


def test_attention_counts_as_fused_where_a_layer_computes_it():
    registry = registry_of("luce_core.testing.toy.hooks")
    assert not facts.has_fused_attention(registry, ())
    assert not facts.has_fused_attention(registry, ("toy",))


def test_what_is_said_of_a_plan(tmp_path):
    from luce_core.gguf import read_header

    path = write_toy_model(tmp_path / "toy.gguf")
    plan = make_pipeline(path, options={"cache_type_k": "f32", "ctx_size": "256"}).plan
    registry = registry_of("luce_core.testing.toy.hooks")
    found = facts.subject_facts(plan, read_header(path), registry, name="toy", threads=3)
    assert (found.architecture, found.quant, found.parameters, found.weight_bytes) == ("toy", "F32", 64, 256)
    assert (found.device, found.device_name, found.context) == ("cpu", "toy device", 256)
    assert (found.k_type, found.v_type, found.threads) == ("f32", "f16", 3)
    assert (found.op_layers, found.drafters) == (("toy",), ())
    assert found.plugins == {"toy": ""}
    assert found.bandwidth == "1.0 GB/s of cpu (made up for tests)"
