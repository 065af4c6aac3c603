"""Text to token ids and back, built from the vocabulary a GGUF carries.

Merging is done by the `tokenizers` library; what surrounds it is done here, because trust is decided here:
added tokens are matched before merging, special tokens only in text the caller trusts, and no merge can
ever produce one. Nothing is normalized, so ids decode to the very text they came from; the published Qwen
tokenizers compose Unicode (NFC) first, and give other ids for text that is not composed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs

from luce_core.contracts import Segment
from luce_core.errors import RequestError
from luce_core.text.merging import (
    MAX_SPLIT_CHARS,
    RARE_BYTES,
    adds_bos,
    build_merger,
    choose_pre_tokenizer,
    cut_at_lines,
    mapped_bytes,
    marked_bytes,
    missing_bytes,
    without_bytes,
)
from luce_core.text.vocabulary import SPACE_MARK, Vocabulary

HELD_TEXTS = 256
"""Answers of `tokens_with` kept: requests name a handful of texts again and again."""


class Tokenizer:
    """Encodes and decodes for one vocabulary; immutable and safe to share between threads.

    vocab_size: number of ids.  model, pre: as the file names them.  notice: what a user should know, or None.
    bos, eos: ids or None.  add_bos, add_eos: whether `encode` adds them by default.
    eog: ids that end a generation.
    special: control tokens; hidden from generated text by default.
    markers: user-defined tokens that mark structure (`<think>`, `<tool_call>`); shown, but untrusted text
    cannot
        spell them either.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = attrs.evolve(vocabulary, merges=(), scores=())  # the merger holds them
        pre, self.notice = choose_pre_tokenizer(vocabulary)
        self.model = vocabulary.model
        self.pre = vocabulary.pre
        self.vocab_size = len(vocabulary.tokens)
        self.bos, self.eos, self.eog = vocabulary.bos, vocabulary.eos, vocabulary.eog
        self.special, self.markers = vocabulary.special, vocabulary.markers
        self.add_bos = self.bos is not None and adds_bos(vocabulary, pre)
        self.add_eos = self.eos is not None and vocabulary.add_eos
        self._marked_spaces = vocabulary.model != "gpt2"
        self._space_prefix = vocabulary.model == "llama" and vocabulary.add_space_prefix is not False
        structural = self.special | self.markers
        tokens = vocabulary.tokens
        self._ids = {text: token for token, text in enumerate(tokens)}
        self._literal_ids = {self._literal_text(t): t for t in sorted(vocabulary.literals, reverse=True)}
        self._structural_ids = {tokens[token]: token for token in structural if tokens[token]}
        self._missing = missing_bytes(vocabulary, structural)
        if self.notice is None and (lacking := [byte for byte in self._missing if byte not in RARE_BYTES]):
            self.notice = (
                f"The vocabulary has no token for {len(lacking)} of the bytes text is made of (first "
                f"0x{lacking[0]:02X}); characters that need one are read as U+FFFD."
            )
        self._literal_pattern = _any_of(self._literal_ids)
        self._structural_pattern = _any_of(self._structural_ids)
        self._splits = bool(pre.patterns)
        self._holding: dict[str, frozenset[int]] = {}
        self._merger = build_merger(vocabulary, pre, structural)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from GGUF metadata; `ModelFormatError` names the key that is missing or wrong."""
        return cls(Vocabulary.from_metadata(metadata))

    # --- text to ids ---------------------------------------------------------------------------------------

    def encode(
        self, text: str, *, special: bool = False, add_bos: bool | None = None, add_eos: bool | None = None
    ) -> list[int]:
        """Ids of `text`; None for a flag means the file's own rule.

        special: the text is trusted to spell special tokens; otherwise such text becomes ordinary tokens.
        """
        ids = self._with_bos(self._encode([Segment(text, special)]), add_bos)
        if self.add_eos if add_eos is None else add_eos:
            if self.eos is None:
                raise _lacks("eos", "add_eos")
            ids.append(self.eos)
        return ids

    def encode_segments(self, segments: Sequence[Segment], *, add_bos: bool | None = None) -> list[int]:
        """Ids of the joined text, in which only trusted stretches may spell special tokens.

        Words are cut and merged across segment borders, so harmless text gets the ids `encode` gives it. A
        beginning-of-text token that the first segment spells is not doubled; no end token is added.
        """
        return self._with_bos(self._encode(segments), add_bos)

    def _with_bos(self, ids: list[int], add_bos: bool | None) -> list[int]:
        if not (self.add_bos if add_bos is None else add_bos):
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
            text = without_bytes(text, self._missing)
        if self._marked_spaces:
            text = text.replace(" ", SPACE_MARK)
        ids: list[int] = []
        for stretch in cut_at_lines(text, MAX_SPLIT_CHARS) if self._splits else (text,):
            # Only the batched call lets other threads run meanwhile, and a long text takes a while.
            (encoding,) = self._merger.encode_batch_fast([stretch], add_special_tokens=False)
            ids.extend(encoding.ids)
        return ids

    # --- ids to text ---------------------------------------------------------------------------------------

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

    def tokens_with(self, text: str) -> frozenset[int]:
        """Ids of the tokens that hold `text`. The whole vocabulary is looked through once per text."""
        found = self._holding.get(text)
        if found is None:
            wanted = text.encode()
            found = frozenset(token for token, piece in enumerate(self.pieces) if wanted in piece)
            if len(self._holding) < HELD_TEXTS:
                self._holding[text] = found
        return found

    def token_text(self, token: int) -> str:
        """A token alone as text; half characters become U+FFFD."""
        return self.token_bytes(token).decode("utf-8", errors="replace")

    def token_id(self, text: str) -> int | None:
        """The id whose vocabulary entry is exactly `text`, such as "<|im_end|>"; None if there is none."""
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
        tokens, types, added = self._vocabulary.tokens, self._vocabulary.types, self.added
        if self._marked_spaces:
            return tuple(marked_bytes(text, kind) for text, kind in zip(tokens, types, strict=True))
        return tuple(
            text.encode("utf-8", errors="replace") if token in added else mapped_bytes(text)
            for token, text in enumerate(tokens)
        )

    def _literal_text(self, token: int) -> str:
        text = self._vocabulary.tokens[token]
        return text.replace(SPACE_MARK, " ") if self._marked_spaces else text


# --- matching ----------------------------------------------------------------------------------------------


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
    for first, child in node.items():
        if not first:
            continue
        prefix, below = [first], child
        while len(below) == 1 and "" not in below:
            [(character, below)] = below.items()
            prefix.append(character)
        branches.append(re.escape("".join(prefix)) + _trie_pattern(below))
    if not branches:
        return ""
    body = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
    return body + "?" if "" in node else body


def _lacks(name: str, flag: str) -> RequestError:
    return RequestError(
        f"Parameter '{flag}' is set, but the model has no '{name}' token. Leave it out.", param=flag
    )
