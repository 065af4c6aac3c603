"""Plans for cards that are not here, by the plugins that come with the project: header-only files."""

import importlib.util
import json
from pathlib import Path

import pytest

from luce_core.cli.main import run

NEEDED = ("luce_backend_triton", "luce_arch_qwen35", "luce_arch_gemma")
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED), reason="needs plugins of the project"
)
MIB = 1 << 20


@pytest.fixture
def plan(tmp_path, capsys):
    """-> the plan of a geometry, or what was said instead; as on a machine without a card."""

    def make(geometry, *arguments):
        path = tmp_path / f"{geometry}.gguf"
        env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        if not path.exists():
            assert run(["synth", geometry, str(path), "--header-only"], env, Path(tmp_path)) == 0
        capsys.readouterr()
        status = run(["plan", str(path), "--json", *arguments], env, Path(tmp_path))
        shown = capsys.readouterr()
        return json.loads(shown.out) if status == 0 else shown.err

    return make


@pytest.mark.parametrize("capability", ["6.1", "7.5", "8.6", "8.9", "12.0"])
def test_27b_in_q4_k_m_on_24_gib(plan, capability):
    made = plan("qwen3.5-27b", "--memory", "24G", "--device", "cuda", "--triton-capability", capability)
    fields = {name: field["value"] for name, field in made["fields"].items()}
    sizes = {row["owner"]: row["bytes"] for row in made["memory"] if row["device"] == "cuda:0"}
    assert made["models"][0]["devices"] == ["cuda:0"]
    assert fields["execution.op_layers"] in ("('triton',)", "('triton-portable',)")
    assert fields["parts.executor"] == "('cuda-graphs',)"
    assert fields["engine.row_budget"] == 512
    assert fields["cache.k_type"] == fields["cache.v_type"] == "f16"
    assert fields["context"] > 32_000
    assert sizes["executor cuda-graphs"] == 128 * MIB  # of prompts and of held rows
    assert 15 << 30 < sizes["weights of target"] < 16.5 * (1 << 30)
    assert sum(sizes.values()) <= fields["memory.limit_bytes"] == int(0.85 * (24 << 30))


def test_gemma_31b_in_24_gib_wants_a_smaller_chunk_and_most_of_the_memory(plan):
    card = ("--memory", "24G", "--device", "cuda", "--triton-capability", "8.6")
    said = plan("gemma-4-31b", *card)
    assert "Lower --ctx-size, --max-sequences or --chunk" in said
    contexts = [
        plan("gemma-4-31b", *card, "--max-sequences", "1", *more)["fields"]["context"]["value"]
        for more in ((), ("--chunk", "128"), ("--chunk", "128", "--memory-limit", "22.5G"))
    ]
    assert contexts == sorted(contexts)
    assert contexts[0] < 2_000
    assert contexts[-1] > 20_000


def test_a_card_without_kernels_is_left_to_the_processor(plan):
    old = ("--memory", "24G", "--triton-capability", "5.2")
    assert plan("qwen3.5-27b", *old)["models"][0]["devices"] == ["cpu"]
    assert "its kernels need 6.1" in plan("qwen3.5-27b", *old, "--device", "cuda")
