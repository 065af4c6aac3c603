"""A real model answers what Hugging Face answers, token for token: 20 prompts, 64 greedy tokens each.

The reference was recorded by `tools/record_greedy.py`, which also recorded the gap between the two best
logits of every step, so that a difference can be judged. Needs `luce-core pull smollm2-135m`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from luce_core.catalog import DEFAULT_MODEL, ENTRIES, Store, cache_folder
from luce_core.catalog.store import file_sha256
from luce_core.testing.rig import ModelRig

REFERENCE = json.loads((Path(__file__).parent / "fixtures" / "greedy-smollm2-135m-q4_1.json").read_text())


@pytest.fixture(scope="module")
def rig():
    entry = next(entry for entry in ENTRIES if entry.name == DEFAULT_MODEL)
    store = Store(cache_folder())
    if not store.has(entry):
        pytest.skip(f"model {DEFAULT_MODEL!r} is not here; `luce-core pull {DEFAULT_MODEL}` fetches it")
    assert file_sha256(store.path(entry)) == REFERENCE["sha256"]
    return ModelRig(store.path(entry), "luce_arch_llama.hooks", num_slots=1, num_blocks=64)


def test_the_reference_is_what_it_claims():
    assert len(REFERENCE["prompts"]) == 20
    assert {len(prompt["ids"]) for prompt in REFERENCE["prompts"]} == {64}
    assert {prompt["kind"] for prompt in REFERENCE["prompts"]} == {"chat", "raw"}


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_the_exact_tier_gives_the_same_tokens(rig, number):
    prompt = REFERENCE["prompts"][number]
    seq = rig.open()
    rig.prefill({seq: prompt["prompt"][:-1]})
    token, got = prompt["prompt"][-1], []
    for _ in prompt["ids"]:
        token = int(rig.decode(seq, token).argmax())
        got.append(token)
    rig.close(seq)
    if got != prompt["ids"]:
        step = next(n for n, pair in enumerate(zip(got, prompt["ids"], strict=True)) if pair[0] != pair[1])
        gap = prompt["gaps"][step]
        pytest.fail(f"{prompt['text']!r}: step {step} differs; the reference's top-2 gap there is {gap}")
