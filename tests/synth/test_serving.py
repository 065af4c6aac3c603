"""A model of random weights does what any model does: it is planned, loaded, served, and says something."""

import re

import httpx
import pytest

from luce_core import synth
from luce_core.testing.dense.geometries import dense
from luce_core.testing.pipeline import TOY_HOOKS, make_pipeline
from luce_core.testing.server import serving

DENSE_HOOKS = "luce_core.testing.dense.hooks"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    small = dense("small", layers=4, width=128, ffn=256, vocab=4000)
    (path, *_) = synth.write(small, "q4_k_m", tmp_path_factory.mktemp("model") / "m.gguf", shards=2)
    options = {"threads": 1, "ctx_size": 256}
    with serving(make_pipeline(path, TOY_HOOKS, DENSE_HOOKS, options=options)) as served:
        yield served.url


def test_a_chat_is_answered_with_made_up_words(url):
    body = {"messages": [{"role": "user", "content": "What is the time?"}], "max_tokens": 24, "seed": 1}
    answer = httpx.post(f"{url}/v1/chat/completions", json={"model": "toy", **body}, timeout=60).json()
    text = answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] > 4
    assert len(re.findall(r"\b(?:[bcdfghjklmnpqrstvwxz][aeiou]){2,3}\b", text)) > 4


def test_greedy_answers_are_the_same_twice_and_differ_between_prompts(url):
    def answer(prompt):
        body = {"model": "toy", "prompt": prompt, "max_tokens": 16, "temperature": 0}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]

    assert answer("one") == answer("one") != answer("two")
