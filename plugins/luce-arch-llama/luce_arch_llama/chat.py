"""How the many models of this architecture write calls: Hermes JSON between tags or Llama 3's bare JSON."""

from __future__ import annotations

from attrs import evolve

from luce_core.contracts import ChatContext
from luce_core.text.chat_formats import BareJson, TagFormat, auto, tagged_calls

LLAMA3 = "<|start_header_id|>"


def make_format(context: ChatContext) -> TagFormat:
    """What the template shows; Llama 3's own where it shows nothing and the vocabulary is Llama 3's."""
    found = auto(context)
    if not tagged_calls(context) and context.has_template and LLAMA3 in context.template:
        return evolve(found, name="llama", calls=(BareJson(),))
    return evolve(found, name="llama")
