"""How Ling writes thoughts and calls: think tags, keys and values in tags."""

from __future__ import annotations

from attrs import evolve

from luce_core.contracts import ChatContext
from luce_core.text.chat_formats import KeyValueTags, TagFormat, TaggedJson, Thought

FORMAT = TagFormat("bailing", Thought(), (KeyValueTags(), TaggedJson()))
OPTION = "thinking_option"


def make_format(context: ChatContext) -> TagFormat:
    """One format for all; the switch behind "detailed thinking on" is called what the template calls it."""
    return evolve(FORMAT, switch=OPTION, off="off", on="on") if OPTION in context.template else FORMAT
