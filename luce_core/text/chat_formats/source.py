"""Text that comes in pieces, read by generators: each `yield` waits for more.

A generator reads as if the whole text were there. It waits wherever more text could change its decision, so
what it decides depends on the text and never on how the text was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A read that may wait."""

SPACE = " \t\r\n"


class Source:
    """The text ahead, and on request what was read since a mark, so that a reader can go back there."""

    __slots__ = ("_at", "_kept", "_text", "final")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._kept: list[str] | None = None
        self.final = False
        """Nothing more comes: whoever waits decides with what is there."""

    def push(self, text: str) -> None:
        """More text. Not called while a generator runs."""
        self._text = self._text[self._at :] + text
        self._at = 0

    @property
    def ended(self) -> bool:
        """Everything is read and nothing more comes."""
        return self.final and self._at == len(self._text)

    # --- going back

    def mark(self, seen: str = "") -> None:
        """Keep what is read from here on, behind `seen`, which was read just before."""
        self._kept = [seen]

    def kept(self) -> str:
        """What was read since the mark, which is taken away."""
        text = "".join(self._kept or ())
        self._kept = None
        return text

    def rewind(self) -> None:
        """Unread everything since the mark, which is taken away."""
        self._text = self.kept() + self._text[self._at :]
        self._at = 0

    # --- reading

    def see(self, count: int) -> Reading[str]:
        """The next `count` characters, fewer at the end; they stay unread."""
        while len(self._text) - self._at < count and not self.final:
            yield
        return self._text[self._at : self._at + count]

    def take(self, count: int) -> str:
        """Read characters that were seen."""
        text = self._text[self._at : self._at + count]
        self._at += len(text)
        if self._kept is not None and text:
            self._kept.append(text)
        return text

    def starts(self, *literals: str) -> Reading[str]:
        """Read the longest of `literals` that comes next, and return it; "" if none does."""
        while True:
            text, at = self._text, self._at
            ahead = len(text) - at
            if not self.final and any(len(one) > ahead and one.startswith(text[at:]) for one in literals):
                yield
                continue
            found = max((one for one in literals if text.startswith(one, at)), key=len, default="")
            return self.take(len(found))

    def skip(self, characters: str = SPACE, limit: int | None = None) -> Reading[str]:
        """Read and return what comes next of these characters."""
        parts: list[str] = []
        left = limit
        while left is None or left > 0:
            text, at = self._text, self._at
            end = len(text) if left is None else min(len(text), at + left)
            stop = at
            while stop < end and text[stop] in characters:
                stop += 1
            parts.append(self.take(stop - at))
            left = None if left is None else left - (stop - at)
            if stop < len(text) or self.final:
                break
            yield
        return "".join(parts)

    def until(self, literals: tuple[str, ...], emit: Callable[[str], None]) -> Reading[str]:
        """Read up to and including the literal that is complete first; of those, the longest.

        What comes before goes to `emit` as soon as it is certain. Returns the literal; "" at the end.
        """
        while True:
            text, at = self._text, self._at
            found = [(start + len(one), start, one) for one in literals if (start := text.find(one, at)) >= 0]
            if found:
                _, start, literal = min(found)
                if start > at:
                    emit(self.take(start - at))
                return self.take(len(literal))
            held = 0 if self.final else max((_open(text, at, one) for one in literals), default=0)
            if len(text) - held > at:
                emit(self.take(len(text) - held - at))
            if self.final:
                return ""
            yield


def _open(text: str, at: int, literal: str) -> int:
    """Length of the longest end of `text[at:]` that begins, but is not all of, `literal`."""
    start = max(at, len(text) - len(literal) + 1)
    first = literal[0]
    while (start := text.find(first, start)) >= 0:
        if literal.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
