from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce_core.bench import sse
from luce_core.bench.sse import Event, EventParser

LINES = st.sampled_from(
    [
        "data: one",
        "data:two",
        "data",
        "data:  three",
        ": a comment",
        "event: ping",
        "id: 7",
        "retry: 10",
        "unknown",
        "data: ünï€",
        "",
        "",
        "",
        "datax: no",
        ":",
    ]
)


def parse(*pieces, close=False):
    parser = EventParser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + (parser.close() if close else [])


def reference(lines):
    """The standard's algorithm, line by line over text."""
    name, data, events = "", [], []
    for line in lines:
        if not line:
            if data:
                events.append(Event(name or "message", "\n".join(data)))
            name, data = "", []
            continue
        field, colon, value = line.partition(":")
        value = value[1:] if colon and value.startswith(" ") else value
        if field == "data":
            data.append(value)
        if field == "event":
            name = value
    return events


@given(st.lists(st.tuples(LINES, st.sampled_from(["\n", "\r\n", "\r"])), max_size=12), st.data())
def test_any_cut_of_any_stream_gives_the_standards_events(lines, data):
    # An empty line that ends in \n directly behind one that ends in \r would be one \r\n: not what is meant.
    ends = [end for _, end in lines]
    for place in range(1, len(lines)):
        if ends[place - 1] == "\r" and lines[place][0] == "" and ends[place] == "\n":
            ends[place] = "\r\n"
    stream = "".join(line + end for (line, _), end in zip(lines, ends, strict=True)).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    places = [0, *cuts, len(stream)]
    pieces = [stream[a:b] for a, b in pairwise(places)]
    assert parse(*pieces) == reference([line for line, _ in lines])


def test_byte_by_byte():
    stream = b"\xef\xbb\xbf: hi\r\nevent: error\r\ndata: a\r\ndata: b\r\n\r\ndata: \xc3\xa9\r\n\r\n"
    pieces = [stream[place : place + 1] for place in range(len(stream))]
    assert parse(*pieces) == [Event("error", "a\nb"), Event("message", "é")]


def test_a_carriage_return_and_its_newline_in_two_pieces_end_one_line():
    assert parse(b"data: a\r", b"\n", b"data: b\r", b"\n", b"\n") == [Event("message", "a\nb")]
    assert parse(b"data: a\r", b"", b"\n\r", b"\ndata: b\n\n") == [
        Event("message", "a"),
        Event("message", "b"),
    ]


def test_what_ends_without_its_blank_line_is_there_after_close():
    assert parse(b"data: a\n\ndata: [DONE]") == [Event("message", "a")]
    assert parse(b"data: a\n\ndata: [DONE]", close=True)[-1] == Event("message", "[DONE]")
    assert parse(b"data: x\r", close=True) == [Event("message", "x")]
    assert parse(b"", close=True) == []


def test_a_line_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(sse, "LINE_BYTES", 100)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        parse(*[b"data: " + b"x" * 60] * 2)
