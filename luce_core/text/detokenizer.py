"""Ids to text while they arrive, and stop strings while the text arrives: any split of the stream gives the same text."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence

from luce_core.errors import RequestError
from luce_core.text.tokenizer import Tokenizer

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns ids into text, holding back bytes until they make a whole character.

    special: show special tokens as text.  visible: special tokens to show although `special` is false, e.g. those that
    open a tool call.  start_of_text: the ids begin a text rather than continue a prompt, so the leading space that
    SentencePiece vocabularies add is dropped; with it the output equals `Tokenizer.decode`.
    """

    __slots__ = ("_decoder", "_drop_space", "_hidden", "_pieces", "_space_after", "_start_of_text", "_tokenizer")

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


class StopMatcher:
    """Finds the stop string that is complete first, holding back text that may still become one.

    Of stops that end at the same character the longest wins. After a match `push` returns nothing more.
    """

    __slots__ = ("_held", "_stops", "stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise RequestError(f"Parameter 'stop' holds {stop!r}; wanted non-empty strings.", param="stop")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """Take text, return what is certain to precede any stop; sets `stopped` when one is complete."""
        if not self._stops:
            return text
        if self.stopped is not None:
            return ""
        text = self._held + text
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            _, start, self.stopped = min(matches)
            self._held = ""
            return text[:start]
        keep = max(_open_prefix(text, stop) for stop in self._stops)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """End of the stream: the text still held back, which turned out to be no stop."""
        text, self._held = self._held, ""
        return text


def _open_prefix(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning, but not all, of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
