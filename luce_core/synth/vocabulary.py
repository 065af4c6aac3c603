"""A vocabulary of exactly so many tokens that spells every text: byte-level pairs, then made-up words.

The model it is for guesses at random, so most of what it says are those words: readable, and pronounceable
if one must. Their lengths are those of words, so a stream looks and weighs like a real one.
"""

from __future__ import annotations

from typing import Any, Final

from luce_core.errors import UsageError
from luce_core.text.fallback import FALLBACK_TEMPLATES
from luce_core.text.merging import BYTE_CHARACTERS
from luce_core.text.vocabulary import TokenType

PAIRS: Final = (
    "t h|th e|h e|i n|in g|a n|an d|e r|o n|r e|a t|e n|o r|e s|i s|i t|s t|a r|a l|l e|o u|y ou|l l|e d|n d|"
    "t o|o f|v e|s e|c h|l d|u r|i c|o m|c om|i on|t ion|en t|er s|w h|th at|f or|w i|wi th|  t|  a|  s|  w|"
    "  the|  of|  and|  to|  in|  is|  you|  that|  for|  with"
)
"""Merged first to last; a part that begins with a space is a space and what follows."""
CONTROL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
SYLLABLES: Final = [first + second for first in "bcdfghjklmnpqrstvwxz" for second in "aeiou"]


def vocabulary(size: int) -> dict[str, Any]:
    """GGUF metadata (`tokenizer.*`) of `size` tokens. Raises UsageError where they are too few."""
    merges = [_pair(text) for text in PAIRS.split("|")]
    words = [left + right for left, right in merges]
    known = [*map(_mapped_byte, range(256)), *dict.fromkeys(words)]
    room = size - len(known) - len(CONTROL) - len(MARKERS)
    if room < 0:
        raise UsageError(
            f"A vocabulary of {size} tokens has no room for one that spells every text, which has "
            f"{size - room}. Write the model without a tokenizer."
        )
    space = _mapped_byte(ord(" "))
    tokens = known + [space + word(number) for number in range(room)]
    types = [TokenType.NORMAL] * len(tokens)
    types += [TokenType.CONTROL] * len(CONTROL) + [TokenType.USER_DEFINED] * len(MARKERS)
    tokens += [*CONTROL, *MARKERS]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": FALLBACK_TEMPLATES["chatml"],
    }


def word(number: int) -> str:
    """A word of two syllables or more; no two numbers have the same."""
    base = len(SYLLABLES)
    left, text = number + base, ""
    while left:
        left, syllable = divmod(left, base)
        text = SYLLABLES[syllable] + text
    return text


def _pair(text: str) -> tuple[str, str]:
    left, _, right = text.rpartition(" ") if text.startswith("  ") else text.partition(" ")
    return _mapped(left), _mapped(right)


def _mapped(text: str) -> str:
    return "".join(map(_mapped_byte, text.encode()))


def _mapped_byte(byte: int) -> str:
    return BYTE_CHARACTERS[byte]
