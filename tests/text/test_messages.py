"""OpenAI messages in, the shape of chat templates out; errors name the message."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luce_core.errors import RequestError
from luce_core.text import normalize_messages


def user(content="hi"):
    return {"role": "user", "content": content}


def call(arguments, **more):
    return {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}, **more}
    ]}  # fmt: skip


def test_plain_messages_pass():
    turns = [{"role": "system", "content": "s"}, user(), {"role": "assistant", "content": "a"}]
    assert normalize_messages(turns) == turns


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}], "a\nb"),
        ([{"type": "output_text", "text": "a"}, "b", {"text": "c"}], "a\nb\nc"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
    ],
)
def test_content_becomes_text(content, text):
    assert normalize_messages([user(content)]) == [user(text)]


def test_missing_content_is_empty():
    assert normalize_messages([{"role": "assistant"}]) == [{"role": "assistant", "content": ""}]


def test_developer_and_late_system_messages_join_the_first():
    late = {"role": "system", "content": [{"type": "text", "text": "b"}]}
    turns = [user("1"), {"role": "developer", "content": "a"}, user("2"), late]
    assert normalize_messages(turns) == [{"role": "system", "content": "a\n\nb"}, user("1"), user("2")]


def test_a_system_block_list_renders_like_its_string():
    blocks = [user(), {"role": "system", "content": [{"type": "text", "text": "late"}]}]
    string = [user(), {"role": "system", "content": "late"}]
    assert normalize_messages(blocks) == normalize_messages(string)


def test_empty_system_messages_leave_no_gap():
    turns = [{"role": "system", "content": ""}, {"role": "system", "content": "a"}, user()]
    assert normalize_messages(turns)[0] == {"role": "system", "content": "a"}


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_arguments_become_objects(arguments):
    [turn] = normalize_messages([call(arguments)])
    function = {"name": "f", "arguments": {"a": 1}}
    assert turn["tool_calls"] == [{"type": "function", "id": "c1", "function": function}]
    assert turn["content"] == ""


@pytest.mark.parametrize("arguments", ["", None])
def test_no_arguments_are_an_empty_object(arguments):
    [turn] = normalize_messages([call(arguments)])
    assert turn["tool_calls"][0]["function"]["arguments"] == {}


def test_tool_results_keep_their_call():
    turn = {"role": "tool", "tool_call_id": "c1", "name": "f", "content": [{"type": "text", "text": "42"}]}
    assert normalize_messages([turn]) == [{**turn, "content": "42"}]
    assert normalize_messages([{"role": "function", "name": "f", "content": "42"}])[0]["role"] == "tool"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_is_kept_under_the_name_templates_read(field):
    [turn] = normalize_messages([{"role": "assistant", "content": "a", field: "because"}])
    assert turn == {"role": "assistant", "content": "a", "reasoning_content": "because"}


def test_images_stay_in_place_where_they_are_allowed():
    content = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:,x"}}]
    [turn] = normalize_messages([user(content)], images=True)
    assert turn["content"] == [{"type": "text", "text": "see"}, {"type": "image"}]


BAD = [
    ("hello", "'messages' is of type str"),
    ([], "'messages' is empty"),
    ([user(), "x"], r"'messages\[1\]' is of type str"),
    ([{"content": "x"}], r"'messages\[0\]\.role' is None; wanted one of system"),
    ([user(), {"role": "bot", "content": "x"}], r"'messages\[1\]\.role' is 'bot'; wanted one of system"),
    ([{"role": ["user"]}], r"messages\[0\]\.role"),
    ([user(7)], r"'messages\[0\]\.content' is of type int"),
    ([user([7])], r"'messages\[0\]\.content\[0\]' is of type int"),
    ([user([{"type": "text", "text": None}])], r"content\[0\]\.text' is null"),
    ([user([{"type": "input_audio"}])], r"content\[0\]\.type' is 'input_audio'"),
    ([user([{"type": "image_url"}])], "reads no images"),
    ([{"role": "system", "content": [{"type": "image_url"}]}], "reads no images"),
    ([call("{")], r"messages\[0\]\.tool_calls\[0\]\.function\.arguments' is '\{'; wanted JSON"),
    ([call("[1]")], r"arguments' is of type list; wanted a JSON object"),
    ([call("[" * 100_000)], r"arguments' is .*wanted JSON"),
    ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], r"tool_calls\[0\]"),
    ([{"role": "assistant", "tool_calls": "f()"}], r"tool_calls' is of type str"),
    ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}], r"function\.name' is null"),
    ([{"role": "tool", "content": "x", "tool_call_id": 7}], r"tool_call_id' is of type int"),
]


@pytest.mark.parametrize(("messages", "message"), BAD)
def test_errors_name_the_message(messages, message):
    with pytest.raises(RequestError, match=message) as caught:
        normalize_messages(messages)
    assert caught.value.status == 400
    assert caught.value.param.startswith("messages")


def test_an_image_has_its_own_code():
    with pytest.raises(RequestError) as caught:
        normalize_messages([user([{"type": "image"}])])
    assert caught.value.code == "image_unsupported"


NAMES = st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "arguments"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=8,
)
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"])},
    optional={"content": JSON, "tool_calls": JSON},
)


@settings(max_examples=150, deadline=None)
@given(st.lists(JSON | TURN, max_size=4))
def test_any_json_gives_messages_or_a_request_error(messages):
    try:
        turns = normalize_messages(messages)
    except RequestError:
        return
    assert all(isinstance(turn["content"], str) for turn in turns)
    assert [turn["role"] for turn in turns].count("system") <= 1
