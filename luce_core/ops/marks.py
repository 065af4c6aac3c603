"""What the text of a slot has to do with each token: an integer per token, on the device, where steps that
run ahead count what they pick.

Bit 0: it is in the prompt. Bit 1: it would end the text. The rest: how often it was emitted.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

PROMPTED, ENDING, EMITTED = 1, 2, 4
EMITTED_SHIFT = 2


class Marks:
    """(dev) Of every slot. Takes no memory until a slot asks for it, and does not move from then on."""

    def __init__(self, num_slots: int, vocab: int, device: str) -> None:
        self._shape = num_slots, vocab
        self._device = device
        self.table: Tensor | None = None
        """i32[slots, V]; rows of slots that did not ask mean nothing."""

    def take(self, slot: int, prompt: Iterable[int], ending: Iterable[int]) -> None:
        """A new text in `slot`. Ends beyond the vocabulary are never picked."""
        if self.table is None:
            self.table = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        row = self.table[slot].zero_()
        row[self._ids(prompt)] = PROMPTED
        row[self._ids(one for one in ending if 0 <= one < self._shape[1])] |= ENDING

    def count(self, slot: int, tokens: Iterable[int]) -> None:
        """These were emitted, and no step counted them."""
        if self.table is not None:
            ids = self._ids(tokens)
            self.table[slot].index_add_(0, ids, torch.full_like(ids, EMITTED, dtype=torch.int32))

    def _ids(self, tokens: Iterable[int]) -> Tensor:
        return torch.tensor(list(tokens), dtype=torch.int64, device=self._device)


def prompted(marks: Tensor) -> Tensor:
    return (marks & PROMPTED) > 0


def ending(marks: Tensor) -> Tensor:
    return (marks & ENDING) > 0


def emitted(marks: Tensor) -> Tensor:
    """i32."""
    return marks >> EMITTED_SHIFT
