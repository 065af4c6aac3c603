"""`StringArray` behaves as the tuple of its strings."""

import pickle
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce_core.gguf.values import StringArray, read_strings

TEXTS = st.lists(st.text(), max_size=20)


def packed(texts) -> bytes:
    encoded = [text.encode() for text in texts]
    return b"".join(struct.pack("<Q", len(text)) + text for text in encoded)


@given(TEXTS, st.binary(max_size=20))
def test_reads_back_what_was_written_and_no_more(texts, rest):
    data = packed(texts)
    strings, used = read_strings(memoryview(data + rest), len(texts), 1 << 20)
    assert used == len(data)
    assert tuple(strings) == tuple(texts)
    assert [strings[i] for i in range(-len(texts), len(texts))] == [*texts, *texts]
    assert strings == texts
    assert strings == tuple(texts)
    assert pickle.loads(pickle.dumps(strings)) == strings


@given(TEXTS, st.slices(20))
def test_slices_like_a_tuple(texts, where):
    strings, _ = read_strings(memoryview(packed(texts)), len(texts), 1 << 20)
    assert strings[where] == tuple(texts)[where]


@given(st.lists(st.binary(max_size=6), max_size=8))
def test_accepts_exactly_what_decodes_string_by_string(raw):
    data = b"".join(struct.pack("<Q", len(text)) + text for text in raw)
    try:
        wanted = [text.decode() for text in raw]
    except UnicodeDecodeError:
        with pytest.raises(ValueError, match="UTF-8"):
            read_strings(memoryview(data), len(raw), 100)
    else:
        assert read_strings(memoryview(data), len(raw), 100)[0] == wanted


def test_valid_text_is_checked_across_the_borders_of_its_pieces():
    text = "x" * ((1 << 20) - 1) + "é" + "y" * 10
    strings, _ = read_strings(memoryview(packed([text, "z"])), 2, 1 << 22)
    assert tuple(strings) == (text, "z")


def test_outside_its_bounds():
    strings, _ = read_strings(memoryview(packed(["a"])), 1, 10)
    for index in (1, -2):
        with pytest.raises(IndexError):
            strings[index]


def test_differs_from_other_strings_and_other_things():
    strings, _ = read_strings(memoryview(packed(["ab", "c"])), 2, 10)
    other, _ = read_strings(memoryview(packed(["a", "bc"])), 2, 10)
    assert strings != other
    assert strings != ["ab"]
    assert strings != "abc"
    assert strings.count("ab") == 1
    assert "c" in strings
    with pytest.raises(TypeError):
        hash(strings)


def test_is_what_it_says():
    strings, _ = read_strings(memoryview(b""), 0, 10)
    assert isinstance(strings, StringArray)
    assert repr(strings) == "StringArray(0 strings)"
