"""How Laguna writes thoughts and calls: think tags, keys and values in tags."""

from __future__ import annotations

from luce_core.contracts import ChatContext
from luce_core.text.chat_formats import KeyValueTags, TagFormat, TaggedJson, Thought

# The turn's end may come spelled as ordinary tokens.
FORMAT = TagFormat("laguna", Thought(), (KeyValueTags(), TaggedJson()), ends=("</assistant>",))


def make_format(context: ChatContext) -> TagFormat:
    """One format for all."""
    return FORMAT
