"""Thoughts and tool calls in an answer's text: the syntaxes several families share.

A family's format is data: `TagFormat` with the tags of its thoughts and the syntaxes of its calls.
"""

from luce_core.text.chat_formats.calls import Calls, CallSyntax, Malformed, name_until
from luce_core.text.chat_formats.choose import PLAIN, auto, shows, tagged_calls
from luce_core.text.chat_formats.json_calls import BareJson, TaggedJson
from luce_core.text.chat_formats.source import Reading, Source
from luce_core.text.chat_formats.tag_calls import FunctionTags, KeyValueTags
from luce_core.text.chat_formats.tags import EFFORTS, TagFormat, TagParser, Thought

__all__ = [
    "EFFORTS",
    "PLAIN",
    "BareJson",
    "CallSyntax",
    "Calls",
    "FunctionTags",
    "KeyValueTags",
    "Malformed",
    "Reading",
    "Source",
    "TagFormat",
    "TagParser",
    "TaggedJson",
    "Thought",
    "auto",
    "name_until",
    "shows",
    "tagged_calls",
]
