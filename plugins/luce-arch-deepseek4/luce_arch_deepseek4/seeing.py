"""Images for DeepSeek. Torch-free.

No encoder of its own is published, only what the network does with rows that come from one. So it borrows
Qwen's: any projector whose rows are as wide as the model's. Experimental.
"""

from __future__ import annotations

from attrs import evolve

from luce_core.contracts import BorrowedEncoder, ModelSpec
from luce_core.gguf import GgufHeader
from luce_core.text.vocabulary import TokenType

FAMILIES = ("clip.qwen3vl_merger",)
PLACEHOLDERS = (
    "<｜image｜>",
    "<｜image▁pad｜>",
    "<image>",
    "<|image|>",
    "<|image_pad|>",
    "<｜place▁holder▁no▁0｜>",
)
"""Tokens for a row of an image, best first. The last one is kept free in DeepSeek's vocabularies."""
LITERAL = (TokenType.CONTROL, TokenType.USER_DEFINED)
TOKENS, TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
CAUTION = (
    "Images for DeepSeek are experimental: no encoder of its own is published, and whether the model "
    "understands the rows of the one given with --mmproj nobody has shown."
)


def seeing(header: GgufHeader, spec: ModelSpec) -> ModelSpec:
    """The model of a file, with what it can do with images."""
    found = _placeholder(header)
    tokens = {**spec.tokens, "image": (header.strings(TOKENS).index(found),)} if found else spec.tokens
    return evolve(spec, tokens=tokens, borrows=BorrowedEncoder(FAMILIES, found, PLACEHOLDERS, CAUTION))


def _placeholder(header: GgufHeader) -> str:
    """The best token that is matched whole; "" where there is none."""
    tokens = header.strings(TOKENS, ())
    types = header.uints(TYPES, ())
    literal = {text for text, kind in zip(tokens, types, strict=False) if kind in LITERAL}
    return next((text for text in PLACEHOLDERS if text in literal), "")
