"""The core's contract kit on the chat formats of the many models that share this architecture."""

from __future__ import annotations

import json

import pytest

from luce_core.contracts import ContentDelta
from luce_core.testing.chat_contract import ChatFormatContract, read


class Chat:
    hooks = "luce_arch_llama.hooks"
    name = "llama"

    def write_thought(self, thought):
        return ""


class TestHermes(Chat, ChatFormatContract):
    template = "<|im_start|> ... <tool_call>"

    def write_calls(self, calls):
        written = (json.dumps({"name": name, "arguments": args}) for name, args in calls)
        return "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in written)


class TestLlama3(Chat, ChatFormatContract):
    """A whole answer is a call, so there is none behind content."""

    template = "<|start_header_id|>ipython<|end_header_id|>"

    def write_calls(self, calls):
        return "; ".join(
            json.dumps({"name": name, "parameters": args}, ensure_ascii=False) for name, args in calls
        )

    def _answers(self, count):
        for calls, thought, _ in super()._answers(count):
            yield calls, thought, ""

    @pytest.mark.parametrize(
        "text", ['See {"name": "ping"}', '{"name": "ping"', '{"a": 1}', "{}", "{", "<|python_tag|>x()"]
    )
    def test_what_is_no_call_is_text(self, text):
        assert read(self._format(), list(text)).events == (ContentDelta(text),)

    def test_the_tag_before_code_may_stand_before_a_call(self):
        text = '<|python_tag|>{"name": "ping", "parameters": {}}'
        assert read(self._format(), list(text)).calls() == [("ping", {})]


class TestDistilled(TestHermes):
    """A reasoning model poured into this architecture."""

    template = "<think></think><tool_call>"
    open_tail = "<｜Assistant｜><think>\n"

    def write_thought(self, thought):
        return f"<think>\n{thought}\n</think>\n\n"
