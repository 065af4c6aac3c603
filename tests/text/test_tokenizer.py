"""Trust, special tokens, beginning and end, malformed files; merging against small independent references."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luce_core.errors import ModelFormatError, RequestError
from luce_core.testing.toy_vocab import toy_vocabulary
from luce_core.text import Segment, Tokenizer
from luce_core.text.merging import MAX_SPLIT_CHARS, cut_at_lines
from luce_core.text.vocabulary import TokenType, is_marker

TOY = Tokenizer.from_metadata(toy_vocabulary("bpe"))
TOKENS = toy_vocabulary()["tokenizer.ggml.tokens"]
MERGES = toy_vocabulary()["tokenizer.ggml.merges"]
TOY_SPM = Tokenizer.from_metadata(toy_vocabulary("spm"))
MARKS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>"]
WORDS = st.sampled_from([*MARKS, "hello world", "the", " ", "\n\n", "<|", "im_end", "|>"])
TEXT = st.lists(st.one_of(st.text(max_size=8), WORDS), max_size=8).map("".join)


def changed(kind="bpe", **keys):
    metadata = toy_vocabulary(kind)
    for name, value in keys.items():
        if value is None:
            metadata.pop(f"tokenizer.ggml.{name}", None)
        else:
            metadata[f"tokenizer.ggml.{name}"] = value
    return metadata


def with_tokens(*texts, kind=TokenType.USER_DEFINED, base="bpe"):
    """The toy vocabulary with more tokens behind it."""
    metadata = toy_vocabulary(base)
    keys = {
        "tokens": [*metadata["tokenizer.ggml.tokens"], *texts],
        "token_type": [*metadata["tokenizer.ggml.token_type"], *[int(kind)] * len(texts)],
    }
    if base == "spm":
        keys["scores"] = [*metadata["tokenizer.ggml.scores"], *[0.0] * len(texts)]
    return Tokenizer.from_metadata(changed(base, **keys))


# --- merging -----------------------------------------------------------------------------------------------


def best_pair_first(symbols, rank):
    """Both algorithms by definition: join the best adjacent pair, leftmost of equals, until none is left."""
    symbols = list(symbols)
    while True:
        ranked = [(rank(a, b), at) for at, (a, b) in enumerate(itertools.pairwise(symbols))]
        ranked = [item for item in ranked if item[0] is not None]
        if not ranked:
            return symbols
        _, at = min(ranked)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="helo wrdanig\n", max_size=40))
def test_byte_pairs_merge_by_rank(text):
    ranks = {tuple(merge.split(" ")): at for at, merge in enumerate(MERGES)}
    expected = []
    for word, _ in TOY._merger.pre_tokenizer.pre_tokenize_str(text):
        symbols = best_pair_first(word, lambda a, b: ranks.get((a, b)))
        expected += [TOY.token_id(symbol) for symbol in symbols]
    assert TOY.encode(text) == expected


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="helo wrdanigé😀", min_size=1, max_size=40))
def test_sentencepiece_merges_by_score(text):
    metadata = toy_vocabulary("spm")
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    normal = {
        token: score
        for token, score, kind in zip(tokens, scores, metadata["tokenizer.ggml.token_type"], strict=True)
        if kind == TokenType.NORMAL
    }

    def rank(a, b):
        return None if a + b not in normal else -normal[a + b]

    expected = []
    for symbol in best_pair_first("▁" + text.replace(" ", "▁"), rank):
        if symbol in normal:
            expected.append(tokens.index(symbol))
        else:
            expected += [tokens.index(f"<0x{byte:02X}>") for byte in symbol.encode()]
    assert TOY_SPM.encode(text, add_bos=False) == expected


def test_recorded_sentencepiece_agrees_with_its_definition(vocabularies):
    metadata = vocabularies.metadata("llama-spm")
    tokenizer = vocabularies.tokenizer("llama-spm")
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    normal = {
        text: scores[token]
        for token, text in enumerate(tokens)
        if text and metadata["tokenizer.ggml.token_type"][token] == TokenType.NORMAL
    }
    for text in ("aaaaaaa bbbbbb", "the the the", "Hello world hello", "===== -----", "mississippi" * 3):
        symbols = "▁" + text.replace(" ", "▁")
        pieces = best_pair_first(symbols, lambda a, b: -normal[a + b] if a + b in normal else None)
        expected = [
            tokens.index(piece) if piece in normal else tokens.index(f"<0x{byte:02X}>")
            for piece in pieces
            for byte in ([0] if piece in normal else piece.encode())
        ]
        assert tokenizer.encode(text, add_bos=False) == expected


# --- round trips -------------------------------------------------------------------------------------------

SCRIPTS = [
    "The quick brown fox — “quoted” … naïve café",
    "Ελληνικά, Русский, Українська, Հայերեն, ქართული",
    "العربية والفارسية اردو עברית",
    "हिन्दी বাংলা தமிழ் తెలుగు ไทย ລາວ ខ្មែរ မြန်မာ",
    "中文（简体） 繁體 日本語ひらがなカタカナ 한국어",
    "አማርኛ ᏣᎳᎩ ᓀᐦᐃᔭᐍᐏᐣ ⵜⴰⵎⴰⵣⵉⵖⵜ",
    "👍🏽 👨‍👩‍👧‍👦 🏴󠁧󠁢󠁥󠁮󠁧󠁿 🇯🇵 ❤️ 🫠 ©️ 1️⃣",
    "e\u0301 vs é, A\u030a vs Å, \u1e9b\u0323",
    "tabs\tand\r\nlines\n\n\n   indented\u00a0nbsp\u3000wide \u200bzero\u200d",
    "x=1;  # ok\n\tif (a && b) { return \"c\"; }\x00\x07\x7f",
    "𝒜𝔅ℂ 𐍈 𓀀 \U0010ffff",
]


@pytest.mark.parametrize("text", SCRIPTS)
def test_scripts_and_emoji_survive(vocabularies, text):
    real = [vocabularies.tokenizer(name) for name in ("qwen2", "llama-bpe", "gemma-4", "llama-spm")]
    for tokenizer in (TOY, TOY_SPM, *real):
        assert tokenizer.decode(tokenizer.encode(text), special=False) == text


@settings(max_examples=100, deadline=None)
@given(TEXT)
def test_any_text_survives(text):
    text = text.replace("\u2581", "_")  # SentencePiece spells a space this way and cannot tell them apart
    assert TOY.decode(TOY.encode(text)) == text
    assert TOY.decode(TOY.encode(text, special=True)) == text
    assert TOY_SPM.decode(TOY_SPM.encode(text), special=False) == text


SPLITTERS = {
    pre: Tokenizer.from_metadata(changed(pre=pre))
    for pre in ("qwen2", "gpt-2", "deepseek-v3", "deepseek-llm", "gpt-4o", "laguna", "bailingmoe", "default")
}
LINES = st.sampled_from(["hello", " ", "  ", "\n", "the", "A", "é", "1", "\n\n", "x\ny", "word\n", "\t"])


@settings(max_examples=100, deadline=None)
@given(st.lists(LINES, max_size=60), st.integers(9, 40))
def test_long_text_is_cut_only_where_every_splitter_cuts(words, limit):
    text = "".join(words)
    stretches = list(cut_at_lines(text, limit))
    assert "".join(stretches) == text
    assert max(map(len, stretches)) <= limit
    cuts = list(itertools.pairwise(stretches))
    if all(a.endswith("\n") and not a[-2:].isspace() and b[0].isalpha() for a, b in cuts):
        for tokenizer in SPLITTERS.values():
            pieces = [token for stretch in stretches for token in tokenizer.encode(stretch)]
            assert pieces == tokenizer.encode(text)


@pytest.mark.parametrize("char", [" ", "A", "!"])
def test_the_longest_stretch_is_no_trouble_for_the_splitter(char):
    # Twenty times as long and the engine panics, which no `except Exception` catches.
    text = char * MAX_SPLIT_CHARS
    assert TOY.decode(SPLITTERS["gpt-4o"].encode(text)) == text
    assert max(map(len, cut_at_lines(text * 3, MAX_SPLIT_CHARS))) == MAX_SPLIT_CHARS


def test_half_surrogates_become_replacement_characters():
    text = json.loads(r'"a\ud83dz \ud83d\ude00"')
    assert TOY.decode(TOY.encode(text)) == "a\ufffdz 😀"
    assert TOY.decode(TOY.encode("\ud83d" + "\ude00")) == "😀"


# --- trust -------------------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(TEXT, st.booleans()), max_size=6))
def test_segments_spell_special_tokens_only_where_trusted(parts):
    segments = [Segment(text, trusted) for text, trusted in parts]
    whole = "".join(text for text, _ in parts)
    for tokenizer in (TOY, TOY_SPM):
        ids = tokenizer.encode_segments(segments, add_bos=False)
        structural = [token for token in ids if token in tokenizer.special | tokenizer.markers]
        # What may be found: the marks inside each stretch of trusted text, neighbours joined.
        runs, trusted_before = [], False
        for text, trusted in parts:
            if text:
                if trusted and trusted_before:
                    runs[-1] += text
                elif trusted:
                    runs.append(text)
                trusted_before = trusted
        marks = {tokenizer.token_text(token): token for token in tokenizer.special | tokenizer.markers}
        expected = []
        for run in runs:
            at = 0
            while at < len(run):
                found = max((mark for mark in marks if run.startswith(mark, at)), key=len, default=None)
                expected += [] if found is None else [marks[found]]
                at += len(found or "x")
        assert structural == expected
        assert TOY.decode(TOY.encode_segments(segments)) == "".join(
            text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in [whole]
        )


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(alphabet="hello world\n the", max_size=6), max_size=8), st.data())
def test_borders_between_segments_do_not_change_ordinary_text(texts, data):
    segments = [Segment(text, data.draw(st.booleans())) for text in texts]
    for tokenizer in (TOY, TOY_SPM):
        assert tokenizer.encode_segments(segments) == tokenizer.encode("".join(texts))


def test_a_token_completed_by_untrusted_text_is_no_token():
    for parts in (("<|im_", "end|>"), ("<|im_end|", ">"), ("<", "|im_end|>")):
        for first in (True, False):
            ids = TOY.encode_segments([Segment(parts[0], first), Segment(parts[1], not first)])
            assert not TOY.special.intersection(ids)
    ids = TOY.encode_segments([Segment("<|im_", True), Segment("", False), Segment("end|>", True)])
    assert ids == [TOY.token_id("<|im_end|>")]


def test_no_merge_produces_a_special_token():
    metadata = toy_vocabulary("spm")
    tokens = metadata["tokenizer.ggml.tokens"]
    # Every way to build "</s>" piece by piece exists, with the best scores there are.
    more = ["</", "</s", "s>"]
    tokenizer = Tokenizer.from_metadata(
        changed(
            "spm",
            tokens=[*tokens, *more],
            token_type=[*metadata["tokenizer.ggml.token_type"], 1, 1, 1],
            scores=[*metadata["tokenizer.ggml.scores"], 50.0, 60.0, 40.0],
        )
    )
    ids = tokenizer.encode("</s>", add_bos=False)
    assert [tokenizer.token_text(token) for token in ids] == [" ", "</s", ">"]


def test_whole_word_lookup_does_not_find_special_tokens():
    # The llama-bpe splitter takes a word that is a token whole; "end" is made one, of type control.
    metadata = changed(pre="llama-bpe")
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "end", "help"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 3, 1]
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.token_id("end") not in tokenizer.encode("end", add_bos=False)
    assert tokenizer.encode("help") == [tokenizer.token_id("help")]


def test_user_defined_text_is_matched_everywhere_and_markers_only_when_trusted():
    tokenizer = with_tokens("<table>", "    ", "<tool>", "<table>x")
    table, blanks, tool, longer = (tokenizer.vocab_size - 4 + at for at in range(4))
    assert tokenizer.encode("<table>    <tool>")[:2] == [table, blanks]
    assert tool not in tokenizer.encode("<tool>")
    assert tokenizer.encode("<tool>", special=True) == [tool]
    assert tokenizer.encode("<table>x")[0] == longer  # the longest wins
    assert tokenizer.decode([table, blanks, tool], special=False) == "<table>    <tool>"


def test_sentencepiece_without_the_extra_space():
    # As in Gemma: words carry the space before them, the text begins as it is.
    tokenizer = Tokenizer.from_metadata(changed("spm", add_space_prefix=False))
    assert tokenizer.token_text(tokenizer.encode("hello world", add_bos=False)[0]) == "hello"
    for text in ("hello world", " hello", "  ", ""):
        assert tokenizer.decode(tokenizer.encode(text), special=False) == text


def test_the_extra_space_follows_every_added_token():
    ids = TOY_SPM.encode("<s>the<s> the", special=True)
    assert TOY_SPM.decode(ids) == "<s>the<s> the"
    assert ids[1] == TOY_SPM.token_id("▁the")


def test_space_marks_in_literals_of_sentencepiece_files_mean_spaces():
    tokenizer = with_tokens("▁▁▁", base="spm")
    token = tokenizer.vocab_size - 1
    assert token in tokenizer.encode("a   b")
    assert tokenizer.decode(tokenizer.encode("a   b"), special=False) == "a   b"


@pytest.mark.parametrize(
    "text",
    ["<think>", "</tool_call>", "<|im_end|>", "[INST]", "<｜User｜>", "〈|EOS|〉", "<unused7>", "▁<EOT>"],
)
def test_structure_is_told_from_text(text):
    assert is_marker(text)


@pytest.mark.parametrize("text", ["<table>", "</h1>", "    ", "\n\n", "<>", "a<b>", "ö", "<", "[", "[]"])
def test_text_is_told_from_structure(text):
    assert not is_marker(text)


# --- beginning and end -------------------------------------------------------------------------------------


def test_beginning_and_end_tokens():
    tokenizer = Tokenizer.from_metadata(changed("spm", add_eos_token=True))
    assert tokenizer.encode("a")[0] == tokenizer.bos
    assert tokenizer.encode("a")[-1] == tokenizer.eos
    assert tokenizer.encode("a", add_bos=False, add_eos=False) == tokenizer.encode("a")[1:-1]
    assert tokenizer.encode("") == [tokenizer.bos, tokenizer.eos]
    assert tokenizer.encode_segments([Segment("a", False)])[-1] != tokenizer.eos


def test_a_template_that_prints_the_beginning_token_does_not_double_it():
    assert TOY_SPM.encode("<s>a", special=True).count(TOY_SPM.bos) == 1
    assert TOY_SPM.encode_segments([Segment("<s>", True), Segment("<s>", False)]).count(TOY_SPM.bos) == 1


def test_asking_for_a_token_the_model_lacks_is_an_error():
    assert TOY.bos is None
    with pytest.raises(RequestError, match="no 'bos' token"):
        TOY.encode("a", add_bos=True)
    with pytest.raises(RequestError, match="no 'eos' token"):
        Tokenizer.from_metadata(changed(eos_token_id=None)).encode("a", add_eos=True)


def test_sentencepiece_defaults_hold_only_where_the_tokens_fit():
    nameless = changed("spm", bos_token_id=None, eos_token_id=None, unknown_token_id=None)
    tokenizer = Tokenizer.from_metadata(nameless)
    assert (tokenizer.bos, tokenizer.eos) == (1, 2)
    assert Tokenizer.from_metadata(changed("bpe", eos_token_id=None)).eos is None


def test_an_inner_end_token_does_not_end_a_generation_with_outer_ones():
    plain = with_tokens("<|end|>", kind=TokenType.CONTROL)
    harmony = with_tokens("<|end|>", "<|return|>", "<|call|>", kind=TokenType.CONTROL)
    assert plain.token_id("<|end|>") in plain.eog
    assert harmony.token_id("<|end|>") not in harmony.eog
    assert {harmony.token_id("<|return|>"), harmony.token_id("<|call|>")} <= harmony.eog


def test_mistyped_end_tokens_are_special_all_the_same():
    tokenizer = with_tokens("<|eot_id|>", kind=TokenType.NORMAL)
    token = tokenizer.token_id("<|eot_id|>")
    assert token in tokenizer.eog
    assert token in tokenizer.special
    assert token not in tokenizer.encode("<|eot_id|>")


# --- ids ---------------------------------------------------------------------------------------------------


def test_bytes_and_texts_of_tokens():
    assert TOY.token_bytes(0xC3) == b"\xc3"
    assert TOY.token_text(0xC3) == "\ufffd"
    assert TOY.token_bytes(TOY.token_id("<|im_end|>")) == b"<|im_end|>"
    assert TOY_SPM.token_bytes(TOY_SPM.token_id("<0x0A>")) == b"\n"
    assert TOY_SPM.token_bytes(TOY_SPM.token_id("▁the")) == b" the"
    assert TOY.token_id("no such token") is None


@pytest.mark.parametrize("token", [-1, 289, 10**9])
def test_ids_outside_the_vocabulary_are_named(token):
    with pytest.raises(RequestError, match=f"Token id {token} does not exist: this model has ids 0 to 288"):
        TOY.token_bytes(token)
    with pytest.raises(RequestError, match="does not exist"):
        TOY.decode([token])


# --- malformed vocabularies --------------------------------------------------------------------------------


def test_arrays_may_come_from_numpy():
    metadata = toy_vocabulary("spm")
    for key in ("scores", "token_type"):
        metadata[f"tokenizer.ggml.{key}"] = np.array(metadata[f"tokenizer.ggml.{key}"])
    metadata["tokenizer.ggml.bos_token_id"] = np.uint32(1)
    metadata["tokenizer.ggml.add_bos_token"] = np.bool_(True)
    assert Tokenizer.from_metadata(metadata).encode("hello") == TOY_SPM.encode("hello")


BROKEN = [
    ({"model": None}, "tokenizer.ggml.model.*nothing.*a string"),
    ({"model": "t5"}, "'t5', wanted one of gpt2, llama, gemma4"),
    ({"model": ["gpt2"]}, "tokenizer.ggml.model.*list"),
    ({"pre": "kimi"}, "tokenizer.ggml.pre.*'kimi', wanted one of .*llama-bpe.*qwen35"),
    ({"tokens": None}, "tokenizer.ggml.tokens.*got none"),
    ({"tokens": []}, "tokenizer.ggml.tokens.*got none"),
    ({"tokens": "abc"}, "tokenizer.ggml.tokens.*str, wanted an array"),
    ({"tokens": [*TOKENS[:-1], 7]}, "tokenizer.ggml.tokens.*int at index 288"),
    ({"tokens": [*TOKENS[:-1], TOKENS[0]]}, "tokenizer.ggml.tokens.*as 0 and 288"),
    ({"tokens": [*TOKENS[:0x3F], "gone", *TOKENS[0x40:]]}, "tokens.*no token for 1 of the bytes"),
    ({"token_type": [1, 2]}, "tokenizer.ggml.token_type.*got 2 entries, wanted 289"),
    ({"token_type": ["x"] * 289}, "tokenizer.ggml.token_type.*str at index 0"),
    ({"merges": None}, "tokenizer.ggml.merges.*got none"),
    ({"merges": [*MERGES, "zz y"]}, "tokenizer.ggml.merges.*'zz y' at index 24"),
    ({"merges": [*MERGES, "hh"]}, "tokenizer.ggml.merges.*'hh' at index 24"),
    ({"merges": [*MERGES, "q q"]}, "tokenizer.ggml.merges.*'q q' at index 24"),
    ({"eos_token_id": 289}, "tokenizer.ggml.eos_token_id.*got 289, wanted an id below 289"),
    ({"eos_token_id": "</s>"}, "tokenizer.ggml.eos_token_id.*str"),
    ({"add_bos_token": "yes"}, "tokenizer.ggml.add_bos_token.*'yes'"),
]


@pytest.mark.parametrize(("keys", "message"), BROKEN)
def test_a_malformed_vocabulary_is_refused_by_name(keys, message):
    with pytest.raises(ModelFormatError, match=message):
        Tokenizer.from_metadata(changed("bpe", **keys))


def test_a_scored_vocabulary_needs_scores():
    with pytest.raises(ModelFormatError, match=r"tokenizer.ggml.scores.*got none"):
        Tokenizer.from_metadata(changed("spm", scores=None))
    with pytest.raises(ModelFormatError, match=r"tokenizer.ggml.scores.*got 1 entries"):
        Tokenizer.from_metadata(changed("spm", scores=[0.0]))


@pytest.mark.parametrize("absent", [-1, 0xFFFFFFFF])
def test_an_id_written_as_none_is_none(absent):
    assert Tokenizer.from_metadata(changed(eos_token_id=absent)).eos is None


def test_a_nameless_splitter_is_announced():
    tokenizer = Tokenizer.from_metadata(changed(pre=None))
    assert "tokenizer.ggml.pre" in tokenizer.notice
    assert TOY.notice is None


def test_bytes_the_vocabulary_lacks_are_replaced(vocabularies):
    tokenizer = vocabularies.tokenizer("falcon")  # lacks some control characters: nothing to tell a user
    assert tokenizer.notice is None
    assert tokenizer.decode(tokenizer.encode("a\x03b")) == "a\ufffdb"


def test_letters_the_vocabulary_lacks_are_announced():
    tokenizer = Tokenizer.from_metadata(changed(tokens=[*TOKENS[:0xD0], "gone", *TOKENS[0xD1:]]))
    assert "no token for 1 of the bytes text is made of (first 0xD0)" in tokenizer.notice
    assert tokenizer.decode(tokenizer.encode("aРb")) == "a\ufffdb"


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            ["model", "pre", "tokens", "token_type", "scores", "merges", "eos_token_id", "add_bos_token"]
        ),
        st.one_of(
            st.none(),
            st.integers(-3, 400),
            st.text(max_size=5),
            st.lists(st.text(max_size=3), max_size=4),
            st.floats(),
            st.booleans(),
        ),
        min_size=1,
    )
)
def test_no_metadata_breaks_loading_in_any_other_way(keys):
    try:
        Tokenizer.from_metadata(changed("bpe", **keys))
    except ModelFormatError as error:
        message = str(error)
    else:
        message = "tokenizer.ggml."
    assert "tokenizer.ggml." in message
