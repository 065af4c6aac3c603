"""The core's own chat formats: the kit's contract on what `auto` finds, and what the kit does not say."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce_core.contracts import ChatContext, ChatTurn, ContentDelta, ReasoningDelta, Thinking, ToolCallEnd
from luce_core.testing.chat_contract import TOOLS, ChatFormatContract, read
from luce_core.text import FALLBACK_TEMPLATES
from luce_core.text.chat_formats import (
    EFFORTS,
    PLAIN,
    BareJson,
    FunctionTags,
    KeyValueTags,
    TagFormat,
    TaggedJson,
    Thought,
    auto,
)
from luce_core.text.chat_formats.schema import argument_schema, from_text, from_value, types_of
from luce_core.text.chat_formats.source import Source

HERMES = TagFormat("hermes", Thought(), (TaggedJson(),))
XML = TagFormat("xml", Thought(), (FunctionTags(), TaggedJson()))
PAIRS = TagFormat("pairs", Thought(), (KeyValueTags(), TaggedJson()))


class Tokens:
    def __init__(self, *known):
        self.known = known

    def token_id(self, text):
        return self.known.index(text) if text in self.known else None


class TestAuto(ChatFormatContract):
    """As found for the template the core gives files that have none."""

    hooks = "luce_core.builtin"
    name = "auto"
    template = FALLBACK_TEMPLATES["chatml"]
    tokens = ("<think>", "</think>")
    open_tail = "<think>"

    def write_calls(self, calls):
        written = (json.dumps({"name": name, "arguments": args}) for name, args in calls)
        return "\n" + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)

    def write_thought(self, thought):
        return f"<think>\n{thought}\n</think>\n\n"


# --- which format


@pytest.mark.parametrize(
    ("template", "tokens", "thinks", "calls"),
    [
        ("", (), False, ()),
        ("<think></think>", (), True, ()),
        ("", ("<think>", "</think>"), True, ()),
        ("", ("<think>",), False, ()),
        ("<tool_call>", (), False, (TaggedJson(),)),
        ("<tool_call><function=f>", (), False, (FunctionTags(), TaggedJson())),
        ("<tool_call>f<arg_key>", (), False, (KeyValueTags(), TaggedJson())),
        ("<|python_tag|>", (), False, (BareJson(),)),
        ("", ("<tool_call>",), False, ()),
    ],
)
def test_the_template_and_the_vocabulary_tell(template, tokens, thinks, calls):
    found = auto(ChatContext(None, Tokens(*tokens), template))
    assert (found.thought is not None, found.calls) == (thinks, calls)


def test_nothing_shown_is_plain_text():
    assert auto(ChatContext(None, Tokens(), "{{ messages }}")) is PLAIN
    text = "<think>a</think><tool_call>{}</tool_call>"
    assert read(PLAIN, list(text)).events == (ContentDelta(text),)


def test_every_tag_is_a_marker():
    assert set(XML.markers) >= {"<think>", "</think>", "<tool_call>", "<function="}


# --- thoughts


@pytest.mark.parametrize(
    ("text", "tail", "thought", "content"),
    [
        ("<think>\na\n</think>\n\nb", "", "a", "b"),
        ("\n <think>a</think>b", "", "a", "b"),
        ("a\n</think>\n\nb", "<think>\n", "a", "b"),
        ("a", "<think>", "a", ""),
        ("</think>b", "<think>", "", "b"),
        ("\n\n</think>\n\nb", "<think>\n", "", "b"),
        ("b", "<think>\n\n</think>\n\n", "", "b"),
        ("<think>a</think>b", "<think>\n\n</think>\n\n", "a", "b"),
        ("</think>\n\nb", "", "", "b"),
        ("The <think> tag", "", "", "The <think> tag"),
        ("The </think> tag", "", "", "The </think> tag"),
        (" b ", "", "", " b "),
        ("<think>a <tool_call> b</think>c", "", "a <tool_call> b", "c"),
        ("<thin", "", "", "<thin"),
        ("a</thin", "<think>", "a</thin", ""),
        ("<think>a\n\nb\n</think>", "", "a\n\nb", ""),
    ],
)
def test_thoughts(text, tail, thought, content):
    for pieces in ([text], list(text)):
        got = read(HERMES, pieces, tail=tail)
        assert (got.text(ReasoningDelta), got.text(ContentDelta)) == (thought, content)


def test_a_thought_is_told_token_by_token():
    parser = HERMES.parser(ChatTurn("<think>\n", TOOLS))
    assert parser.thinking
    parser.push("so")
    assert parser.thinking
    parser.push("</think>")
    assert not parser.thinking


@pytest.mark.parametrize("effort", [None, *EFFORTS])
@pytest.mark.parametrize("enabled", [None, True, False])
def test_the_switch(enabled, effort):
    kwargs = HERMES.template_kwargs(Thinking(enabled, effort))
    if enabled is None and effort is not None:
        enabled = effort != "none"
    assert kwargs.get("enable_thinking") == enabled
    assert kwargs.get("reasoning_effort") == (None if effort == "none" else effort)


# --- calls: what models get wrong


@pytest.mark.parametrize(
    ("format", "text", "calls"),
    [
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', [("add", {"a": 1})]),
        (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [("add", {"a": 1})]),
        (HERMES, '<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>', [("add", {"a": 1})]),
        (HERMES, '<tool_call>{"name": "ping"}</tool_call>', [("ping", {})]),
        (HERMES, '<tool_call>{"name": "ping", "arguments": null}</tool_call>', [("ping", {})]),
        (HERMES, '<tool_call>{"name": "ping", "arguments": ""}</tool_call>', [("ping", {})]),
        (
            HERMES,
            '<tool_call>{"id": 1, "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}',
            [("add", {"a": 1})],
        ),
        (
            HERMES,
            '<tool_call>{"name": "write_file", "arguments": {"text": "a\nb"}}',
            [("write_file", {"text": "a\nb"})],
        ),
        (
            HERMES,
            '<tool_call>{"name": "write_file", "arguments": {"text": "\\d\\u00"}}',
            [("write_file", {"text": "\\d\\u00"})],
        ),
        (
            HERMES,
            '<tool_call>{"name": "write_file", "arguments": {"text": "\\ud83d\\ude42\\ud83d"}}',
            [("write_file", {"text": "🙂\ufffd"})],
        ),
        (
            HERMES,
            '<tool_call>{"name": "add", "arguments": {"a": "7", "b": "x", "exact": True}}',
            [("add", {"a": 7, "b": "x", "exact": True})],
        ),
        (
            HERMES,
            '<tool_call>{"name": "write_file", "arguments": {"text": {"k": [1]}}}',
            [("write_file", {"text": '{"k": [1]}'})],
        ),
        (
            XML,
            "<tool_call><function=add><parameter=a>7</parameter></function></tool_call>",
            [("add", {"a": 7})],
        ),
        (XML, "<function=add>\n<parameter=a>\n7\n</parameter>\n</function>", [("add", {"a": 7})]),
        (
            XML,
            "<tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n</tool_call>",
            [("add", {"a": 7})],
        ),
        (
            XML,
            "<tool_call>\n<function=add>\n<parameter=a>\n7\n<parameter=exact>\nFalse\n</function>\n</tool_call>",
            [("add", {"a": 7, "exact": False})],
        ),
        (XML, "<tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n", [("add", {"a": 7})]),
        (XML, "<tool_call>\n<function=ping>\n</function>\n</tool_call>", [("ping", {})]),
        (XML, '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>', [("ping", {})]),
        (
            XML,
            "<tool_call>\n<function=write_file>\n<parameter=text>\n\n a\n\n</parameter>\n</function>",
            [("write_file", {"text": "\n a\n"})],
        ),
        (PAIRS, "<tool_call>ping</tool_call>", [("ping", {})]),
        (PAIRS, "<tool_call>ping", []),
        (PAIRS, "<tool_call>ping\n", [("ping", {})]),
        (
            PAIRS,
            "<tool_call>\nadd\n<arg_key>a</arg_key>\n<arg_value>7</arg_value>\n</tool_call>",
            [("add", {"a": 7})],
        ),
    ],
)
def test_drift_is_understood(format, text, calls):
    for pieces in ([text], list(text)):
        assert read(format, pieces).calls() == calls


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>{",
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": ',
        '<tool_call>{"name": "add"',
        '<tool_call>{"name": "add" "arguments": {}}',
        '<tool_call>[{"name": "add"}]</tool_call>',
        '<tool_call>{"name": "\\ud800"}</tool_call>',
        '<tool_call>{"arguments": ' + "[" * 100 + "]" * 100 + ', "name": "ping"}',
        "<tool_call>{" + '"x' * 600,
    ],
)
def test_what_is_no_call_is_said_as_it_came(text):
    for pieces in ([text], list(text)):
        whole = "Well.\n\n" + text
        assert read(HERMES, ["Well.\n\n", *pieces], cut=True).text(ContentDelta) == whole


def test_a_real_call_behind_a_broken_one_is_a_call():
    text = '<tool_call>oops <tool_call>{"name": "ping", "arguments": {}}</tool_call>'
    got = read(HERMES, list(text))
    assert (got.text(ContentDelta), got.calls()) == ("<tool_call>oops", [("ping", {})])


def test_a_call_that_breaks_off_is_marked_and_told_in_full():
    text = 'So\n<tool_call>\n{"name": "write_file", "arguments": {"path": "a", "text": "b" "c"}}'
    got = read(HERMES, list(text))
    (end,) = [event for event in got.events if isinstance(event, ToolCallEnd)]
    assert (got.arguments(0), end.complete) == ('{"path": "a", "text": "b"}', False)
    assert got.text(ContentDelta)[:2] + end.raw + got.text(ContentDelta)[2:] == text


def test_space_around_calls_is_not_content():
    call = '<tool_call>{"name": "ping", "arguments": {}}</tool_call>'
    got = read(HERMES, list(f"a \n{call}\n\n{call}\n b\n{call}\n\n"))
    assert (got.text(ContentDelta), len(got.calls())) == ("a\n b", 3)


def test_a_value_that_is_no_string_comes_whole():
    parser = XML.parser(ChatTurn("", TOOLS))
    events = parser.push("<tool_call>\n<function=add>\n<parameter=a>\n12")
    assert [type(event).__name__ for event in events] == ["ToolCallStart"]


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "1" * 5000])
def test_numbers_json_cannot_say_stay_text(number):
    text = f"<tool_call><function=add><parameter=b>{number}</parameter></function></tool_call>"
    assert read(XML, [text]).calls() == [("add", {"b": number})]


# --- types


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"oneOf": [{"type": "integer"}, {"enum": ["a"]}]}, {"string", "integer"}),
        ({"anyOf": [{"type": "string"}, {}]}, set()),
        ({"allOf": [{"description": "x"}, {"type": "array"}]}, {"array"}),
        ({"enum": ["a", 1, None, 1.5, True]}, {"string", "integer", "null", "number", "boolean"}),
        ({"const": 3}, {"integer"}),
        ({"$ref": "#/$defs/a~1b"}, {"boolean"}),
        ({"$ref": "#/$defs/nowhere"}, set()),
        ({"$ref": "#/$defs/self"}, set()),
        ({"$ref": "http://other"}, set()),
        ({"type": 5}, set()),
        ({}, set()),
        (True, set()),
        (None, set()),
    ],
)
def test_types_of_a_schema(schema, types):
    root = {"$defs": {"a/b": {"type": "boolean"}, "self": {"$ref": "#/$defs/self"}}}
    assert types_of(schema, root) == types


def test_a_schema_that_branches_without_end_says_nothing_soon():
    many = {"anyOf": [{"$ref": "#/$defs/a"}] * 100}
    assert types_of(many, {"$defs": {"a": many}}) == set()


def test_arguments_beside_the_named_ones():
    tool = {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    assert (argument_schema(tool, "a"), argument_schema(tool, "b")) == ({"integer"}, {"string"})
    assert argument_schema({"properties": "broken"}, "a") == set()


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", {"integer"}, 5),
        (" 5\n", {"integer"}, 5),
        ("+5", {"integer"}, 5),
        ("5.0", {"integer"}, 5),
        ("5.5", {"integer"}, "5.5"),
        ("007", {"integer"}, "007"),
        ("five", {"integer"}, "five"),
        ("5", {"number"}, 5),
        ("5.50", {"number"}, 5.5),
        ("1e3", {"number"}, 1000.0),
        ("true", {"number"}, "true"),
        ("True", {"boolean"}, True),
        ("FALSE", {"boolean"}, False),
        ("yes", {"boolean"}, "yes"),
        ("null", {"null", "string"}, None),
        ("None", {"integer", "null"}, None),
        ("null", {"string"}, "null"),
        ("5", {"string"}, "5"),
        ("5", {"string", "integer"}, 5),
        ("[1, 2]", {"array"}, [1, 2]),
        ("{}", {"array"}, "{}"),
        ('{"a": [1]}', {"object", "array"}, {"a": [1]}),
        ("{'a': 1}", {"object"}, "{'a': 1}"),
        ("[" * 500 + "]" * 500, {"array"}, "[" * 500 + "]" * 500),
        ("5", set(), 5),
        ('"5"', set(), '"5"'),
        ("text", set(), "text"),
        (" text ", {"string"}, " text "),
        ("", {"integer"}, ""),
    ],
)
def test_text_as_the_type_the_tool_takes(text, types, value):
    found = from_text(text, frozenset(types))
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("value", "types", "want"),
    [
        ("5", {"integer"}, 5),
        ("x", {"integer"}, "x"),
        (5.0, {"integer"}, 5),
        (5.5, {"integer"}, 5.5),
        (5, {"number"}, 5),
        (5, {"string"}, "5"),
        (True, {"string"}, "true"),
        ([1], {"string"}, "[1]"),
        (None, {"string"}, None),
        ("null", {"integer", "null"}, None),
        ([1], {"object"}, [1]),
        ("[1]", {"array"}, [1]),
        (True, {"integer"}, True),
        ({"a": 1}, set(), {"a": 1}),
    ],
)
def test_json_as_the_type_the_tool_takes(value, types, want):
    found = from_value(value, frozenset(types), json.dumps(value))
    assert (found, type(found)) == (want, type(want))


# --- the source


def run(read, source, pieces):
    """Feed a reader; what it returns."""
    pieces = iter(pieces)
    try:
        while True:
            next(read)
            piece = next(pieces, None)
            if piece is None:
                source.final = True
            else:
                source.push(piece)
    except StopIteration as stop:
        return stop.value


LITERALS = st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=3, unique=True).map(tuple)


@given(st.text("ab<", max_size=12), LITERALS, st.lists(st.integers(1, 4), max_size=12))
def test_until_finds_what_is_complete_first(text, literals, sizes):
    ends = {end: [one for one in literals if text[:end].endswith(one)] for end in range(len(text) + 1)}
    first = next((end for end, found in ends.items() if found), None)
    literal = "" if first is None else max(ends[first], key=len)
    before = text if first is None else text[: first - len(literal)]
    source, said = Source(), []
    assert run(source.until(literals, said.append), source, pieces_of(text, sizes)) == literal
    assert "".join(said) == before


@given(st.text("ab<", max_size=8), LITERALS, st.lists(st.integers(1, 4), max_size=8))
def test_starts_reads_the_longest(text, literals, sizes):
    source = Source()
    want = max((one for one in literals if text.startswith(one)), key=len, default="")
    assert run(source.starts(*literals), source, pieces_of(text, sizes)) == want


def pieces_of(text, sizes):
    at = 0
    for size in [*sizes, len(text) + 1]:
        if at < len(text):
            yield text[at : at + size]
        at += size


def test_a_source_goes_back_to_its_mark():
    source = Source()
    source.push("abcdef")
    assert source.take(1) == "a"
    source.mark("a")
    assert source.take(3) == "bcd"
    source.push("g")
    source.rewind()
    assert source.take(9) == "abcdefg"
