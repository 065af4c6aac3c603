import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce_core.bench.timeline import Timeline, error_message

from .conftest import DONE, chunk, event, finish


def answer(*timed, end_s=99.0, sent_s=10.0):
    """timed: (seconds, bytes) in order."""
    line = Timeline(sent_s)
    for now, data in timed:
        if not line.over:
            line.feed(now, data)
    return line.answer(end_s)


def test_times_are_those_of_chunks_with_text():
    found = answer(
        (10.5, event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})),
        (11.0, chunk("a")),
        (11.1, b": still here\n\n"),
        (11.25, chunk("b") + chunk("c")),
        (12.0, finish()),
        (12.0, event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}})),
        (12.0, DONE),
    )
    assert (found.end, found.reason) == ("ok", "")
    assert found.ttft_s == 1.0
    assert found.chunks_s == (11.0, 11.25, 11.25)
    assert found.gaps_s == (0.25, 0.0)
    assert (found.tokens, found.prompt_tokens, found.usage_tokens) == (3, 7, 3)
    assert found.tokens_s == pytest.approx(2 / 0.25)
    assert (found.sent_s, found.ended_s) == (10.0, 99.0)


def test_without_usage_tokens_are_counted_from_chunks():
    found = answer((11.0, chunk("a")), (12.0, chunk("b")), (12.0, finish()), (12.0, DONE))
    assert (found.tokens, found.usage_tokens, found.prompt_tokens) == (2, None, None)


def test_chunks_that_hold_several_tokens_count_by_usage():
    usage = {"usage": {"completion_tokens": 9}}
    found = answer((11.0, chunk("abc")), (13.0, chunk("defghi")), (13.0, finish(**usage)), (13.0, DONE))
    assert found.tokens == 9
    assert found.tokens_s == pytest.approx(8 / 2.0)


@pytest.mark.parametrize(
    "choice",
    [
        {"delta": {"content": "x"}},
        {"delta": {"reasoning_content": "x"}},
        {"delta": {"reasoning": "x"}},
        {"delta": {"tool_calls": [{"index": 0}]}},
        {"text": "x"},
    ],
)
def test_every_kind_of_text_is_a_token(choice):
    assert answer((11.0, event({"choices": [choice]})), (11.5, DONE)).chunks_s == (11.0,)


@pytest.mark.parametrize("choice", [{"delta": {"content": None}}, {"delta": None}, {"text": ""}, {}])
def test_what_holds_no_text_is_no_token(choice):
    found = answer((11.0, event({"choices": [choice]})), (11.5, DONE))
    assert (found.chunks_s, found.end, found.ttft_s, found.tokens_s) == ((), "empty", None, None)


@pytest.mark.parametrize(
    ("tail", "end", "said"),
    [
        (b"", "cut", "after 1 chunks"),
        (finish(), "ok", ""),  # no [DONE], yet the answer is whole
        (DONE, "ok", ""),  # no finish_reason either way
        (b"data: [DONE]", "ok", ""),
        (b"data: not json\n\n", "garbage", "not json"),
        (b"data: [1]\n\n", "garbage", "no JSON object"),
        (b'data: {"choices": 5}\n\n', "garbage", "'choices'"),
        (b'data: {"choices": ["x"]}\n\n', "garbage", "'choices'"),
        (b'data: {"error": {"message": "out of luck"}}\n\n' + DONE, "error", "out of luck"),
        (b'event: error\ndata: {"message": "dead"}\n\n', "error", "dead"),
    ],
)
def test_how_a_stream_can_end(tail, end, said):
    found = answer((11.0, chunk("a")), (12.0, tail))
    assert found.end == end
    assert said in found.reason
    assert found.chunks_s[0] == 11.0


def test_nothing_counts_behind_the_end():
    found = answer((11.0, chunk("a") + DONE + chunk("b") + b"data: junk\n\n"))
    assert (found.end, found.chunks_s) == ("ok", (11.0,))


@pytest.mark.parametrize("usage", [None, "x", {"completion_tokens": "3"}, {"completion_tokens": -1}, {}])
def test_a_usage_that_is_none_is_not_believed(usage):
    body = {"choices": [{"delta": {"content": "x"}}], "usage": usage}
    assert answer((11.0, event(body)), (11.0, DONE)).usage_tokens is None


@given(st.binary(max_size=200), st.integers(0, 200))
def test_no_bytes_can_break_it(data, cut):
    found = answer((11.0, data[:cut]), (12.0, data[cut:]))
    assert found.end in ("cut", "garbage", "empty", "error", "ok")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["choices", "delta", "content", "usage", "error", "text"]), inner
            )
        ),
        max_leaves=8,
    )
)
def test_no_json_can_break_it(body):
    found = answer((11.0, b"data: " + json.dumps(body).encode() + b"\n\n"), (12.0, DONE))
    assert found.end in ("garbage", "empty", "error", "ok")


@given(st.lists(st.floats(0, 50), min_size=2, max_size=20))
def test_gaps_add_up_to_the_time_of_decoding(offsets):
    times = sorted(10 + offset for offset in offsets)
    found = answer(*((now, chunk("x")) for now in times), (99.0, DONE))
    assert sum(found.gaps_s) == pytest.approx(times[-1] - times[0])
    assert found.ttft_s == times[0] - 10


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"error": {"message": "a\n b"}}, "a b"),
        ({"error": "plain"}, "plain"),
        ({"detail": "x"}, "{'detail': 'x'}"),
        ("text", "text"),
    ],
)
def test_messages_of_servers(body, said):
    assert error_message(body) == said
