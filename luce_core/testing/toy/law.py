"""The toy's law in plain Python: the oracle."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

MASK = 0xFFFFFFFF
FOLD = 0x01000193
FOLD_START = 0x1234567
TAIL = (1.0, 17.0, 289.0)
"""Weights of the newest three tokens, oldest first; sums stay below 2^24 for vocabularies below 50,000."""


def mix(x: int) -> int:
    """A bijection of 32-bit values."""
    x &= MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


@frozen
class ToyLaw:
    """What a toy file answers."""

    vocab: int
    salt: int = 1
    slots: bool = True
    window: int = 0

    def row_hash(self, tokens: Sequence[int]) -> int:
        """The 32-bit hash of a text whose last token is the row's own."""
        first = max(0, len(tokens) - self.window) if self.window else 0
        own = sum(mix(token * 0x10001 + index * 7919) for index, token in enumerate(tokens) if index >= first)
        own &= MASK
        if self.slots:
            rolled = FOLD_START
            for token in tokens:
                rolled = ((rolled ^ (token + 1)) * FOLD) & MASK
            newest = [0, 0, *(token + 1 if token else 0 for token in tokens)][-3:]
            own ^= mix(rolled)
            own ^= mix(int(sum(weight * value for weight, value in zip(TAIL, newest, strict=True))) + 0x5EED)
        return mix(own ^ mix(self.salt))

    def logits(self, tokens: Sequence[int]) -> list[float]:
        """Logits after `tokens`: multiples of 2^-16 in [0, 16), exact in float32."""
        own = self.row_hash(tokens)
        return [(mix(own ^ mix(token)) >> 12) * 2.0**-16 for token in range(self.vocab)]

    def greedy(self, prompt: Sequence[int], count: int, eog: frozenset[int] = frozenset()) -> list[int]:
        """`count` greedy tokens after `prompt`, or fewer when one of `eog` comes (it is included)."""
        tokens = list(prompt)
        for _ in range(count):
            logits = self.logits(tokens)
            tokens.append(max(range(self.vocab), key=lambda token: (logits[token], -token)))
            if tokens[-1] in eog:
                break
        return tokens[len(prompt) :]
