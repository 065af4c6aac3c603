"""Ids recorded from Hugging Face tokenizers and llama.cpp: real vocabularies, each family of splitters."""

import os
import unicodedata
from pathlib import Path

import pytest

from luce_core.gguf import read_header
from luce_core.text import Tokenizer
from luce_core.text.pretokenizers import PRE_TOKENIZERS

# llama.cpp writes these two splitters without \p{M}; the published tokenizer.json files have it, so do we.
WITHOUT_MARKS = {"gpt-4o", "tekken"}


def test_ids_equal_the_oracle(vocabularies, oracle):
    name, pre, by = oracle
    tokenizer = vocabularies.tokenizer(name, pre)
    cases = vocabularies.cases(name, pre, by)
    compared = 0
    for text, ids in cases:
        if pre in WITHOUT_MARKS and any(unicodedata.category(char)[0] == "M" for char in text):
            continue
        assert tokenizer.encode(text, add_bos=False) == ids, text
        compared += 1
    assert compared >= 40


def test_recorded_texts_survive_a_round_trip(vocabularies, recorded_name):
    tokenizer = vocabularies.tokenizer(recorded_name)
    for text, _ in vocabularies.cases(recorded_name, None, "hugging face"):
        assert tokenizer.decode(tokenizer.encode(text), special=False) == text


def test_untrusted_text_spells_no_special_token_of_any_vocabulary(vocabularies, recorded_name):
    tokenizer = vocabularies.tokenizer(recorded_name)
    structural = tokenizer.special | tokenizer.markers
    assert structural
    for token in structural:
        text = tokenizer.token_text(token)
        for attempt in (text, f"a{text}b", text * 2, f" {text}\n{text}", text[1:] + text[:1] + text):
            assert not structural.intersection(tokenizer.encode(attempt, add_bos=False)), attempt


def test_trusted_text_spells_every_special_token(vocabularies, recorded_name):
    tokenizer = vocabularies.tokenizer(recorded_name)
    for token in tokenizer.special | tokenizer.markers:
        assert token in tokenizer.encode(f"a{tokenizer.token_text(token)}b", special=True, add_bos=False)


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("qwen2", {"<|endoftext|>", "<|im_end|>"}),
        ("llama-bpe", {"<|end_of_text|>", "<|eot_id|>"}),
        ("gemma-4", {"<eos>", "<turn|>", "<|tool_response>"}),  # `</s>` is a normal token there
        ("llama-spm", {"</s>"}),
        ("phi-3", {"<|endoftext|>", "<|end|>"}),
        ("deepseek-llm", {"<｜end▁of▁sentence｜>"}),
        ("starcoder", {"<|endoftext|>"}),
    ],
)
def test_ends_of_generation(vocabularies, name, ends):
    tokenizer = vocabularies.tokenizer(name)
    assert {tokenizer.token_text(token) for token in tokenizer.eog} == ends


@pytest.mark.parametrize(
    ("name", "add_bos"),
    [
        ("llama-bpe", True),
        ("llama-spm", True),
        ("gemma-4", True),
        ("command-r", True),
        ("qwen2", False),
        ("gpt-2", False),
    ],
)
def test_the_beginning_token_follows_file_and_family(vocabularies, name, add_bos):
    tokenizer = vocabularies.tokenizer(name)
    assert tokenizer.add_bos is add_bos
    assert (tokenizer.encode("hi")[:1] == [tokenizer.bos]) is add_bos


def test_gemma4_adds_its_beginning_token_even_if_the_file_denies_it(vocabularies):
    keys = {**vocabularies.metadata("gemma-4"), "tokenizer.ggml.add_bos_token": False}
    assert Tokenizer.from_metadata(keys).add_bos is True


def test_every_architecture_of_the_project_has_its_splitter():
    wanted = {"llama-bpe", "smollm", "qwen2", "qwen35", "laguna", "bailingmoe", "bailingmoe2", "gpt-2"}
    deepseek = {"deepseek-llm", "deepseek-coder", "deepseek-v3", "joyai-llm", "deepseek-r1-qwen"}
    assert wanted | deepseek <= PRE_TOKENIZERS.keys()


SDIST = os.environ.get("LUCE_TEST_SDIST")


@pytest.mark.slow
@pytest.mark.skipif(SDIST is None, reason="LUCE_TEST_SDIST names no unpacked llama-cpp-python sdist")
def test_whole_vocabularies_against_their_recorded_pairs():
    folder = Path(SDIST) / "vendor" / "llama.cpp" / "models"
    tested = 0
    for path in sorted(folder.glob("ggml-vocab-*.gguf")):
        pairs = path.with_name(path.name + ".inp")
        metadata = read_header(path).metadata
        if not pairs.exists() or metadata["tokenizer.ggml.model"] == "bert":
            continue
        tokenizer = Tokenizer.from_metadata(metadata)
        texts = pairs.read_bytes().decode().split("\n__ggml_vocab_test__\n")
        lines = path.with_name(path.name + ".out").read_text().split("\n")
        for text, line in zip(texts, lines, strict=False):
            ids = [int(word) for word in line.split()]
            assert tokenizer.encode(text, add_bos=False) == ids, (path.name, text)
        tested += 1
    assert tested == 14
