"""Any split of a stream of ids gives the text of the whole, and never half a character."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luce_core.errors import RequestError
from luce_core.testing.toy_vocab import toy_vocabulary
from luce_core.text import Detokenizer, Tokenizer

TOY = Tokenizer.from_metadata(toy_vocabulary("bpe"))
TOY_SPM = Tokenizer.from_metadata(toy_vocabulary("spm"))
TOKENIZERS = st.sampled_from([TOY, TOY_SPM])


def split(ids, cuts):
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[start:stop] for start, stop in itertools.pairwise(edges)]


def fed(detokenizer, chunks):
    pieces = [detokenizer.push(chunk) for chunk in chunks]
    return pieces, "".join(pieces) + detokenizer.flush()


@settings(max_examples=120, deadline=None)
@given(TOKENIZERS, st.lists(st.integers(0, 288), max_size=40), st.lists(st.integers(0, 50)), st.booleans())
def test_any_split_of_any_ids_gives_the_text_of_the_whole(tokenizer, ids, cuts, special):
    detokenizer = Detokenizer(tokenizer, special=special, start_of_text=True)
    _, text = fed(detokenizer, split(ids, cuts))
    assert text == tokenizer.decode(ids, special=special)
    # flush() leaves it as new
    assert fed(detokenizer, [[token] for token in ids])[1] == text


@settings(max_examples=100, deadline=None)
@given(TOKENIZERS, st.text(max_size=30), st.lists(st.integers(0, 200), max_size=10))
def test_text_never_comes_in_broken_characters(tokenizer, text, cuts):
    text = text.replace("\ufffd", "?").replace("\u2581", "_")
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer, start_of_text=True)
    pieces, whole = fed(detokenizer, split(ids, cuts))
    assert whole == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_emoji_over_four_ids_comes_whole():
    ids = TOY.encode("😀")
    assert len(ids) == 4
    detokenizer = Detokenizer(TOY)
    assert [detokenizer.push([token]) for token in ids] == ["", "", "", "😀"]
    assert detokenizer.flush() == ""


def test_a_broken_tail_becomes_one_replacement_character_at_the_end():
    detokenizer = Detokenizer(TOY)
    assert detokenizer.push(TOY.encode("a😀")[:-1]) == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.push(TOY.encode("b")) == "b"


def test_bytes_that_cannot_continue_are_replaced_at_once():
    detokenizer = Detokenizer(TOY)
    assert detokenizer.push([0xE2]) == ""
    assert detokenizer.push([ord("(")]) == "\ufffd("


def test_special_tokens_are_hidden_markers_are_shown():
    ids = TOY.encode("<think>a</think>b<|im_end|>", special=True)
    assert Detokenizer(TOY).push(ids) == "<think>a</think>b"
    assert Detokenizer(TOY, special=True).push(ids) == "<think>a</think>b<|im_end|>"
    visible = Detokenizer(TOY, visible={TOY.token_id("<|im_end|>")})
    assert visible.push(ids) == "<think>a</think>b<|im_end|>"


def test_a_hidden_token_does_not_break_the_character_around_it():
    first, *rest = TOY.encode("é")
    detokenizer = Detokenizer(TOY)
    assert detokenizer.push([first, TOY.token_id("<|im_end|>")]) == ""
    assert detokenizer.push(rest) == "é"


def test_a_continuation_keeps_the_space_a_text_start_drops():
    ids = TOY_SPM.encode("world", add_bos=False)
    assert Detokenizer(TOY_SPM).push(ids) == " world"
    assert Detokenizer(TOY_SPM, start_of_text=True).push(ids) == "world"


def test_ids_that_do_not_exist_are_refused():
    for token in (-1, TOY.vocab_size):
        with pytest.raises(RequestError, match=f"Token id {token} does not exist"):
            Detokenizer(TOY).push([token])
