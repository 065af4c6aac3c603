"""The core's contract kit on DSML, and prompts made without a template against the published template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from luce_arch_deepseek4.chat import make_format
from luce_arch_deepseek4.prompt import prompt

from luce_core.contracts import ChatContext, ContentDelta, ReasoningDelta, Thinking
from luce_core.errors import RequestError
from luce_core.gguf import read_header
from luce_core.testing.chat_contract import ChatFormatContract, read
from luce_core.text.chat_template import ChatTemplate
from luce_core.text.messages import normalize_messages

FILE = Path(__file__).parent / "fixtures" / "tiny-deepseek4.gguf"
MARK = "｜DSML｜"


def written(name, arguments):
    def parameter(key, value):
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        kind = "true" if isinstance(value, str) else "false"
        return f'<{MARK}parameter name="{key}" string="{kind}">{text}</{MARK}parameter>\n'

    inside = "".join(parameter(key, value) for key, value in arguments.items()) or "\n"
    return f'<{MARK}invoke name="{name}">\n{inside}</{MARK}invoke>\n'


class TestChat(ChatFormatContract):
    hooks = "luce_arch_deepseek4.hooks"
    name = "deepseek4"
    template = "<｜DSML｜tool_calls>"
    unwritable = (f"</{MARK}parameter>",)
    silent = ("<think>", "</think>", f"</{MARK}tool_calls>", f"</{MARK}function_calls>")
    open_tail = "<｜Assistant｜><think>"

    def write_calls(self, calls):
        return f"\n\n<{MARK}tool_calls>\n{''.join(written(*call) for call in calls)}</{MARK}tool_calls>"

    def write_thought(self, thought):
        return f"<think>{thought}</think>"

    def test_the_older_name_of_the_block(self):
        text = f"<{MARK}function_calls>\n{written('ping', {})}</{MARK}function_calls>"
        assert read(self._format(), list(text)).calls() == [("ping", {})]

    def test_what_is_said_to_be_json_and_is_none_is_text(self):
        text = written("add", {"a": 1}).replace('string="false">1', 'string="false">one')
        assert read(self._format(), list(text)).calls() == [("add", {"a": "one"})]


# --- prompts


@pytest.fixture(scope="module")
def template():
    source = read_header(FILE).metadata["tokenizer.chat_template"]
    return ChatTemplate(source, variables={"bos_token": "<｜begin▁of▁sentence｜>"})


TEXT = st.text("ab <>|｜{}\"'\n é", max_size=8)
VALUES = st.none() | st.booleans() | st.integers(-9, 9) | TEXT | st.lists(TEXT, max_size=2)
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {"name": st.just("f") | TEXT, "arguments": st.dictionaries(TEXT, VALUES, max_size=3)}
            ),
        }
    ),
    max_size=2,
)
ASSISTANT = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": TEXT}, optional={"reasoning_content": TEXT, "tool_calls": CALLS}
)
OTHERS = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", "system"]), "content": TEXT})
TOOL = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {
                "name": TEXT,
                "description": TEXT,
                "parameters": st.just({"type": "object", "x": ["é", 1.5, None]}),
            }
        ),
    }
)
KWARGS = st.fixed_dictionaries(
    {},
    optional={
        "thinking": st.booleans(),
        "enable_thinking": st.booleans(),
        "drop_thinking": st.booleans(),
        "reasoning_effort": st.sampled_from(["low", "max"]),
    },
)


@given(st.lists(ASSISTANT | OTHERS, min_size=1, max_size=5), st.lists(TOOL, max_size=2), KWARGS)
def test_prompts_are_the_templates_byte_for_byte(template, messages, tools, kwargs):
    normal = normalize_messages(messages)
    want = "".join(segment.text for segment in template.render(normal, tools=tools or None, kwargs=kwargs))
    assert "".join(segment.text for segment in prompt(normal, tools or None, kwargs)) == want


def test_nobody_but_the_format_spells_special_tokens():
    call = {"type": "function", "function": {"name": "<f>", "arguments": {"<k>": "<v>", "<n>": ["<l>"]}}}
    messages = [
        {"role": "system", "content": "<system>"},
        {"role": "user", "content": "<user>"},
        {"role": "assistant", "content": "<said>", "reasoning_content": "<thought>", "tool_calls": [call]},
        {"role": "tool", "content": "<result>"},
    ]
    tool = {"type": "function", "function": {"name": "<tool>", "parameters": {}}}
    made = prompt(messages, [tool], {"thinking": True})
    trusted = "".join(segment.text for segment in made if segment.trusted)
    theirs = "".join(segment.text for segment in made if not segment.trusted)
    for text in (
        "<system>",
        "<user>",
        "<said>",
        "<thought>",
        "<result>",
        "<tool>",
        "<f>",
        "<k>",
        "<v>",
        "<l>",
    ):
        assert text in theirs
        assert text not in trusted


def test_parts_that_are_no_text_are_refused():
    messages = [{"role": "user", "content": [{"type": "image"}]}]
    with pytest.raises(RequestError, match="no text"):
        prompt(messages, None, {})
    with pytest.raises(RequestError, match="no text"):
        make_format(ChatContext(None, None, "none", has_template=False)).render(messages, None, {})


def test_images_stand_where_the_message_has_them():
    """Among texts in their order, also in results of tools; nobody but the format writes their token."""
    parts = [
        {"type": "text", "text": "<a>"},
        {"type": "text", "text": "b"},
        {"type": "image"},
        {"type": "image"},
        {"type": "text", "text": "<image>"},
    ]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "c"},
        {"role": "tool", "content": [{"type": "image"}]},
    ]
    format = make_format(ChatContext(None, None, "none", has_template=False, image="<image>"))
    made = format.render(messages, None, {})
    assert "".join(segment.text for segment in made) == (
        "<｜begin▁of▁sentence｜><｜User｜><a>\nb<image><image><image><｜Assistant｜></think>c"
        "<｜end▁of▁sentence｜><｜User｜><tool_result><image></tool_result><｜Assistant｜></think>"
    )
    assert "".join(segment.text for segment in made if not segment.trusted) == "<a>\nb<image>c"


def test_only_a_file_without_a_template_gets_its_prompts_here():
    own = make_format(ChatContext(None, None, "{{ messages }}"))
    none = make_format(ChatContext(None, None, "the core's", has_template=False))
    messages = [{"role": "user", "content": "Hi"}]
    assert (own.renders, own.render(messages, None, {})) == (False, None)
    assert none.renders
    assert list(none.render(messages, None, {})) == prompt(messages, None, {})


@pytest.mark.parametrize(
    ("wish", "kwargs"),
    [
        (Thinking(), {}),
        (Thinking(False), {"enable_thinking": False}),
        (Thinking(None, "none"), {"enable_thinking": False}),
        (Thinking(None, "low"), {"enable_thinking": True}),
        (Thinking(None, "xhigh"), {"enable_thinking": True, "reasoning_effort": "max"}),
        (Thinking(False, "max"), {"enable_thinking": False, "reasoning_effort": "max"}),
    ],
)
def test_the_switch(wish, kwargs):
    assert make_format(ChatContext(None, None, "x")).template_kwargs(wish) == kwargs


def test_what_the_model_wrote_comes_back_as_it_was():
    """Prompt and answer of a turn with tools begin the prompt of the next, so the cache has them."""
    tool = {"type": "function", "function": {"name": "ping", "parameters": {}}}
    asked = [{"role": "user", "content": "Is it up?"}]
    answer = f"I look.\n</think>Wait.\n\n<{MARK}tool_calls>\n{written('ping', {})}</{MARK}tool_calls>"
    format = make_format(ChatContext(None, None, "none", has_template=False))

    def text(messages):
        made = format.render(normalize_messages(messages), [tool], {"enable_thinking": True})
        return "".join(segment.text for segment in made)

    got = read(format, list(answer), tools={"ping": {}}, tail=text(asked))
    call = {"id": "1", "type": "function", "function": {"name": "ping", "arguments": got.arguments(0)}}
    message = {
        "role": "assistant",
        "content": got.text(ContentDelta),
        "reasoning_content": got.text(ReasoningDelta),
        "tool_calls": [call],
    }
    result = {"role": "tool", "tool_call_id": "1", "content": "yes"}
    assert text([*asked, message, result]).startswith(text(asked) + answer + "<｜end▁of▁sentence｜>")
