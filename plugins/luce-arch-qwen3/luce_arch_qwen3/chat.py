"""How Qwen3 writes thoughts and calls: think tags; calls as JSON, or in the tags of its Coder files."""

from __future__ import annotations

from luce_core.contracts import ChatContext
from luce_core.text.chat_formats import FunctionTags, TagFormat, TaggedJson, Thought

JSON = TagFormat("qwen3-json", Thought(), (TaggedJson(),))
XML = TagFormat("qwen3-xml", Thought(), (FunctionTags(), TaggedJson()))


def make_format(context: ChatContext) -> TagFormat:
    """What the template shows the model is what the model writes."""
    return XML if "<function=" in context.template else JSON
