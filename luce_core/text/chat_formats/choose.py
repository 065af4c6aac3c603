"""The format of a file by what its template says and its vocabulary holds, where its family names none."""

from __future__ import annotations

from luce_core.contracts import ChatContext
from luce_core.text.chat_formats.calls import CallSyntax
from luce_core.text.chat_formats.json_calls import BareJson, TaggedJson
from luce_core.text.chat_formats.tag_calls import FunctionTags, KeyValueTags
from luce_core.text.chat_formats.tags import TagFormat, Thought

PLAIN = TagFormat("plain", thought=None)
"""Everything is content."""


def shows(context: ChatContext, text: str) -> bool:
    """Whether the template spells `text` or the vocabulary has it as a token."""
    return text in context.template or context.tokenizer.token_id(text) is not None


def tagged_calls(context: ChatContext) -> tuple[CallSyntax, ...]:
    """The syntaxes of calls that the template describes, the family's own first.

    A file whose template says nothing of tools has none: its answers are text.
    """
    calls: list[CallSyntax] = []
    if "<arg_key>" in context.template:
        calls.append(KeyValueTags())
    if "<function=" in context.template:
        calls.append(FunctionTags())
    if "<tool_call>" in context.template:
        calls.append(TaggedJson())  # last of those: what models trained on several syntaxes fall back on
    if "<|python_tag|>" in context.template or "ipython" in context.template:
        calls.append(BareJson())
    return tuple(calls)


def auto(context: ChatContext) -> TagFormat:
    """Thoughts where the file knows their tags, calls as its template describes them; else plain text."""
    thought = Thought() if shows(context, "<think>") and shows(context, "</think>") else None
    calls = tagged_calls(context)
    return TagFormat("auto", thought, calls) if thought or calls else PLAIN


def plain(context: ChatContext) -> TagFormat:
    """Everything is content."""
    return PLAIN
