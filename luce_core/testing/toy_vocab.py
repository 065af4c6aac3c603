"""Vocabularies small enough for models of a few thousand weights, complete enough for every text."""

from __future__ import annotations

from typing import Any, Literal

from luce_core.text.fallback import FALLBACK_TEMPLATES
from luce_core.text.merging import BYTE_CHARACTERS
from luce_core.text.vocabulary import SPACE_MARK, TokenType

# Pairs in the order they merge; each part is a byte or the union of an earlier pair.
_MERGES = (
    ("h", "e"), ("t", "he"), ("i", "n"), ("a", "n"), ("e", "r"), ("o", "u"), ("l", "l"), ("o", "r"),
    ("r", "e"), (" ", "a"), (" ", "the"), ("in", "g"), ("an", "d"), (" ", "and"), ("y", "ou"), (" ", "you"),
    ("he", "ll"), ("hell", "o"), ("w", "or"), ("l", "d"), ("wor", "ld"), (" ", "world"), (" ", " "),
    ("\n", "\n"),
)  # fmt: skip
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def toy_vocabulary(kind: Literal["bpe", "spm"] = "bpe") -> dict[str, Any]:
    """GGUF metadata (`tokenizer.*` keys) of a vocabulary of about 300 tokens.

    kind: `bpe`, byte-level pairs as in Qwen (no beginning token; `<|im_end|>` ends a turn), or `spm`, scored
    SentencePiece with byte fallback as in Llama 2 (`<s>` is added, words carry their leading space).
    Both spell every text, know ChatML's turn markers, thinking and tool-call tags, and bring a template for
    them, so `Tokenizer.from_metadata`, `ChatTemplate.from_metadata` and a `GGUFWriter` take them as they are.
    Ids are stable; in `bpe` the id of a byte is the byte.
    """
    return _bpe() if kind == "bpe" else _spm()


def _bpe() -> dict[str, Any]:
    def mapped(text: str) -> str:
        return "".join(BYTE_CHARACTERS[byte] for byte in text.encode())

    bytes_ = [BYTE_CHARACTERS[byte] for byte in range(256)]
    merges = [(mapped(left), mapped(right)) for left, right in _MERGES]
    words = [left + right for left, right in merges]
    tokens = [*bytes_, *words, *_CONTROL, *_MARKERS]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        **_common(tokens, (len(bytes_) + len(words)) * [TokenType.NORMAL]),
        "tokenizer.ggml.add_bos_token": False,
    }


def _spm() -> dict[str, Any]:
    head = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = [SPACE_MARK, *map(chr, range(0x21, 0x7F))]
    words = [(left + right).replace(" ", SPACE_MARK) for left, right in _MERGES if "\n" not in left]
    tokens = [*head, *bytes_, *words, *letters, *_CONTROL, *_MARKERS]
    normal = len(words) + len(letters)
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": [0.0] * (3 + 256) + [-float(rank) for rank in range(normal)] + [0.0] * 9,
        **_common(tokens, [*types, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * normal]),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": True,
    }


def _common(tokens: list[str], types: list[TokenType]) -> dict[str, Any]:
    types = [*types, *[TokenType.CONTROL] * len(_CONTROL), *[TokenType.USER_DEFINED] * len(_MARKERS)]
    return {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.chat_template": FALLBACK_TEMPLATES["chatml"],
    }
