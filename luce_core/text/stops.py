"""Stop strings found while the text arrives: any split of the stream gives the same answer."""

from __future__ import annotations

from collections.abc import Sequence

from luce_core.errors import RequestError


class StopMatcher:
    """Finds the stop string that is complete first, holding back text that may still become one.

    Of stops that end at the same character the longest wins. After a match `push` returns nothing more.
    """

    __slots__ = ("_held", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise RequestError(
                    f"Parameter 'stop' holds {stop!r}; wanted non-empty strings.", param="stop"
                )
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take text, return what is certain to precede any stop; sets `matched` when one is complete."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            _, start, self.matched = min(matches)
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
