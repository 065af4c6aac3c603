"""The merging half of a tokenizer: its `tokenizers` model, and the bytes each token stands for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

from luce_core.text.pretokenizers import GEMMA4, PRE_TOKENIZERS, SENTENCEPIECE, PreTokenizer
from luce_core.text.vocabulary import SPACE_MARK, TokenType, Vocabulary, wrong_key

# The engine of the splitting patterns gives up, and takes the thread with it, after ten million steps in one
# match; a run of blanks or capitals needs a few for each of its characters.
MAX_SPLIT_CHARS = 500_000
_LINE_START = re.compile(r"(?<=\S)\n(?=[^\W\d_])")

MODELS = ("gpt2", "llama", "gemma4")

def _byte_characters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte: itself if Latin-1 prints it, else the next code above 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    mapping = {byte: chr(byte) for byte in printable}
    hidden = [byte for byte in range(256) if byte not in mapping]
    mapping.update((byte, chr(0x100 + place)) for place, byte in enumerate(hidden))
    return mapping


BYTE_CHARACTERS = _byte_characters()
_CHARACTER_BYTES = {character: byte for byte, character in BYTE_CHARACTERS.items()}
_UTF8_BYTES = (*range(0xC0), *range(0xC2, 0xF5))  # the bytes that occur in valid UTF-8
# Control characters, and what only unassigned characters begin with: many a training text had none of them.
RARE_BYTES = frozenset({*range(0x20), 0x7F, 0xF1, 0xF2}) - {*b"\t\n\r"}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def mapped_bytes(text: str) -> bytes:
    try:
        return bytes([_CHARACTER_BYTES[character] for character in text])
    except KeyError:  # an added token the file calls normal: it is spelled as it is
        return text.encode("utf-8", errors="replace")


def marked_bytes(text: str, kind: int) -> bytes:
    if kind == TokenType.BYTE and (match := _BYTE_TOKEN.fullmatch(text)):
        return bytes([int(match.group(1), 16)])
    return text.replace(SPACE_MARK, " ").encode("utf-8", errors="replace")


def choose_pre_tokenizer(vocabulary: Vocabulary) -> tuple[PreTokenizer, str | None]:
    if vocabulary.model == "llama":
        return SENTENCEPIECE, None
    if vocabulary.model == "gemma4":
        return GEMMA4, None
    if vocabulary.model != "gpt2":
        raise wrong_key("model", f"got {vocabulary.model!r}", f"one of {', '.join(MODELS)}")
    if not vocabulary.pre:
        return PRE_TOKENIZERS["default"], (
            "The file does not name its pre-tokenizer (key 'tokenizer.ggml.pre'); using 'default', which may "
            "split words differently from the training. Convert the model again with a current converter."
        )
    try:
        return PRE_TOKENIZERS[vocabulary.pre], None
    except KeyError:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise wrong_key("pre", f"got {vocabulary.pre!r}", f"one of {known}") from None


def adds_bos(vocabulary: Vocabulary, pre: PreTokenizer) -> bool:
    if vocabulary.model == "gemma4":  # published files say false by mistake; no training text lacked it
        return True
    return pre.add_bos if vocabulary.add_bos is None else vocabulary.add_bos


def build_merger(
    vocabulary: Vocabulary, pre: PreTokenizer, structural: frozenset[int]
) -> tokenizers.Tokenizer:
    """The `tokenizers` model of everything but structural tokens, which no merge may produce."""
    marked = vocabulary.model != "gpt2"
    ids = {text: token for token, text in enumerate(vocabulary.tokens) if text and token not in structural}
    unknown = vocabulary.unknown if marked else None
    if unknown is not None:
        ids[vocabulary.tokens[unknown]] = unknown
    if vocabulary.model == "llama":
        merges = _merges_from_scores(vocabulary, ids)
    else:
        merges = _split_merges(vocabulary, ids)
    merger = tokenizers.Tokenizer(
        models.BPE(
            vocab=ids,
            merges=merges,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=marked,
            byte_fallback=marked,
            ignore_merges=pre.whole_words,
        )
    )
    steps: list[Any] = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated") for pattern in pre.patterns
    ]
    if not marked:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    if steps:
        merger.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return merger


def missing_bytes(vocabulary: Vocabulary, structural: frozenset[int]) -> bytes:
    """Bytes of UTF-8 the vocabulary cannot spell; merging would drop them without a word."""
    texts = {text for token, text in enumerate(vocabulary.tokens) if token not in structural}
    if vocabulary.model == "gpt2":
        missing = bytes(byte for byte in _UTF8_BYTES if BYTE_CHARACTERS[byte] not in texts)
    elif vocabulary.unknown is None:
        missing = bytes(byte for byte in _UTF8_BYTES if f"<0x{byte:02X}>" not in texts)
    else:
        return b""
    if set(missing) & {*"?\ufffd".encode()}:
        got = f"got no token for {len(missing)} of the bytes text is made of (first 0x{missing[0]:02X})"
        raise wrong_key("tokens", got, "one for each")
    return missing


def without_bytes(text: str, missing: bytes) -> str:
    data, lacking = text.encode("utf-8"), frozenset(missing)
    if len(data.translate(None, missing)) == len(data):
        return text
    return "".join("\ufffd" if lacking.intersection(char.encode("utf-8")) else char for char in text)


def _split_merges(vocabulary: Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    if not vocabulary.merges:
        raise wrong_key("merges", "got none", f"the merges of a '{vocabulary.model}' tokenizer")
    known = {text for text in vocabulary.tokens if text}
    merges = []
    for index, merge in enumerate(vocabulary.merges):
        cut = merge.find(" ", 1)  # a part may itself begin with a space, never end with one
        left, right = merge[:cut], merge[cut + 1 :]
        if left in ids and right in ids and left + right in ids:
            merges.append((left, right))
            continue
        if cut < 0 or not {left, right, left + right} <= known:
            wanted = "two tokens of the vocabulary whose union is a third"
            raise wrong_key("merges", f"got {merge!r} at index {index}", wanted)
    return merges


def _merges_from_scores(vocabulary: Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """SentencePiece merges the adjacent pair whose union has the best score: as ranked merges, best first."""
    if not vocabulary.scores:
        raise wrong_key("scores", "got none", "one score per token of a 'llama' tokenizer")
    mergeable = {TokenType.NORMAL, TokenType.USER_DEFINED}
    parts = {text for text, token in ids.items() if vocabulary.types[token] in mergeable}
    ranked: list[tuple[float, int, int, str, str]] = []
    for text in parts:
        token = ids[text]
        score = -vocabulary.scores[token]
        for cut in range(1, len(text)):
            if (left := text[:cut]) in parts and (right := text[cut:]) in parts:
                ranked.append((score, token, cut, left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def cut_at_lines(text: str, limit: int) -> Iterator[str]:
    """Stretches of at most `limit` characters, cut where every splitter cuts: a line end before a letter.

    Only text without such a place is cut anywhere, so only there can words differ from those of the whole.
    """
    start = 0
    while len(text) - start > limit:
        stop = start + limit
        for match in _LINE_START.finditer(text, start, stop):
            stop = match.end()
        yield text[start:stop]
        start = stop
    yield text[start:]
