"""The core's contract kit on the chat format."""

from __future__ import annotations

import json

import pytest
from luce_arch_bailing.chat import make_format

from luce_core.contracts import ChatContext, Thinking
from luce_core.testing.chat_contract import ChatFormatContract


class TestChat(ChatFormatContract):
    hooks = "luce_arch_bailing.hooks"
    name = "bailing"
    template = "<tool_call><arg_key>"
    unwritable = ("</arg_value>",)
    open_tail = "<role>ASSISTANT</role>\n<think>"

    def write_calls(self, calls):
        def pair(key, value):
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            return f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n"

        def call(name, arguments):
            pairs = "".join(pair(key, value) for key, value in arguments.items())
            return f"\n<tool_call>{name}\n{pairs}</tool_call>"

        return "".join(call(name, arguments) for name, arguments in calls)

    def write_thought(self, thought):
        return f"<think>\n{thought}\n</think>\n"


@pytest.mark.parametrize(
    ("template", "kwargs"),
    [
        ("{{ thinking_option }}", {"thinking_option": "off"}),
        ("{{ enable_thinking }}", {"enable_thinking": False}),
    ],
)
def test_the_switch_is_called_what_the_template_calls_it(template, kwargs):
    assert make_format(ChatContext(None, None, template)).template_kwargs(Thinking(False)) == kwargs
