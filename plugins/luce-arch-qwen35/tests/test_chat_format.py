"""The core's contract kit on the chat format."""

from __future__ import annotations

import json

from luce_core.testing.chat_contract import ChatFormatContract


class TestChat(ChatFormatContract):
    hooks = "luce_arch_qwen35.hooks"
    name = "qwen35"
    template = "<tool_call><function=x>"
    unwritable = ("</parameter>", "\n<parameter=", "\n</function>")
    open_tail = "<|im_start|>assistant\n<think>\n"

    def write_calls(self, calls):
        def written(value):
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

        def parameters(arguments):
            return "".join(
                f"<parameter={key}>\n{written(value)}\n</parameter>\n" for key, value in arguments.items()
            )

        return "".join(
            f"\n\n<tool_call>\n<function={name}>\n{parameters(arguments)}</function>\n</tool_call>"
            for name, arguments in calls
        )

    def write_thought(self, thought):
        return f"<think>\n{thought}\n</think>\n\n"
