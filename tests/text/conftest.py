"""The recorded vocabularies of `data/vocabularies.json.xz` (see make_vocabulary_fixture.py)."""

import functools
import json
import lzma
from pathlib import Path

import pytest

from luce_core.testing.toy_vocab import toy_vocabulary
from luce_core.text import Tokenizer

DATA = Path(__file__).parent / "data" / "vocabularies.json.xz"


class Vocabularies:
    """Real vocabularies cut down to the recorded texts, as GGUF metadata and as tokenizers."""

    @functools.cached_property
    def recorded(self):
        return json.loads(lzma.decompress(DATA.read_bytes()))

    def metadata(self, name, pre=None):
        entry = self.recorded[name]
        tokens, types = [""] * entry["size"], [1] * entry["size"]
        scores = [-1e6] * entry["size"]
        for token, text, kind, score in entry["tokens"]:
            tokens[token], types[token] = text, kind
            scores[token] = -1e6 if score is None else score
        keys = {**entry["keys"], "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
        if entry["merges"]:
            keys["tokenizer.ggml.merges"] = entry["merges"]
        if keys["tokenizer.ggml.model"] == "llama":
            keys["tokenizer.ggml.scores"] = scores
        if pre is not None:
            keys["tokenizer.ggml.pre"] = pre
        return keys

    @functools.cache  # noqa: B019  # one object for the whole session
    def tokenizer(self, name, pre=None):
        return Tokenizer.from_metadata(self.metadata(name, pre))

    def cases(self, name, pre, by):
        """(text, ids) pairs."""
        return [
            (case["text"], case["ids"])
            for case in self.recorded[name]["cases"]
            if (case["pre"], case["by"]) == (pre, by)
        ]

    def groups(self):
        """Every (vocabulary, pre-tokenizer, oracle) there are recorded ids for."""
        seen = {
            (name, case["pre"], case["by"]): None
            for name, entry in self.recorded.items()
            for case in entry["cases"]
        }
        return list(seen)


VOCABULARIES = Vocabularies()


@pytest.fixture(scope="session")
def vocabularies():
    return VOCABULARIES


@pytest.fixture(scope="session")
def toy():
    return Tokenizer.from_metadata(toy_vocabulary("bpe"))


@pytest.fixture(scope="session")
def toy_spm():
    return Tokenizer.from_metadata(toy_vocabulary("spm"))


def pytest_generate_tests(metafunc):
    if "oracle" in metafunc.fixturenames:
        groups = VOCABULARIES.groups()
        ids = [f"{name}-{pre}-by-{by.replace(' ', '-')}" for name, pre, by in groups]
        metafunc.parametrize("oracle", groups, ids=ids)
    if "recorded_name" in metafunc.fixturenames:
        metafunc.parametrize("recorded_name", list(VOCABULARIES.recorded))
