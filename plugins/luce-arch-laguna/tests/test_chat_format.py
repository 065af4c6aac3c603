"""The core's contract kit on the chat format."""

from __future__ import annotations

import json

import pytest

from luce_core.contracts import ContentDelta
from luce_core.testing.chat_contract import ChatFormatContract, read


class TestChat(ChatFormatContract):
    hooks = "luce_arch_laguna.hooks"
    name = "laguna"
    template = "<tool_call><arg_key>"
    unwritable = ("</arg_value>",)
    open_tail = "<assistant>\n<think>"

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

    @pytest.mark.parametrize("space", ["", "\n"])
    def test_a_turn_that_ends_in_words_is_over(self, space):
        format = self._format()
        text = f"Yes.<tool_call>ping{space}</tool_call>{space}</assistant><user>"
        got = read(format, list(text))
        assert (got.calls(), got.text(ContentDelta), got.over) == ([("ping", {})], "Yes.", True)

    def test_what_the_model_leaves_out_between_tags_is_not_missed(self):
        text = "<tool_call>add<arg_key>a</arg_key><arg_value>2</arg_value><arg_key>b</arg_key><arg_value>1"
        text += "</arg_value></tool_call>"
        assert read(self._format(), [text]).calls() == [("add", {"a": 2, "b": 1})]
