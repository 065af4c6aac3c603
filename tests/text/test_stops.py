"""Stop strings: any split of the text gives the same answer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luce_core.errors import RequestError
from luce_core.text import StopMatcher


def answer(stops, chunks):
    matcher = StopMatcher(stops)
    text = "".join(matcher.push(chunk) for chunk in chunks)
    return text + ("" if matcher.matched is not None else matcher.flush()), matcher.matched


def definition(stops, text):
    """Read character by character; the first time what was read ends with a stop, cut the longest such."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.text("ab|", min_size=1, max_size=4), max_size=4),
    st.lists(st.text("ab|c", max_size=5), max_size=8),
)
def test_any_split_equals_the_definition(stops, chunks):
    text = "".join(chunks)
    assert answer(stops, chunks) == definition(stops, text)
    assert answer(stops, list(text)) == definition(stops, text)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("ab|", min_size=1, max_size=4), min_size=1, max_size=3), st.text("ab|c", max_size=20))
def test_no_more_is_held_back_than_could_become_a_stop(stops, text):
    matcher = StopMatcher(stops)
    sent = "".join(map(matcher.push, text))
    if matcher.matched is None:
        held = text[len(sent) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_text_before_the_match_is_sent_and_the_match_is_not():
    matcher = StopMatcher(["</end>", "STOP"])
    assert matcher.push("hello </e") == "hello "
    assert matcher.push("nd> more") == ""
    assert matcher.matched == "</end>"
    assert matcher.push("even more") == ""
    assert matcher.flush() == ""


def test_text_that_turned_out_to_be_no_stop_is_released():
    matcher = StopMatcher(["</end>"])
    assert matcher.push("a</en") == "a"
    assert matcher.push("x") == "</enx"
    assert matcher.push("</") == ""
    assert matcher.flush() == "</"


def test_without_stops_nothing_is_held():
    assert StopMatcher([]).push("abc") == "abc"


@pytest.mark.parametrize("stops", [[""], ["a", ""], [None], [7]])
def test_stops_that_are_no_text_are_refused(stops):
    with pytest.raises(RequestError, match="'stop'"):
        StopMatcher(stops)
