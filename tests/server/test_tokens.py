"""`/tokenize` and `/detokenize` over real sockets. In the toy's vocabulary the id of a byte is the byte."""

import pytest

from luce_core.text import Tokenizer

HELLO = "<|im_start|>h é"


@pytest.fixture
def sentencepiece(served, monkeypatch):
    """The server with a vocabulary that adds a beginning token and marks words with a leading space."""
    from attrs import evolve

    from luce_core.testing.toy_vocab import toy_vocabulary

    tokenizer = Tokenizer.from_metadata(toy_vocabulary("spm"))
    monkeypatch.setattr(served.service, "face", evolve(served.service.face, tokenizer=tokenizer))
    return tokenizer


def tokens(http, **body):
    response = http.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    assert set(response.json()) == {"tokens"}
    return response.json()["tokens"]


def test_ids_of_bytes_are_the_bytes(http):
    assert tokens(http, content="xyz é") == [*b"xyz ", *"é".encode()]
    assert tokens(http, content="") == []


def test_special_tokens_are_text_unless_asked_for(http, served):
    start = served.service.face.tokenizer.token_id("<|im_start|>")
    assert start not in tokens(http, content=HELLO)
    assert bytes(tokens(http, content="<|im_end|>")[:2]) == b"<|"
    parsed = tokens(http, content=HELLO, parse_special=True)
    assert parsed == [start, *b"h ", *"é".encode()]


def test_pieces_are_text_or_the_bytes_of_a_part_of_a_character(http, served):
    the = served.service.face.tokenizer.token_id("the")
    pieces = tokens(http, content="the é", with_pieces=True)
    assert pieces == [
        {"id": the, "piece": "the"},
        {"id": 0x20, "piece": " "},
        {"id": 0xC3, "piece": [0xC3]},
        {"id": 0xA9, "piece": [0xA9]},
    ]


def test_the_beginning_token_comes_only_when_asked_for(http, sentencepiece):
    plain = tokens(http, content="hello")
    assert sentencepiece.bos == 1
    assert 1 not in plain
    assert tokens(http, content="hello", add_special=True) == [1, *plain]


@pytest.mark.parametrize("text", ["", "hello world", "ünïcode 🙂\n\ttabs", "<|im_end|> typed", "  the  and "])
@pytest.mark.parametrize("parse_special", [False, True])
def test_text_comes_back_whole(http, text, parse_special):
    ids = tokens(http, content=text, parse_special=parse_special)
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"content": text}


def test_text_of_a_sentencepiece_vocabulary_comes_back_without_its_added_space(http, sentencepiece):
    ids = tokens(http, content="hello the world")
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"content": "hello the world"}


def test_half_a_character_is_shown_as_such(http):
    assert http.post("/detokenize", json={"tokens": [0x61, 0xC3]}).json() == {"content": "a\ufffd"}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"content": ["a"]}, "content"),
        ("/tokenize", {"content": "a", "with_pieces": "maybe"}, "with_pieces"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": ["1"]}, "tokens.0"),
        ("/detokenize", {"tokens": [1, True]}, "tokens.1"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1, 10**30]}, "tokens"),
    ],
)
def test_a_wrong_field_is_named_in_a_400(http, path, body, field):
    response = http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


def test_the_first_id_beyond_the_vocabulary_is_refused_with_the_range(http, served):
    size = served.service.face.tokenizer.vocab_size
    assert http.post("/detokenize", json={"tokens": [0, size - 1]}).status_code == 200
    refused = http.post("/detokenize", json={"tokens": [0, size]})
    assert refused.status_code == 400
    assert f"token {size} is outside 0..{size - 1}" in refused.json()["error"]["message"]
