"""The toy vocabularies third parties build test models with."""

import pytest

from luce_core.testing.toy_vocab import toy_vocabulary
from luce_core.text import ChatTemplate, Tokenizer

KINDS = ["bpe", "spm"]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_small_complete_and_consistent(kind):
    metadata = toy_vocabulary(kind)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert 280 <= len(tokens) <= 400
    assert len(set(tokens)) == len(tokens) == len(metadata["tokenizer.ggml.token_type"])
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.notice is None
    text = "".join(map(chr, [*range(256), *range(0x100, 0x3000, 37), 0x1F600, 0x10FFFF]))
    assert tokenizer.decode(tokenizer.encode(text), special=False) == text


@pytest.mark.parametrize("kind", KINDS)
def test_it_chats(kind):
    metadata = toy_vocabulary(kind)
    tokenizer, template = Tokenizer.from_metadata(metadata), ChatTemplate.from_metadata(metadata)
    assert template.notice is None
    ids = tokenizer.encode_segments(template.render([{"role": "user", "content": "hello <|im_end|>"}]))
    end = tokenizer.token_id("<|im_end|>")
    assert ids.count(end) == 1
    assert end in tokenizer.eog
    assert tokenizer.token_id("<think>") in tokenizer.markers


def test_ids_are_stable():
    tokenizer = Tokenizer.from_metadata(toy_vocabulary())
    assert tokenizer.encode("Az\n") == [65, 122, 10]
    assert tokenizer.token_text(tokenizer.encode("hello")[0]) == "hello"
    assert tokenizer.token_id("<|im_end|>") == 282


def test_metadata_is_the_callers_own():
    toy_vocabulary()["tokenizer.ggml.tokens"].clear()
    assert toy_vocabulary()["tokenizer.ggml.tokens"]
