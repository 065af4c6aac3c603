"""The made-up vocabulary: exact in size, complete, and its text is what the tokenizer gives back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce_core.errors import UsageError
from luce_core.synth.vocabulary import vocabulary, word
from luce_core.text import ChatTemplate, Tokenizer

SMALL = vocabulary(400)
TOKENIZER = Tokenizer.from_metadata(SMALL)


@pytest.mark.parametrize("size", [400, 49152, 262144])
def test_it_has_so_many_tokens_each_once(size):
    made = vocabulary(size)
    tokens = made["tokenizer.ggml.tokens"]
    assert len(tokens) == len(set(tokens)) == len(made["tokenizer.ggml.token_type"]) == size
    assert tokens[made["tokenizer.ggml.eos_token_id"]] == "<|im_end|>"


@given(st.text(max_size=60))
def test_every_text_comes_back(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_common_words_are_few_tokens():
    assert len(TOKENIZER.encode("the other thing that is in the end of the hand")) < 26


def test_words_are_pronounceable_and_all_different():
    words = [word(number) for number in range(30_000)]
    assert len(set(words)) == len(words)
    assert all(len(text) in (4, 6) for text in words)
    assert word(0) != word(1)


def test_a_chat_is_rendered_and_its_end_ends_an_answer():
    template = ChatTemplate.from_metadata(SMALL)
    assert "<|im_start|>" in str(SMALL["tokenizer.chat_template"])
    assert template.notice is None
    assert TOKENIZER.eog == {SMALL["tokenizer.ggml.eos_token_id"], SMALL["tokenizer.ggml.padding_token_id"]}


def test_too_few_tokens_are_refused_with_what_it_takes():
    with pytest.raises(UsageError, match=r"of 50 tokens has no room .* which has 3"):
        vocabulary(50)
