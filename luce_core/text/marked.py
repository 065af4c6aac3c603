"""Text that remembers which of its characters come from the chat template and which from anybody else."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

from luce_core.contracts import Segment

Span = tuple[int, int]  # start, end of a trusted stretch
_SPAN_BYTES = 120  # a tuple of two numbers


class MarkedText(str):
    """A `str` with trusted stretches; an operation not listed here answers a plain `str`, which is untrusted.

    Trust begins in one place, the literals of a template (`trusted`), and only survives operations that
    move whole characters around. So an operation nobody thought of can make a prompt weaker, never a user
    stronger.
    """

    __slots__ = ("_spans",)
    _spans: tuple[Span, ...]

    def __new__(cls, text: str = "") -> MarkedText:
        """Untrusted text, whatever `text` is: nothing a template can call makes trust."""
        self = super().__new__(cls, str.__str__(text) if isinstance(text, str) else text)
        self._spans = ()
        return self

    @classmethod
    def _with(cls, text: str, spans: Sequence[Span]) -> MarkedText:
        self = str.__new__(cls, text)
        self._spans = tuple(spans)
        return self

    @classmethod
    def _trusted(cls, text: str) -> MarkedText:
        return cls._with(text, ((0, len(text)),) if text else ())

    # Printing must not lose the marks; str() of a str subclass answers whatever __str__ answers.
    def __str__(self) -> str:
        return self

    def __add__(self, other: Any) -> MarkedText:
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> MarkedText:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> MarkedText:
        text, length = super().__mul__(count), len(self)
        if is_trusted(self):
            return MarkedText._trusted(text)
        starts = range(0, len(text), length) if self._spans else ()
        return MarkedText._with(text, [(at + start, at + end) for at in starts for start, end in self._spans])

    __rmul__ = __mul__

    def __getitem__(self, key: Any) -> str:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            return self._cut(start, max(start, stop)) if step == 1 else super().__getitem__(key)
        at = operator.index(key)
        char = super().__getitem__(at)
        at %= len(self)
        return MarkedText._with(char, _clipped(self._spans, at, at + 1))

    def _cut(self, start: int, stop: int) -> MarkedText:
        return MarkedText._with(super().__getitem__(slice(start, stop)), _clipped(self._spans, start, stop))

    def strip(self, chars: str | None = None) -> str:
        start = len(self) - len(super().lstrip(chars))
        return self._cut(start, max(start, len(super().rstrip(chars))))

    def lstrip(self, chars: str | None = None) -> str:
        return self._cut(len(self) - len(super().lstrip(chars)), len(self))

    def rstrip(self, chars: str | None = None) -> str:
        return self._cut(0, len(super().rstrip(chars)))

    def removeprefix(self, prefix: str) -> str:
        return self._cut(len(prefix), len(self)) if self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> str:
        return self._cut(0, len(self) - len(suffix)) if suffix and self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._located(super().splitlines(keepends), None)

    def partition(self, sep: str) -> tuple[str, str, str]:
        head, middle, tail = super().partition(sep)
        at = len(head) + len(middle)
        return self._cut(0, len(head)), self._cut(len(head), at), self._cut(at, at + len(tail))

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        head, middle, _ = super().rpartition(sep)
        at = len(head) + len(middle)
        return self._cut(0, len(head)), self._cut(len(head), at), self._cut(at, len(self))

    def _located(self, parts: list[str], sep: str | None) -> list[str]:
        """Give parts that follow each other in this text their marks back.

        Without `sep` what lies between parts is blanks or line ends, with which no part begins unless it sits
        right there, so looking forward finds the part itself and never a copy of it.
        """
        found: list[str] = []
        at = 0
        for part in parts:
            if sep is None:
                at = self.index(part, at)
            found.append(self._cut(at, at + len(part)))
            at += len(part) + len(sep or "")
        return found

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        if not old:  # between every two characters: nobody needs marks there
            return super().replace(old, new, count)
        text = super().replace(old, new, count)
        inner = new._spans if isinstance(new, MarkedText) else ()
        if not self._spans and not inner:
            return MarkedText._with(text, ())
        spans: list[Span] = []
        moved = at = 0  # how far what follows has moved; the end of the last place
        left = operator.index(count)
        while left != 0 and (found := self.find(old, at)) >= 0:
            _append(spans, _clipped(self._spans, at, found), at + moved)
            _append(spans, inner, found + moved)
            at = found + len(old)
            moved += len(new) - len(old)
            left -= 1
        _append(spans, _clipped(self._spans, at, len(self)), at + moved)
        return MarkedText._with(text, spans)

    def join(self, parts: Iterable[str]) -> str:
        between: list[str] = []
        for part in parts:
            if not isinstance(part, str):
                raise TypeError(f"expected str instances to join, found {type(part).__name__}")
            between += (part, self)
        return joined(between[:-1])


def joined(pieces: Iterable[str]) -> MarkedText:
    """The pieces one after the other, each keeping its marks."""
    texts: list[str] = []
    spans: list[Span] = []
    at = 0
    for piece in pieces:
        if isinstance(piece, MarkedText):
            _append(spans, piece._spans, at)
        texts.append(piece)
        at += len(piece)
    return MarkedText._with("".join(texts), spans)


def _append(spans: list[Span], more: Iterable[Span], offset: int) -> None:
    for start, end in more:
        if spans and spans[-1][1] == offset + start:
            spans[-1] = (spans[-1][0], offset + end)
        else:
            spans.append((offset + start, offset + end))


def trusted(text: str) -> MarkedText:
    """Text all of whose characters are trusted."""
    return MarkedText._trusted(text)


def is_trusted(text: str) -> bool:
    """Whether every character is trusted."""
    return isinstance(text, MarkedText) and text._spans == (((0, len(text)),) if text else ())


def bulk(text: str) -> int:
    """Bytes of memory at most: of the characters, and of the marks beside them."""
    num_bytes = len(text) if text.isascii() else 4 * len(text)
    return num_bytes + _SPAN_BYTES * len(text._spans) if isinstance(text, MarkedText) else num_bytes


def segments(text: str) -> list[Segment]:
    """The stretches of equal trust."""
    out: list[Segment] = []
    at = 0
    for start, end in text._spans if isinstance(text, MarkedText) else ():
        if start > at:
            out.append(Segment(_plain(text, at, start), trusted=False))
        out.append(Segment(_plain(text, start, end), trusted=True))
        at = end
    if at < len(text):
        out.append(Segment(_plain(text, at, len(text)), trusted=False))
    return out


def _plain(text: str, start: int, end: int) -> str:
    return str.__getitem__(text, slice(start, end))


def _clipped(spans: tuple[Span, ...], start: int, stop: int) -> list[Span]:
    return [
        (max(first, start) - start, min(last, stop) - start)
        for first, last in spans
        if first < stop and last > start
    ]
