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

LENGTH = 64


@pytest.fixture(scope="module")
def rig():
    entry = next(entry for entry in ENTRIES if entry.name == DEFAULT_MODEL)
    store = Store(cache_folder())
    if not store.has(entry):
        pytest.skip(f"model {DEFAULT_MODEL!r} is not here; `luce-core pull {DEFAULT_MODEL}` fetches it")
    assert file_sha256(store.path(entry)) == REFERENCE["sha256"]
    return ModelRig(store.path(entry), "luce_arch_llama.hooks", num_slots=20, num_blocks=400)


def test_the_reference_is_what_it_claims():
    assert len(REFERENCE["prompts"]) == 20
    assert {len(prompt["ids"]) for prompt in REFERENCE["prompts"]} == {LENGTH}
    assert {prompt["kind"] for prompt in REFERENCE["prompts"]} == {"chat", "raw"}


def parting(got, prompt):
    """Where they part, and how near the reference's two best are there; "" for the same tokens."""
    if got == prompt["ids"]:
        return ""
    step = next(n for n, pair in enumerate(zip(got, prompt["ids"], strict=True)) if pair[0] != pair[1])
    gap = prompt["gaps"][step]
    return f"{prompt['text']!r}: step {step} differs; the reference's top-2 gap there is {gap}"


@pytest.mark.model
@pytest.mark.slow
def test_the_exact_tier_gives_the_same_tokens(rig):
    """All prompts, decoded beside each other."""
    prompts = REFERENCE["prompts"]
    seqs = [rig.open() for _ in prompts]
    for seq, prompt in zip(seqs, prompts, strict=True):
        rig.prefill({seq: prompt["prompt"][:-1]})
    newest, answers = [prompt["prompt"][-1] for prompt in prompts], [[] for _ in prompts]
    for _ in range(LENGTH):
        held = rig.hold({seq: [token] for seq, token in zip(seqs, newest, strict=True)})
        newest = [int(logits.argmax()) for logits in held.logits]
        for answer, token in zip(answers, newest, strict=True):
            answer.append(token)
        rig.commit(held, [[0]] * len(seqs))
    rig.close(*seqs)
    assert not [words for words in map(parting, answers, prompts) if words]


@pytest.mark.model
@pytest.mark.slow
def test_a_prompt_alone_gives_the_same_tokens(rig):
    prompt = REFERENCE["prompts"][1]
    seq = rig.open()
    rig.prefill({seq: prompt["prompt"][:-1]})
    token, got = prompt["prompt"][-1], []
    for _ in range(LENGTH):
        token = int(rig.decode(seq, token).argmax())
        got.append(token)
    rig.close(seq)
    assert not parting(got, prompt)
