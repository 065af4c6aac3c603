"""A real model answers what Hugging Face answers, token for token: 20 prompts, 64 greedy tokens each.

The reference was recorded by `tools/record_greedy.py`, which also recorded the gap between the two best
logits of every step, so that a difference can be judged. One prompt is longer than the model's window. Needs
`luce-core pull gemma3-270m`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import importlib_metadata
import openai
import pytest

from luce_core.catalog import ENTRIES, Store, cache_folder
from luce_core.catalog.store import file_sha256
from luce_core.testing.rig import ModelRig
from luce_core.text.tokenizer import Tokenizer

NAME = "gemma3-270m"
REFERENCE = json.loads((Path(__file__).parent / "fixtures" / "greedy-gemma3-270m-q4_k_m.json").read_text())
INSTALLED = {dist.name for dist in importlib_metadata.distributions()}
CHUNK = 256
"""Rows whose logits are made at once: 256 MiB with this vocabulary."""
TURNS = "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n"


@pytest.fixture(scope="module")
def path():
    entry = next(entry for entry in ENTRIES if entry.name == NAME)
    store = Store(cache_folder())
    if not store.has(entry):
        pytest.skip(f"model {NAME!r} is not here; `luce-core pull {NAME}` fetches it")
    assert file_sha256(store.path(entry)) == REFERENCE["sha256"] == entry.sha256
    return store.path(entry)


@pytest.fixture(scope="module")
def rig(path):
    return ModelRig(path, "luce_arch_gemma.hooks", num_slots=1, num_blocks=128)


def test_the_reference_is_what_it_claims():
    assert len(REFERENCE["prompts"]) == 20
    assert {len(prompt["ids"]) for prompt in REFERENCE["prompts"]} == {64}
    assert [prompt["kind"] for prompt in REFERENCE["prompts"]] == ["chat"] * 10 + ["raw"] * 10
    assert max(len(prompt["prompt"]) for prompt in REFERENCE["prompts"]) > 512


def difference(prompt, got):
    """What is wrong, in words, or nothing."""
    pairs = enumerate(zip(got, prompt["ids"], strict=False))
    step = next((n for n, pair in pairs if pair[0] != pair[1]), None)
    if step is None:
        return ""
    gap = prompt["gaps"][step]
    return f"{prompt['text'][:60]!r}: step {step} differs; the reference's top-2 gap there is {gap}"


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_behind_every_token_of_the_reference_its_next_one_is_best(rig, number):
    """So greedy decoding gives the reference's tokens, by induction; weights are read once, not 64 times."""
    prompt = REFERENCE["prompts"][number]
    ids = [*prompt["prompt"], *prompt["ids"][:-1]]
    seq, best = rig.open(), []
    for start in range(0, len(ids), CHUNK):
        best += rig.prefill({seq: ids[start : start + CHUNK]})[seq].argmax(-1).tolist()
    rig.close(seq)
    assert not difference(prompt, best[len(prompt["prompt"]) - 1 :])


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("number", [14, 19])
def test_decoding_gives_the_same_tokens(rig, number):
    prompt = REFERENCE["prompts"][number]
    seq, got = rig.open(), []
    for start in range(0, len(prompt["prompt"]) - 1, CHUNK):
        rig.prefill({seq: prompt["prompt"][start : min(start + CHUNK, len(prompt["prompt"]) - 1)]})
    token = prompt["prompt"][-1]
    for _ in range(12):
        token = int(rig.decode(seq, token).argmax())
        got.append(token)
    rig.close(seq)
    assert not difference(prompt, got)


@pytest.mark.model
@pytest.mark.slow
def test_prompts_are_the_tokens_transformers_makes_of_them(rig):
    tokenizer = Tokenizer.from_metadata(rig.header.metadata)
    for prompt in REFERENCE["prompts"]:
        text = TURNS.format(prompt["text"]) if prompt["kind"] == "chat" else prompt["text"]
        assert tokenizer.encode(text, special=True) == prompt["prompt"], prompt["text"]


@pytest.fixture(scope="module")
def client(path):
    """The official client of `luce-core serve gemma3-270m`, with the CPU backend's own choice of tier."""
    if "luce-backend-cpu" not in INSTALLED:
        pytest.skip("luce-backend-cpu must be installed")
    command = [sys.executable, "-m", "luce_core", "serve", NAME, "--port", "0", "--ctx-size", "1024"]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as server:
        watchdog = threading.Timer(300, server.kill)
        watchdog.start()
        lines = []
        for line in server.stdout:
            lines.append(line)
            if found := re.search(r"at (http://\S+/v1)", line):
                break
        else:
            raise AssertionError("".join(lines))
        reader = threading.Thread(target=server.stdout.read)  # rows go on being printed
        reader.start()
        with openai.OpenAI(base_url=found[1], api_key="none", max_retries=0) as one:
            yield one
        server.terminate()
        server.wait(60)
        reader.join(60)
        watchdog.cancel()


@pytest.mark.model
@pytest.mark.slow
def test_the_server_completes_text_as_the_reference_does(client, rig):
    """Sixteen tokens of each raw prompt that leaves rounding room: two hundredths between the two best."""
    tokenizer = Tokenizer.from_metadata(rig.header.metadata)
    certain = [p for p in REFERENCE["prompts"] if p["kind"] == "raw" and min(p["gaps"][:16]) > 0.02]
    assert len(certain) >= 5
    for prompt in certain:
        answer = client.completions.create(
            model=NAME, prompt=prompt["text"], temperature=0, max_tokens=16, extra_body={"ignore_eos": True}
        )
        assert answer.choices[0].text == tokenizer.decode(prompt["ids"][:16]), prompt["text"]


@pytest.mark.model
@pytest.mark.slow
def test_the_server_chats_and_streams(client):
    """The file brings no chat template: its turns are known by the vocabulary's markers."""
    asked = {
        "model": NAME,
        "messages": [{"role": "user", "content": REFERENCE["prompts"][0]["text"]}],
        "temperature": 0,
        "max_tokens": 12,
    }
    whole = client.chat.completions.create(**asked)
    assert whole.usage.prompt_tokens == len(REFERENCE["prompts"][0]["prompt"])
    assert whole.choices[0].message.content
    chunks = client.chat.completions.create(**asked, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == whole.choices[0].message.content
