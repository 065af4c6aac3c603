"""Whether a prompt goes on where an earlier answer ended."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

REMEMBERED = 1024


class AnsweredTexts:
    """The newest texts that were answered to their end, by hash. Engine thread only; a few bytes each."""

    def __init__(self, most: int = REMEMBERED) -> None:
        self.most = most
        self._lengths: OrderedDict[bytes, int] = OrderedDict()

    def add(self, keys: Sequence[int], prompt: int) -> None:
        """A prompt of `prompt` keys and its answer, as far as they have state. Prompts alone are no turns."""
        if len(keys) <= prompt:
            return
        digest = blake2b(_packed(keys), digest_size=16).digest()
        self._lengths[digest] = len(keys)
        self._lengths.move_to_end(digest)
        if len(self._lengths) > self.most:
            self._lengths.popitem(last=False)

    def within(self, keys: Sequence[int], length: int) -> bool:
        """Whether the first `length` keys begin with such a text, all of it."""
        running, done = blake2b(digest_size=16), 0
        for end in sorted({end for end in self._lengths.values() if end <= length}):
            running.update(_packed(keys[done:end]))
            done = end
            if self._lengths.get(running.digest()) == end:
                return True
        return False


def _packed(keys: Sequence[int]) -> bytes:
    """Keys may be content hashes wider than 63 bits; `hash` is the number itself where it is smaller."""
    return array("q", map(hash, keys)).tobytes()
