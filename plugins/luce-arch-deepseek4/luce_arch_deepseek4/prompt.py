"""Prompts of DeepSeek V4, for files without a template.

The layout is the one the vendor's encoder and the templates of converted files share. What the model was
trained to read is spelled exactly; messages, names and schemas are untrusted text in between.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from luce_core.contracts import Segment
from luce_core.errors import RequestError

MARK = "｜DSML｜"
BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
OPEN, CLOSE = "<think>", "</think>"

MAX_EFFORT = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the "
    "root cause, rigorously stress-testing your logic against all potential paths, edge cases, and "
    "adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
TOOLS = (
    "## Tools\n\nYou have access to a set of tools to help answer the user's question. You can invoke tools "
    f'by writing a "<{MARK}tool_calls>" block like the following:\n\n'
    f'<{MARK}tool_calls>\n<{MARK}invoke name="$TOOL_NAME">\n'
    f'<{MARK}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{MARK}parameter>\n...\n'
    f'</{MARK}invoke>\n<{MARK}invoke name="$TOOL_NAME2">\n...\n</{MARK}invoke>\n</{MARK}tool_calls>\n\n'
    'String parameters should be specified as is and set `string="true"`. For all other types (numbers, '
    'booleans, arrays, objects), pass the value in JSON format and set `string="false"`.\n\n'
    f"If thinking_mode is enabled (triggered by {OPEN}), you MUST output your complete reasoning inside "
    f"{OPEN}...{CLOSE} BEFORE any tool calls or final response.\n\n"
    f"Otherwise, output directly after {CLOSE} with tool calls or final response.\n\n"
    "### Available Tool Schemas\n\n"
)
AFTER_TOOLS = (
    "\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
)


class _Prompt:
    def __init__(self, image: str) -> None:
        self.segments: list[Segment] = []
        self.image = image

    def ours(self, text: str) -> None:
        self.segments.append(Segment(text, trusted=True))

    def theirs(self, text: str) -> None:
        self.segments.append(Segment(text, trusted=False))

    def shown(self, message: Mapping[str, Any]) -> None:
        """Texts and images of a message, in their order."""
        content = message.get("content") or ""
        if isinstance(content, str):
            self.theirs(content)
            return
        if not self.image:
            raise RequestError(
                "A message holds parts that are no text; prompts of this file are text only. Leave them out.",
                param="messages",
            )
        for before, part in zip([{"type": "image"}, *content], content, strict=False):
            if part["type"] == "image":
                self.ours(self.image)
            else:  # texts next to each other are joined as they are where there is no image
                self.theirs(part["text"] if before["type"] == "image" else f"\n{part['text']}")


def prompt(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    kwargs: Mapping[str, Any],
    image: str = "",
) -> list[Segment]:
    """The prompt of normalised messages, up to where the answer begins.

    kwargs: `thinking` or `enable_thinking` (false), `drop_thinking` (true), `reasoning_effort` (only "max").
    image: the token that stands for one; "" = RequestError for content that is no text.
    """
    thinking = bool(kwargs.get("thinking", kwargs.get("enable_thinking", False)))
    out = _Prompt(image)
    out.ours(BEGIN)
    if thinking and kwargs.get("reasoning_effort") == "max":
        out.ours(MAX_EFFORT)
    system = [message for message in messages if message["role"] == "system"]
    _head(out, "\n\n".join(message.get("content") or "" for message in system), tools)
    asked = [index for index, message in enumerate(messages) if message["role"] in ("user", "tool")]
    keep_all = not kwargs.get("drop_thinking", True) or bool(tools) or _has_results(messages)
    in_user = False
    for index, message in enumerate(messages):
        role = message["role"]
        if role in ("user", "tool"):
            out.ours("\n\n" if in_user else USER)
            in_user = True
            _asked(out, message)
        elif role == "assistant":
            in_user = False
            kept = thinking and (keep_all or index > max(asked, default=-1))
            _answered(out, message, str(message.get("reasoning_content") or "") if kept else None)
    out.ours(ASSISTANT + (OPEN if thinking else CLOSE))
    return out.segments


def _has_results(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(message["role"] == "tool" for message in messages)


def _head(out: _Prompt, system: str, tools: Sequence[Mapping[str, Any]] | None) -> None:
    out.theirs(system)
    if not tools:
        return
    out.ours(("\n\n" if system else "") + TOOLS)
    for tool in tools:
        if tool.get("type") == "function":
            out.theirs(json.dumps(tool["function"], ensure_ascii=False))
            out.ours("\n")
    out.ours(AFTER_TOOLS)


def _asked(out: _Prompt, message: Mapping[str, Any]) -> None:
    if message["role"] == "user":
        out.shown(message)
        return
    out.ours("<tool_result>")
    out.shown(message)
    out.ours("</tool_result>")


def _answered(out: _Prompt, message: Mapping[str, Any], thought: str | None) -> None:
    """An assistant's turn. thought: None = none is shown."""
    out.ours(ASSISTANT)
    if thought is not None:
        out.ours(OPEN)
        out.theirs(thought)
    out.ours(CLOSE)
    out.shown(message)
    if message.get("tool_calls"):
        out.ours(f"\n\n<{MARK}tool_calls>\n")
        for call in message["tool_calls"]:
            _call(out, call["function"])
        out.ours(f"</{MARK}tool_calls>")
    out.ours(END)


def _call(out: _Prompt, function: Mapping[str, Any]) -> None:
    out.ours(f'<{MARK}invoke name="')
    out.theirs(function["name"])
    out.ours('">\n')
    for key, value in function["arguments"].items():
        text = isinstance(value, str)
        out.ours(f'<{MARK}parameter name="')
        out.theirs(key)
        out.ours(f'" string="{"true" if text else "false"}">')
        out.theirs(value if text else json.dumps(value, ensure_ascii=False))
        out.ours(f"</{MARK}parameter>\n")
    out.ours(f"</{MARK}invoke>\n" if function["arguments"] else f"\n</{MARK}invoke>\n")
