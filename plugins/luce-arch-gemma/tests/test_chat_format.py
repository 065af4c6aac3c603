"""The core's contract kit on Gemma 4's chat format, and on Gemma 3's, which is what its template says."""

from __future__ import annotations

import json

import pytest

from luce_core.contracts import ContentDelta, ReasoningDelta
from luce_core.testing.chat_contract import ChatFormatContract, read

QUOTE = '<|"|>'


class TestGemma4(ChatFormatContract):
    hooks = "luce_arch_gemma.hooks"
    name = "gemma"
    template = "<|turn>model ... <|tool_call>call:"
    unwritable = (QUOTE,)
    silent = ("<|channel>thought", "<|channel>", "<channel|>")
    open_tail = "<|turn>model\n<|channel>thought\n"

    def write_calls(self, calls):
        return "".join(f"<|tool_call>call:{name}{self._value(args)}<tool_call|>" for name, args in calls)

    def write_thought(self, thought):
        return f"<|channel>thought\n{thought}\n<channel|>"

    def _value(self, value):
        if isinstance(value, str):
            return f"{QUOTE}{value}{QUOTE}"
        if isinstance(value, dict):
            return (
                "{" + ",".join(f"{self._key(key)}:{self._value(item)}" for key, item in value.items()) + "}"
            )
        if isinstance(value, list):
            return "[" + ",".join(map(self._value, value)) + "]"
        return json.dumps(value)

    def _key(self, key):
        return key if key.isidentifier() else f"{QUOTE}{key}{QUOTE}"

    def test_thoughts_between_calls_are_thoughts(self):
        text = "<|channel>thought\none<channel|>Then <|channel>thought\ntwo<channel|>"
        text += "<|tool_call>call:ping{}<tool_call|>"
        got = read(self._format(), list(text))
        assert (got.text(ReasoningDelta), got.text(ContentDelta)) == ("onetwo", "Then")
        assert got.calls() == [("ping", {})]

    def test_quotes_of_json_are_understood(self):
        text = '<|tool_call>call:write_file{"path": "a\\n", text:"b"}<tool_call|>'
        assert read(self._format(), list(text)).calls() == [("write_file", {"path": "a\n", "text": "b"})]

    @pytest.mark.parametrize("tail", ["<|turn>model\n", "<|turn>model\n<|channel>thought\n<channel|>"])
    def test_an_empty_thought_in_the_prompt_is_closed(self, tail):
        assert read(self._format(), ["Hello"], tail=tail).events == (ContentDelta("Hello"),)


class TestGemma3(ChatFormatContract):
    hooks = "luce_arch_gemma.hooks"
    name = "gemma"
    template = "<start_of_turn>model ... <tool_call>"

    def write_calls(self, calls):
        written = (json.dumps({"name": name, "arguments": args}) for name, args in calls)
        return "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in written)

    def write_thought(self, thought):
        return ""
