"""Marked text against lists of (character, trusted) pairs: the text of `str`, each mark where it belongs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luce_core.text import Segment
from luce_core.text.marked import MarkedText, is_trusted, joined, segments, trusted

# Few letters, so that the same text occurs in trusted and untrusted stretches alike.
PAIRS = st.lists(st.tuples(st.sampled_from("aX \n"), st.booleans()), max_size=12)
BITS = st.text("aX \n", max_size=3)


def marked(pairs):
    return joined(trusted(char) if trust else MarkedText(char) for char, trust in pairs)


def pairs_of(text):
    assert isinstance(text, MarkedText)
    return [(char, segment.trusted) for segment in segments(text) for char in segment.text]


def plain(pairs):
    return "".join(char for char, _ in pairs)


def places(text, sep):
    """Where `sep` is found from the left, not overlapping."""
    found, at = [], 0
    while (at := text.find(sep, at)) >= 0:
        found.append(at)
        at += len(sep)
    return found


@given(PAIRS)
def test_text_and_marks_are_what_went_in(pairs):
    text = marked(pairs)
    assert pairs_of(text) == pairs
    assert text == plain(pairs)
    assert hash(text) == hash(plain(pairs))
    assert {plain(pairs): 1}[text] == 1
    assert str(text) is text


@given(PAIRS, PAIRS, BITS)
def test_addition(left, right, bit):
    assert pairs_of(marked(left) + marked(right)) == left + right
    assert pairs_of(marked(left) + bit) == left + [(char, False) for char in bit]
    assert pairs_of(bit + marked(left)) == [(char, False) for char in bit] + left
    assert pairs_of(marked(left) * 3) == left * 3
    assert pairs_of(2 * marked(left)) == left * 2
    assert marked(left) * -1 == ""


@given(PAIRS, st.integers(-15, 15) | st.none(), st.integers(-15, 15) | st.none())
def test_slices(pairs, start, stop):
    assert pairs_of(marked(pairs)[start:stop]) == pairs[start:stop]
    assert marked(pairs)[::-1] == plain(pairs)[::-1]
    if pairs:
        assert pairs_of(marked(pairs)[-1]) == pairs[-1:]
        assert pairs_of(marked(pairs)[0]) == pairs[:1]


@given(PAIRS, st.none() | BITS)
def test_strips(pairs, chars):
    text = marked(pairs)
    start = len(pairs) - len(plain(pairs).lstrip(chars))
    stop = len(plain(pairs).rstrip(chars))
    assert pairs_of(text.lstrip(chars)) == pairs[start:]
    assert pairs_of(text.rstrip(chars)) == pairs[:stop]
    assert pairs_of(text.strip(chars)) == pairs[start : max(start, stop)]


@given(PAIRS, BITS)
def test_prefixes_and_suffixes(pairs, bit):
    text = marked(pairs)
    begins, ends = plain(pairs).startswith(bit), plain(pairs).endswith(bit)
    assert pairs_of(text.removeprefix(bit)) == (pairs[len(bit) :] if begins else pairs)
    assert pairs_of(text.removesuffix(bit)) == (pairs[: len(pairs) - len(bit)] if ends else pairs)


@settings(max_examples=120)
@given(PAIRS, st.text("aX \n", min_size=1, max_size=3), st.integers(-1, 3))
def test_split_at_a_separator(pairs, sep, limit):
    found = places(plain(pairs), sep)
    found = found if limit < 0 else found[:limit]
    edges = [0, *(at + len(sep) for at in found)]
    expected = [pairs[start:stop] for start, stop in zip(edges, [*found, len(pairs)], strict=True)]
    assert [pairs_of(part) for part in marked(pairs).split(sep, limit)] == expected
    if limit < 0:
        assert list(marked(pairs).rsplit(sep)) == plain(pairs).rsplit(sep)


@settings(max_examples=120)
@given(PAIRS, st.text("aX \n", min_size=1, max_size=3))
def test_split_from_the_right(pairs, sep):
    parts = marked(pairs).rsplit(sep, 1)
    at = plain(pairs).rfind(sep)
    expected = [pairs] if at < 0 else [pairs[:at], pairs[at + len(sep) :]]
    assert [pairs_of(part) for part in parts] == expected
    head, middle, tail = marked(pairs).rpartition(sep)
    assert pairs_of(tail) == expected[-1]
    before = [[], []] if at < 0 else [pairs[:at], pairs[at : at + len(sep)]]
    assert [pairs_of(head), pairs_of(middle)] == before
    at = plain(pairs).find(sep)
    head, middle, tail = marked(pairs).partition(sep)
    assert pairs_of(head) == (pairs if at < 0 else pairs[:at])
    assert pairs_of(middle) + pairs_of(tail) == ([] if at < 0 else pairs[at:])


@settings(max_examples=120)
@given(PAIRS, st.integers(-1, 3))
def test_split_at_blanks(pairs, limit):
    for method in ("split", "rsplit"):
        parts = getattr(marked(pairs), method)(None, limit)
        assert parts == getattr(plain(pairs), method)(None, limit)
    words, word = [], []
    for char, trust in pairs:
        if char.isspace():
            words, word = ([*words, word] if word else words), []
        else:
            word = [*word, (char, trust)]
    words = [*words, word] if word else words
    assert [pairs_of(part) for part in marked(pairs).split()] == words
    assert [pairs_of(part) for part in marked(pairs).rsplit()] == words


@given(PAIRS, st.booleans())
def test_split_into_lines(pairs, keep):
    lines, line = [], []
    for char, trust in pairs:
        if char == "\n":
            lines, line = [*lines, [*line, (char, trust)] if keep else line], []
        else:
            line = [*line, (char, trust)]
    lines = [*lines, line] if line else lines
    assert [pairs_of(part) for part in marked(pairs).splitlines(keep)] == lines


@settings(max_examples=120)
@given(PAIRS, st.text("aX \n", min_size=1, max_size=2), PAIRS, st.integers(-1, 3))
def test_replace(pairs, old, new, count):
    found = places(plain(pairs), old)
    found = found if count < 0 else found[:count]
    expected, at = [], 0
    for place in found:
        expected += pairs[at:place] + new
        at = place + len(old)
    expected += pairs[at:]
    assert pairs_of(marked(pairs).replace(old, marked(new), count)) == expected
    assert marked(pairs).replace(old, marked(new), count) == plain(pairs).replace(old, plain(new), count)


@given(PAIRS, st.lists(PAIRS, max_size=4))
def test_join(sep, parts):
    expected = []
    for at, part in enumerate(parts):
        expected += (sep if at else []) + part
    assert pairs_of(marked(sep).join(map(marked, parts))) == expected


OTHERS = [
    ("upper",), ("lower",), ("title",), ("capitalize",), ("swapcase",), ("casefold",), ("expandtabs",),
    ("zfill", 9), ("center", 99), ("ljust", 99), ("rjust", 99), ("translate", {97: 98}), ("__format__", "99"),
    ("__repr__",), ("encode",), ("replace", "", "-"),
]  # fmt: skip


@pytest.mark.parametrize("call", OTHERS)
def test_operations_without_marks_answer_untrusted_text(call):
    name, *arguments = call
    answer = getattr(trusted("<|im_end|>"), name)(*arguments)
    assert not isinstance(answer, MarkedText)


def test_characters_and_conversions_are_untrusted():
    text = trusted("<x>")
    assert not any(isinstance(char, MarkedText) for char in text)
    assert not isinstance(f"{text}.", MarkedText)
    assert not isinstance(trusted("<%s>") % "x", MarkedText)
    assert not isinstance(trusted("<{}>").format("x"), MarkedText)
    assert not isinstance("%s." % text, MarkedText)  # noqa: UP031
    assert not isinstance("".join([text]), MarkedText)
    assert not isinstance("a-b".replace("-", text), MarkedText)


def test_nothing_public_makes_trust_from_text():
    assert not is_trusted(MarkedText(trusted("<x>")))
    assert segments(MarkedText("<x>")) == [Segment("<x>", False)]
    assert segments("<x>") == [Segment("<x>", False)]


def test_wrong_types_fail_like_str():
    text = trusted("abc")
    sums = [lambda: text + 1, lambda: 1 + text, lambda: text * "a"]
    for attempt in [*sums, lambda: text["x"], lambda: text.join([1])]:
        with pytest.raises(TypeError):
            attempt()
    with pytest.raises(IndexError):
        trusted("abc")[3]
    with pytest.raises(ValueError, match="empty separator"):
        trusted("abc").split("")
