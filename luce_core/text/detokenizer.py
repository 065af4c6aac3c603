"""Ids to text while they arrive: any split of the stream gives the same text, no character is ever broken."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable

from luce_core.text.tokenizer import Tokenizer

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns ids into text, holding back bytes until they make a whole character.

    special: show special tokens as text.
    visible: special tokens to show although `special` is false, such as those that open a tool call.
    start_of_text: the ids begin a text rather than continue a prompt, so the leading space that SentencePiece
        vocabularies add is dropped; with it the output equals `Tokenizer.decode`.
    """

    __slots__ = (
        "_decoder",
        "_drop_space",
        "_hidden",
        "_pieces",
        "_space_after",
        "_start_of_text",
        "_tokenizer",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        special: bool = False,
        visible: Collection[int] = (),
        start_of_text: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._pieces = tokenizer.pieces
        self._hidden = frozenset() if special else tokenizer.special.difference(visible)
        self._space_after = tokenizer.added if tokenizer.space_prefix else frozenset[int]()
        self._start_of_text = start_of_text and tokenizer.space_prefix
        self._drop_space = self._start_of_text
        self._decoder = _new_decoder(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Take ids, return the text they complete; a character whose bytes are not all there yet waits."""
        pieces, hidden, after = self._pieces, self._hidden, self._space_after
        data = b""
        for token in ids:
            if token < 0 or token >= len(pieces):
                self._tokenizer.token_bytes(token)  # raises, naming the valid range
            piece = pieces[token]
            if self._drop_space:
                if piece[:1] == b" ":
                    piece = piece[1:]
                self._drop_space = False
            if token in after:
                self._drop_space = True
            if token not in hidden:
                data += piece
        return self._decoder.decode(data)

    def flush(self) -> str:
        """End of the stream: U+FFFD for a character that never became whole; ready for a new stream."""
        self._drop_space = self._start_of_text
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        return text
