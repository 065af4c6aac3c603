"""How Qwen3.5 and its successors write thoughts and calls: think tags, function and parameter tags."""

from __future__ import annotations

from luce_core.contracts import ChatContext
from luce_core.text.chat_formats import FunctionTags, TagFormat, TaggedJson, Thought

EFFORTS = {
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "xhigh",
    "x-high": "xhigh",
    "xhigh": "xhigh",
    "max": "xhigh",
}
"""3.8's templates know three; older ones read none."""
FORMAT = TagFormat("qwen35", Thought(), (FunctionTags(), TaggedJson()), efforts=EFFORTS)


def make_format(context: ChatContext) -> TagFormat:
    """One format for all."""
    return FORMAT
