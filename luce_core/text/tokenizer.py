"""Text to token ids and back, built from the vocabulary a GGUF carries.

Merging is done by the `tokenizers` library; what surrounds it is done here, because trust is decided here: added tokens
are matched before merging, special tokens only in text the caller trusts, and no merge can ever produce one.
Nothing is normalized: ids decode to the very text they came from (the published Qwen tokenizers compose Unicode first).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
import tokenizers
from tokenizers import models, pre_tokenizers

from luce_core.errors import ModelFormatError, RequestError
from luce_core.text.pretokenizers import GEMMA4, PRE_TOKENIZERS, SENTENCEPIECE, PreTokenizer
from luce_core.text.vocabulary import SPACE_MARK, TokenType, Vocabulary

MODELS = ("gpt2", "llama", "gemma4")


@attrs.frozen
class Segment:
    """A stretch of prompt text; only a trusted one may spell special tokens."""

    text: str
    trusted: bool


class Tokenizer:
    """Encodes and decodes for one vocabulary; immutable and safe to share between threads.

    vocab_size: number of ids.  model, pre: as the file names them.  notice: what a user should know, or None.
    bos, eos: ids or None.  add_bos, add_eos: whether `encode` adds them by default.
    eog: ids that end a generation.
    special: control tokens; hidden from generated text by default.
    markers: user-defined tokens that mark structure (`<think>`, `<tool_call>`); shown, but untrusted text cannot spell
        them either.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        pre, self.notice = _choose_pre_tokenizer(vocabulary)
        self.model = vocabulary.model
        self.pre = vocabulary.pre
        self.vocab_size = len(vocabulary.tokens)
        self.bos, self.eos, self.eog = vocabulary.bos, vocabulary.eos, vocabulary.eog
        self.special, self.markers = vocabulary.special, vocabulary.markers
        self.add_bos = self.bos is not None and _add_bos(vocabulary, pre)
        self.add_eos = self.eos is not None and vocabulary.add_eos
        self._marked_spaces = vocabulary.model != "gpt2"
        self._space_prefix = vocabulary.model == "llama" and vocabulary.add_space_prefix is not False
        structural = self.special | self.markers
        self._ids = {text: token for token, text in enumerate(vocabulary.tokens)}
        self._literal_ids = {self._literal_text(token): token for token in sorted(vocabulary.literals, reverse=True)}
        self._structural_ids = {vocabulary.tokens[token]: token for token in structural if vocabulary.tokens[token]}
        self._missing = _missing_bytes(vocabulary, structural)
        if self._missing and self.notice is None:
            self.notice = (
                f"The vocabulary has no token for {len(self._missing)} of the bytes text is made of (first "
                f"0x{self._missing[0]:02X}); characters that need one are read as U+FFFD."
            )
        self._literal_pattern = _any_of(self._literal_ids)
        self._structural_pattern = _any_of(self._structural_ids)
        self._merger = _build_merger(vocabulary, pre, structural)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from GGUF metadata; `ModelFormatError` names the key that is missing or wrong."""
        return cls(Vocabulary.from_metadata(metadata))

    # --- text to ids ---------------------------------------------------------------------------------------------

    def encode(
        self, text: str, *, special: bool = False, add_bos: bool | None = None, add_eos: bool | None = None
    ) -> list[int]:
        """Ids of `text`; None for a flag means the file's own rule.

        special: the text is trusted to spell special tokens; otherwise such text becomes ordinary tokens.
        """
        ids = self._with_bos(self._encode([Segment(text, special)]), self.add_bos if add_bos is None else add_bos)
        if self.add_eos if add_eos is None else add_eos:
            if self.eos is None:
                raise _lacks("eos", "add_eos")
            ids.append(self.eos)
        return ids

    def encode_segments(self, segments: Sequence[Segment], *, add_bos: bool | None = None) -> list[int]:
        """Ids of the joined text, in which only trusted stretches may spell special tokens.

        Words are cut and merged across segment borders, so harmless text gets exactly the ids `encode(special=True)`
        gives it. A beginning-of-text token that the first segment spells is not doubled; no end token is added.
        """
        return self._with_bos(self._encode(segments), self.add_bos if add_bos is None else add_bos)

    def _with_bos(self, ids: list[int], add_bos: bool) -> list[int]:
        if not add_bos:
            return ids
        if self.bos is None:
            raise _lacks("bos", "add_bos")
        return ids if ids[:1] == [self.bos] else [self.bos, *ids]

    def _encode(self, segments: Sequence[Segment]) -> list[int]:
        ids: list[int] = []
        after_token = True  # SentencePiece's dummy space goes to the start and behind every added token
        for piece in self._pieces(segments):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids.extend(self._merge(" " + piece if self._space_prefix and after_token else piece))
            after_token = isinstance(piece, int)
        return ids

    def _pieces(self, segments: Sequence[Segment]) -> Iterator[int | str]:
        """Cut at added tokens: an id for each token found, a string for each text in between."""
        plain: list[str] = []
        for text, trusted in _joined_runs(segments):
            start = 0
            if trusted and self._structural_pattern:
                for match in self._structural_pattern.finditer(text):
                    plain.append(text[start : match.start()])
                    yield from self._cut_literals("".join(plain))
                    plain.clear()
                    yield self._structural_ids[match.group()]
                    start = match.end()
            plain.append(text[start:])
        yield from self._cut_literals("".join(plain))

    def _cut_literals(self, text: str) -> Iterator[int | str]:
        start = 0
        if self._literal_pattern:
            for match in self._literal_pattern.finditer(text):
                if match.start() > start:
                    yield text[start : match.start()]
                yield self._literal_ids[match.group()]
                start = match.end()
        if start < len(text):
            yield text[start:]

    def _merge(self, text: str) -> list[int]:
        if self._missing:
            text = _without_bytes(text, self._missing)
        if self._marked_spaces:
            text = text.replace(" ", SPACE_MARK)
        ids: list[int] = self._merger.encode(text, add_special_tokens=False).ids
        return ids

    # --- ids to text ---------------------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], *, special: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD. special: also show special tokens."""
        out: list[bytes] = []
        after_token = True
        for token in ids:
            piece = self.token_bytes(token)
            if self._space_prefix and after_token and piece.startswith(b" "):
                piece = piece[1:]
            after_token = token in self.added
            if special or token not in self.special:
                out.append(piece)
        return b"".join(out).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; special tokens stand for their own text."""
        if not 0 <= token < self.vocab_size:
            raise RequestError(
                f"Token id {token!r} does not exist: this model has ids 0 to {self.vocab_size - 1}.",
                param="token",
            )
        return self.pieces[token]

    def token_text(self, token: int) -> str:
        """A token alone as text; half characters become U+FFFD."""
        return self.token_bytes(token).decode("utf-8", errors="replace")

    def token_id(self, text: str) -> int | None:
        """The id whose vocabulary entry is exactly `text`, as in `token_id("<|im_end|>")`; None if there is none."""
        return self._ids.get(text)

    @property
    def space_prefix(self) -> bool:
        """Whether text is encoded with an extra leading space (SentencePiece)."""
        return self._space_prefix

    @cached_property
    def added(self) -> frozenset[int]:
        """Ids matched as literals before merging: special tokens, markers and literal text."""
        return self.special | self.markers | self._vocabulary.literals

    @cached_property
    def pieces(self) -> tuple[bytes, ...]:
        """The bytes of every token, by id."""
        vocabulary, added = self._vocabulary, self.added
        if self._marked_spaces:
            return tuple(_marked_bytes(text, kind) for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True))
        return tuple(
            text.encode("utf-8", errors="replace") if token in added else _mapped_bytes(text)
            for token, text in enumerate(vocabulary.tokens)
        )

    def _literal_text(self, token: int) -> str:
        text = self._vocabulary.tokens[token]
        return text.replace(SPACE_MARK, " ") if self._marked_spaces else text


# --- building --------------------------------------------------------------------------------------------------------


def _choose_pre_tokenizer(vocabulary: Vocabulary) -> tuple[PreTokenizer, str | None]:
    if vocabulary.model == "llama":
        return SENTENCEPIECE, None
    if vocabulary.model == "gemma4":
        return GEMMA4, None
    if vocabulary.model != "gpt2":
        raise ModelFormatError(
            f"The vocabulary cannot be read: key 'tokenizer.ggml.model': got {vocabulary.model!r}, wanted one of "
            f"{', '.join(MODELS)}. Use a model with one of these tokenizers."
        )
    if not vocabulary.pre:
        return PRE_TOKENIZERS["default"], (
            "The file does not name its pre-tokenizer (key 'tokenizer.ggml.pre'); using 'default', which may split "
            "words differently from the training. Convert the model again with a current converter."
        )
    try:
        return PRE_TOKENIZERS[vocabulary.pre], None
    except KeyError:
        raise ModelFormatError(
            f"The vocabulary cannot be read: key 'tokenizer.ggml.pre': got {vocabulary.pre!r}, wanted one of "
            f"{', '.join(sorted(PRE_TOKENIZERS))}. Use a newer luce-core that knows it."
        ) from None


def _add_bos(vocabulary: Vocabulary, pre: PreTokenizer) -> bool:
    if vocabulary.model == "gemma4":  # published files say false by mistake; the model never saw text without it
        return True
    return pre.add_bos if vocabulary.add_bos is None else vocabulary.add_bos


def _build_merger(vocabulary: Vocabulary, pre: PreTokenizer, structural: frozenset[int]) -> tokenizers.Tokenizer:
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


def _missing_bytes(vocabulary: Vocabulary, structural: frozenset[int]) -> bytes:
    """Bytes of UTF-8 the vocabulary cannot spell; merging would drop them without a word."""
    texts = {text for token, text in enumerate(vocabulary.tokens) if token not in structural}
    if vocabulary.model == "gpt2":
        missing = bytes(byte for byte in _UTF8_BYTES if _BYTE_CHARACTERS[byte] not in texts)
    elif vocabulary.unknown is None:
        missing = bytes(byte for byte in _UTF8_BYTES if f"<0x{byte:02X}>" not in texts)
    else:
        return b""
    if set(missing) & {*"?\ufffd".encode()}:
        raise ModelFormatError(
            f"The vocabulary cannot be read: key 'tokenizer.ggml.tokens': got no token for {len(missing)} of the bytes "
            f"text is made of (first 0x{missing[0]:02X}), wanted one for each. Convert the model again."
        )
    return missing


def _without_bytes(text: str, missing: bytes) -> str:
    data = text.encode("utf-8")
    if len(data.translate(None, missing)) == len(data):
        return text
    return "".join("\ufffd" if set(character.encode("utf-8")) & {*missing} else character for character in text)


def _split_merges(vocabulary: Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    if not vocabulary.merges:
        raise ModelFormatError(
            "The vocabulary cannot be read: key 'tokenizer.ggml.merges': got none, wanted the merges of a "
            f"'{vocabulary.model}' tokenizer. Convert the model again."
        )
    known = {text for text in vocabulary.tokens if text}
    merges = []
    for index, merge in enumerate(vocabulary.merges):
        cut = merge.find(" ", 1)  # a part may itself begin with a space, never end with one
        left, right = merge[:cut], merge[cut + 1 :]
        if left in ids and right in ids and left + right in ids:
            merges.append((left, right))
            continue
        if cut < 0 or not {left, right, left + right} <= known:
            raise ModelFormatError(
                f"The vocabulary cannot be read: key 'tokenizer.ggml.merges': got {merge!r} at index {index}, wanted "
                "two tokens of the vocabulary whose union is a third. Convert the model again."
            )
    return merges


def _merges_from_scores(vocabulary: Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """SentencePiece merges the adjacent pair whose union has the best score: as ranked merges, best first."""
    if not vocabulary.scores:
        raise ModelFormatError(
            "The vocabulary cannot be read: key 'tokenizer.ggml.scores': got none, wanted one score per token of a "
            "'llama' tokenizer. Convert the model again."
        )
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


# --- bytes -----------------------------------------------------------------------------------------------------------


def _byte_characters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte: itself if Latin-1 prints it, else the next free code above 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    mapping = {byte: chr(byte) for byte in printable}
    hidden = [byte for byte in range(256) if byte not in mapping]
    mapping.update((byte, chr(0x100 + place)) for place, byte in enumerate(hidden))
    return mapping


_BYTE_CHARACTERS = _byte_characters()
_CHARACTER_BYTES = {character: byte for byte, character in _BYTE_CHARACTERS.items()}
_UTF8_BYTES = (*range(0xC0), *range(0xC2, 0xF5))  # the bytes that occur in valid UTF-8
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _mapped_bytes(text: str) -> bytes:
    try:
        return bytes([_CHARACTER_BYTES[character] for character in text])
    except KeyError:  # an added token the file calls normal: it is spelled as it is
        return text.encode("utf-8", errors="replace")


def _marked_bytes(text: str, kind: int) -> bytes:
    if kind == TokenType.BYTE and (match := _BYTE_TOKEN.fullmatch(text)):
        return bytes([int(match.group(1), 16)])
    return text.replace(SPACE_MARK, " ").encode("utf-8", errors="replace")


# --- matching --------------------------------------------------------------------------------------------------------


def _joined_runs(segments: Sequence[Segment]) -> Iterator[tuple[str, bool]]:
    """Neighbours of equal trust joined, empty ones dropped."""
    run: list[str] = []
    run_trusted = False
    for segment in segments:
        if not segment.text:
            continue
        if run and segment.trusted != run_trusted:
            yield _scalar("".join(run)), run_trusted
            run.clear()
        run.append(segment.text)
        run_trusted = segment.trusted
    if run:
        yield _scalar("".join(run)), run_trusted


def _scalar(text: str) -> str:
    """JSON can carry half a surrogate pair, UTF-8 cannot: join pairs, replace halves by U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern for the longest of `texts` at the leftmost place, as a trie so that thousands stay fast."""
    root: dict[str, Any] = {}
    for text in texts:
        node = root
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_trie_pattern(root)) if root else None


def _trie_pattern(node: dict[str, Any]) -> str:
    branches = []
    for first, below in node.items():
        if not first:
            continue
        prefix = [first]
        while len(below) == 1 and "" not in below:
            [(character, below)] = below.items()
            prefix.append(character)
        branches.append(re.escape("".join(prefix)) + _trie_pattern(below))
    if not branches:
        return ""
    body = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
    return body + "?" if "" in node else body


def _lacks(name: str, flag: str) -> RequestError:
    return RequestError(f"Parameter '{flag}' is set, but this model's vocabulary has no '{name}' token. Leave it out.")
