"""The core's contract kit on both chat formats: JSON, and the tags of Coder's files."""

from __future__ import annotations

import json

from luce_core.testing.chat_contract import ChatFormatContract


class Chat:
    hooks = "luce_arch_qwen3.hooks"
    name = "qwen3"
    open_tail = "<|im_start|>assistant\n<think>\n"

    def write_thought(self, thought):
        return f"<think>\n{thought}\n</think>\n\n"


class TestJson(Chat, ChatFormatContract):
    template = "<tool_call>\n<think>"

    def write_calls(self, calls):
        written = (json.dumps({"name": name, "arguments": args}, ensure_ascii=False) for name, args in calls)
        return "\n" + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)


class TestCoder(Chat, ChatFormatContract):
    template = "<tool_call><function=example_function_name>"
    unwritable = ("</parameter>", "\n<parameter=", "\n</function>")

    def write_calls(self, calls):
        def written(value):
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

        def parameters(arguments):
            return "".join(
                f"<parameter={key}>\n{written(value)}\n</parameter>\n" for key, value in arguments.items()
            )

        return "".join(
            f"\n<tool_call>\n<function={name}>\n{parameters(arguments)}</function>\n</tool_call>"
            for name, arguments in calls
        )
