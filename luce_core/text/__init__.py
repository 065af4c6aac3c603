"""Text on both sides of a model: tokenizers, detokenizing streams, stop strings, chat templates."""

from luce_core.contracts import Segment
from luce_core.text.chat_template import ChatTemplate
from luce_core.text.detokenizer import Detokenizer
from luce_core.text.fallback import FALLBACK_TEMPLATES
from luce_core.text.messages import normalize_messages
from luce_core.text.stops import StopMatcher
from luce_core.text.tokenizer import Tokenizer

__all__ = [
    "FALLBACK_TEMPLATES",
    "ChatTemplate",
    "Detokenizer",
    "Segment",
    "StopMatcher",
    "Tokenizer",
    "normalize_messages",
]
