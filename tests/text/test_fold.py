"""Engine events to text events: stop strings, thoughts, calls, counts, whatever the tokens are cut into."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce_core.contracts import (
    ChatTurn,
    ContentDelta,
    Done,
    Finish,
    Logprobs,
    ReasoningDelta,
    TokenLogprob,
    Tokens,
    ToolArgsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from luce_core.testing.chat_contract import TOOLS
from luce_core.testing.toy_vocab import toy_vocabulary
from luce_core.text import Tokenizer
from luce_core.text.chat_formats import FunctionTags, KeyValueTags, TagFormat, TaggedJson, Thought
from luce_core.text.fold import TextFold
from luce_core.text.vocabulary import TokenType

TOKENIZER = Tokenizer.from_metadata(toy_vocabulary("bpe"))
FORMAT = TagFormat("t", Thought(), (TaggedJson(),))
PING = '<tool_call>{"name": "ping", "arguments": {}}</tool_call>'
WRITE = '<tool_call>{"name": "write_file", "arguments": {"text": "stop"}}</tool_call>'
TEXT = f"<think>\nhm stop\n</think>\n\nSee.\n{PING}\n{WRITE} the stop here"


def ids(text):
    return tuple(TOKENIZER.encode(text, special=True))


def fold(**more):
    more = {"parser": FORMAT.parser(ChatTurn("", TOOLS, lambda: "id")), **more}
    return TextFold(TOKENIZER, **more)


def fed(one, text, sizes=(), reason="stop", logprobs=False):
    """Events of tokens in groups of these sizes, `Done` last, adjacent deltas joined."""
    tokens, events, at = ids(text), [], 0
    for size in [*sizes, len(tokens)]:
        part = tokens[at : at + size]
        scores = tuple(TokenLogprob(token, -1.0) for token in part) if logprobs else ()
        events += one.feed(Tokens("r", part, scores)) if part else []
        at += size
    events += one.feed(Done("r", reason, {"prompt_tokens": 1}, {}))
    joined = []
    for event in events:
        last = joined[-1] if joined else None
        if type(event) is type(last) and isinstance(event, ContentDelta | ReasoningDelta):
            joined[-1] = type(event)(last.text + event.text)
        elif type(event) is type(last) and isinstance(event, ToolArgsDelta):
            joined[-1] = ToolArgsDelta(event.index, last.text + event.text)
        else:
            joined.append(event)
    return joined


def content(events):
    return "".join(event.text for event in events if isinstance(event, ContentDelta))


def test_thoughts_content_and_calls_in_order():
    events = fed(fold(), TEXT)
    assert [type(event) for event in events] == [
        ReasoningDelta, ContentDelta, ToolCallStart, ToolArgsDelta, ToolCallEnd, ToolCallStart,
        ToolArgsDelta, ToolCallEnd, ContentDelta, Finish,
    ]  # fmt: skip
    assert (events[0].text, content(events)) == ("hm stop", "See. the stop here")
    assert events[-1].reason == "tool_calls"


@given(st.lists(st.integers(1, 9), max_size=60))
def test_any_grouping_of_tokens_gives_the_same_events(sizes):
    assert fed(fold(stops=("stop", "See. t")), TEXT, sizes) == fed(fold(stops=("stop", "See. t")), TEXT)


def test_stop_strings_count_in_content_alone():
    one = fold(stops=("stop",))
    events = fed(one, TEXT)
    assert content(events) == "See. the "
    assert (events[-1].reason, events[-1].stop_sequence, one.over) == ("stop", "stop", True)
    assert sum(isinstance(event, ToolCallEnd) for event in events) == 2


def test_no_stop_string_reaches_across_a_call():
    events = fed(fold(stops=("a.b",)), f"a.{PING}b")
    assert (content(events), events[-1].reason) == ("a.b", "tool_calls")


def test_text_held_for_a_stop_string_comes_before_the_call():
    events = fed(fold(stops=("See.x",)), f"See.{PING}")
    assert [type(event) for event in events[:2]] == [ContentDelta, ToolCallStart]


def test_thoughts_are_counted_in_tokens_with_their_tags():
    events = fed(fold(), "<think>abc</think>def")
    assert events[-1].usage["reasoning_tokens"] == len(ids("<think>abc</think>"))
    assert events[-1].usage["completion_tokens"] == len(ids("<think>abc</think>def"))


def test_a_thought_the_prompt_opened_is_counted():
    parser = FORMAT.parser(ChatTurn("<think>", TOOLS))
    events = fed(fold(parser=parser), "abc</think>def")
    assert events[-1].usage["reasoning_tokens"] == len(ids("abc</think>"))


def test_one_call_ends_the_answer():
    one = fold(one_call=True)
    events = one.feed(Tokens("r", ids(f"a {PING}{PING}b")))
    assert isinstance(events[-1], ToolCallEnd)
    assert one.over
    assert one.feed(Tokens("r", ids("c"))) == []
    (finish,) = one.feed(Done("r", "cancelled", {}, {}))
    assert (finish.reason, finish.stop_sequence) == ("tool_calls", None)
    assert finish.usage["completion_tokens"] <= len(ids(f"a {PING}{PING[:12]}"))


def test_an_end_in_words_ends_the_answer():
    one = fold(
        parser=TagFormat("t", None, (KeyValueTags(),), ends=("</assistant>",)).parser(ChatTurn("", TOOLS))
    )
    assert content(one.feed(Tokens("r", ids("a</assistant>b")))) == "a"
    assert one.over
    assert one.feed(Done("r", "cancelled", {}, {}))[-1].reason == "stop"


@pytest.mark.parametrize(
    ("text", "reason", "want"),
    [
        (PING, "stop", "tool_calls"),
        (PING, "length", "length"),
        (PING, "cancelled", "cancelled"),
        (PING[:-20], "length", "length"),
        ('<tool_call>{"name": "write_file", "arguments": {"text": "abc', "stop", "stop"),
        (PING + '<tool_call>{"name": "write_file", "arguments": {"text": "abc', "stop", "stop"),
        ("text", "stop", "stop"),
    ],
)
def test_why_it_ended(text, reason, want):
    assert fed(fold(), text, reason=reason)[-1].reason == want


def test_a_call_without_its_closing_tag_is_one_where_the_model_ended():
    text = "<tool_call><function=ping></function>"
    for reason, complete in (("stop", True), ("length", False)):
        parser = TagFormat("x", None, (FunctionTags(),)).parser(ChatTurn("", TOOLS))
        (end,) = [
            event for event in fed(fold(parser=parser), text, reason=reason) if isinstance(event, ToolCallEnd)
        ]
        assert end.complete is complete


def test_every_token_has_its_logprob_once():
    events = fed(fold(), TEXT, (3, 1, 7), logprobs=True)
    tokens = [item.token for event in events if isinstance(event, Logprobs) for item in event.tokens]
    assert tuple(tokens) == ids(TEXT)


def test_tags_that_are_control_tokens_are_seen_and_the_others_hidden():
    metadata = toy_vocabulary("bpe")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    for text in ("<tool_call>", "</tool_call>", "<tool_response>"):
        types[tokens.index(text)] = int(TokenType.CONTROL)
    tokenizer = Tokenizer.from_metadata(metadata)
    visible = [tokenizer.token_id(text) for text in FORMAT.markers]
    parser = FORMAT.parser(ChatTurn("", TOOLS))
    one = TextFold(tokenizer, parser=parser, visible=[token for token in visible if token is not None])
    sent = tokenizer.encode("a<tool_response>" + PING, special=True)
    events = one.feed(Tokens("r", tuple(sent))) + one.feed(Done("r", "stop", {}, {}))
    assert content(events) == "a"
    assert [event.name for event in events if isinstance(event, ToolCallStart)] == ["ping"]


def test_without_a_parser_everything_is_content():
    events = fed(TextFold(TOKENIZER), TEXT)
    assert content(events) == TEXT
    assert (events[-1].reason, events[-1].usage["reasoning_tokens"]) == ("stop", 0)
