"""The memory a plan counts for steps on a card: beside tensors that are traced, and beside what was used."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import frozen

from luce_core.synth import write
from luce_core.synth.known import find
from luce_core.testing.pipeline import make_test_plan, registry_of

TRITON = "luce_backend_triton"
PROGRAM = Path(__file__).with_name("traced_steps.py")
SCRATCH_BYTES = 512 << 20


def needs(*names):
    lacking = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(lacking), reason=f"needs {', '.join(lacking)}")


def trace(folder, arch, geometry, quant, *cases):
    """-> a result of `traced_steps` for each (rows, bytes of scratch)."""
    path = folder / "m.gguf"
    write(
        find(registry_of(f"luce_arch_{arch}.hooks"), geometry), quant, path, header_only=True, tokenizer=False
    )
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "LUCE_"))}
    command = [sys.executable, str(PROGRAM), str(path), arch, json.dumps(cases)]
    done = subprocess.run(command, env=plain, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


MODELS = [
    pytest.param(arch, geometry, quant, marks=needs(TRITON, f"luce_arch_{arch}"), id=geometry)
    for arch, geometry, quant in (
        ("qwen35", "qwen3.5-0.8b", "q8_0"),
        ("qwen35", "qwen3.5-27b", "q4_k_m"),
        ("qwen35", "qwen3.5-35b-a3b", "q4_k_m"),
        ("llama", "llama-3.2-1b", "q4_k_m"),
        ("laguna", "laguna-xs-2.1", "q4_k_m"),
        ("gemma", "gemma-3-1b", "q8_0"),
    )
]


@pytest.mark.parametrize(("arch", "geometry", "quant"), MODELS)
def test_a_step_takes_what_its_plan_says(tmp_path, arch, geometry, quant):
    """Long chunks to a thousandth. Of short ones attention cuts the text: into as many parts as the card has
    room for.
    """
    long, short = trace(tmp_path, arch, geometry, quant, (2048, SCRATCH_BYTES), (512, SCRATCH_BYTES))
    assert long["stated"] == pytest.approx(long["peak"], rel=1e-3)
    assert 0.999 * short["peak"] <= short["stated"] <= 1.1 * short["peak"]
    for one in (long, short):
        spare = one["stated pool"] - one["pool"]
        assert -48 << 20 < spare < 160 << 20, "blocks of 20 MiB are filled more or less well"


@needs(TRITON, "luce_arch_qwen3")
def test_weights_that_become_halves_in_slices_leave_as_many_results_once_more(tmp_path):
    sizes = (2048, SCRATCH_BYTES), (2048, 4 << 20)
    whole, sliced = trace(tmp_path, "qwen3", "qwen3-0.6b", "q8_0", *sizes)
    assert sliced["peak"] > whole["peak"]
    assert sliced["stated"] == pytest.approx(sliced["peak"], rel=0.25)


@frozen
class Measured:
    """One H200, `benchmarks/triton/decode.py`, in the end: LOG.md of 2026-12-01."""

    model: str
    used_gb: float
    """As measured."""
    left_gb: float
    """Of it, what the stack of one kernel took of the whole card, which wants none that large since."""
    options: dict


LONG = {"ctx_size": 40_000, "cache_type_k": "q8_0", "cache_type_v": "q8_0"}
MEASURED = (
    Measured("qwen3.5-27b:q4_k_m", 42.521, 0.0, {}),
    Measured("qwen3.5-35b-a3b:q4_k_m", 31.418, 0.0, {}),
    Measured("qwen3.5-0.8b:q8_0", 6.580, 0.0, {}),
    Measured("qwen3.5-27b:q4_k_m", 70.562, 0.653, LONG),
)


@needs(TRITON, "luce_arch_qwen35")
@pytest.mark.parametrize(
    "case", MEASURED, ids=lambda case: f"{case.model} {case.options.get('ctx_size', '')}"
)
def test_a_plan_is_within_three_percent_of_what_was_used(tmp_path, case):
    """As measured; and less what is not taken since, never one percent below it."""
    hooks, path = ("luce_arch_qwen35.hooks", f"{TRITON}.hooks"), tmp_path / "m.gguf"
    geometry, _, quant = case.model.partition(":")
    write(find(registry_of(hooks[0]), geometry), quant, path, header_only=True)
    options = {"ctx_size": 8192, "chunk": 2048, "max_sequences": 32, "device": "cuda:0", **case.options}
    options |= {"triton.capability": "9.0", "memory_limit": "130G"}
    plan = make_test_plan(path, *hooks, options=options)
    planned = sum(claim.num_bytes for claim in plan.claims if claim.device == "cuda:0") / 1e9
    assert planned / case.used_gb == pytest.approx(1, abs=0.03)
    assert 0.99 < planned / (case.used_gb - case.left_gb) < 1.03
