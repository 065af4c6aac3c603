"""The template a published file carries, as the core renders it: turns, the thinking switch, tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from luce_core.gguf import read_header
from luce_core.text.chat_template import ChatTemplate
from luce_core.text.messages import normalize_messages

FILE = Path(__file__).parent / "fixtures" / "tiny-deepseek4.gguf"
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": "x"}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def template():
    source = read_header(FILE).metadata["tokenizer.chat_template"]
    return ChatTemplate(source, variables={"bos_token": "<bos>"})


def rendered(template, messages, **more):
    return "".join(segment.text for segment in template.render(normalize_messages(messages), **more))


@pytest.mark.parametrize(
    ("kwargs", "end"),
    [({}, "</think>"), ({"enable_thinking": False}, "</think>"), ({"enable_thinking": True}, "<think>")],
)
def test_the_thinking_switch(template, kwargs, end):
    """Off is the end of an empty thought, not its absence."""
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    want = f"<bos>Be kind.<｜User｜>Hi<｜Assistant｜>{end}"
    assert rendered(template, messages, kwargs=kwargs) == want
    assert "enable_thinking" in template.accepts


def test_calls_and_results(template):
    messages = [
        {"role": "user", "content": "2 + x?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]
    text = rendered(template, messages, tools=[TOOL])
    call = (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">\n'
        '<｜DSML｜parameter name="a" string="false">2</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="b" string="true">x</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls><｜end▁of▁sentence｜>"
    )
    assert f"<｜Assistant｜></think>\n\n{call}" in text
    assert text.endswith("<｜User｜><tool_result>3</tool_result><｜Assistant｜></think>")
    assert '{"type": "object"}' in text
