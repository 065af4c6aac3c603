"""Engine-side ops for a step that is queued before the picks of the one in front are known.

The host writes `AHEAD` for a token it does not know yet; the device knows it, and also whether it ended its
text: then the row stands for nothing, and nothing of it is committed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from luce_core.ops.marks import EMITTED

AHEAD = -1
"""As a token: what the step in front picks for this slot. As a pick: of a row behind the end of its text."""
MOST_ENDS = 32
"""Ending ids of a slot; a text with more is never run ahead."""


class NewestTokens:
    """(dev) Of every slot: the newest token, and the ids that would end the text."""

    def __init__(self, num_slots: int, device: str) -> None:
        self.token = torch.full((num_slots,), AHEAD, dtype=torch.int32, device=device)
        """i32[slots]; AHEAD where the text has ended."""
        self.ends = torch.full((num_slots, MOST_ENDS), AHEAD, dtype=torch.int32, device=device)
        """i32[slots, MOST_ENDS], AHEAD where there are fewer."""
        self._known = [False] * num_slots

    def take(self, slot: int, ending: Iterable[int]) -> None:
        """A new text in `slot`."""
        ids = sorted(ending)
        self._known[slot] = len(ids) <= MOST_ENDS
        if self._known[slot]:
            filled = ids + [AHEAD] * (MOST_ENDS - len(ids))
            self.ends[slot] = torch.tensor(filled, dtype=torch.int32, device=self.ends.device)

    def tells_ends(self, slot: int) -> bool:
        """(host) Whether all ids that end the text of `slot` are known there."""
        return self._known[slot]


def newest_tokens(ops: Any, token: Tensor, slot: Tensor, newest: NewestTokens) -> tuple[Tensor, Tensor]:
    """token, slot i32[S], one row per sequence -> (token i32[S] with those filled in that are AHEAD, count
    i32[S]: rows to commit, 0 where the text has ended).
    """
    known = torch.where(token >= 0, token, newest.token[slot.long()])
    return known.clamp(min=0), (known >= 0).to(torch.int32)


def note_picks(
    ops: Any, picks: Tensor, count: Tensor, slot: Tensor, newest: NewestTokens, marks: Tensor | None = None
) -> Tensor:
    """picks i64[S], count i32[S] of `newest_tokens` -> picks i64[S], AHEAD where the text had ended.
    Remembers them, and counts them in `marks` (see `luce_core.ops.marks`), each once: slots differ.
    """
    where = slot.long()
    picks = torch.where(count > 0, picks, AHEAD)
    ended = (newest.ends[where] == picks[:, None]).any(-1)
    newest.token[where] = torch.where(ended, AHEAD, picks).to(torch.int32)
    if marks is not None:
        marks[where, picks.clamp(min=0)] += EMITTED * (picks >= 0).to(torch.int32)
    return picks
