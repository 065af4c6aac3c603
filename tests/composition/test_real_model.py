"""The default model, served by the installed plugins as a user would, for the official client."""

import re
import subprocess
import sys
import threading

import importlib_metadata
import openai
import pytest

NEEDED = ("luce-arch-llama", "luce-backend-cpu")
INSTALLED = {dist.name for dist in importlib_metadata.distributions()}
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(not set(NEEDED) <= INSTALLED, reason=f"{' and '.join(NEEDED)} must be installed"),
]


@pytest.fixture(
    scope="module", params=[(), ("--cpu-tier", "torch"), ("--cpu-exact",)], ids=["c", "torch", "exact"]
)
def client(request):
    """A client of `luce-core serve` with one tier of the CPU backend."""
    command = [
        sys.executable,
        "-m",
        "luce_core",
        "serve",
        "--port",
        "0",
        "--ctx-size",
        "1024",
        *request.param,
    ]
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
        # Rows go on being printed; somebody must read them.
        reader = threading.Thread(target=server.stdout.read)
        reader.start()
        with openai.OpenAI(base_url=found[1], api_key="none", max_retries=0) as one:
            yield one
        server.terminate()
        server.wait(60)
        reader.join(60)
        watchdog.cancel()


def test_it_knows_the_capital_of_france(client):
    answer = client.chat.completions.create(model="m", messages=QUESTION, temperature=0, max_tokens=30)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_a_stream_is_the_same_text(client):
    asked = {"model": "m", "messages": QUESTION, "temperature": 0, "max_tokens": 30}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    chunks = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_a_second_turn_finds_its_prefix(client):
    first = client.chat.completions.create(model="m", messages=QUESTION, temperature=0, max_tokens=30)
    turns = [
        *QUESTION,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And of Italy?"},
    ]
    second = client.chat.completions.create(model="m", messages=turns, temperature=0, max_tokens=30)
    assert second.usage.prompt_tokens_details.cached_tokens >= 32


def test_equal_seeds_give_equal_text(client):
    asked = {
        "model": "m",
        "messages": QUESTION,
        "temperature": 1.0,
        "top_p": 0.9,
        "max_tokens": 20,
        "seed": 4,
    }
    texts = {client.chat.completions.create(**asked).choices[0].message.content for _ in range(2)}
    assert len(texts) == 1
