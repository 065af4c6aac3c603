"""Constraints of texts: the masks of a step's rows, and whether what was picked is what they allow.

A row of a tree is masked as a function of its path, so candidates change no text here either. What a mask
does not allow is no candidate; nor is what ends the text, or leads nowhere: nothing could be picked behind
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from luce_core.contracts import Constraint
from luce_core.engine.rows import Masks
from luce_core.engine.sequence import Sequence as Request
from luce_core.errors import EngineError
from luce_core.ops.newest import AHEAD
from luce_core.ops.sampling import MASK_BITS
from luce_core.speculation.tree import Candidates, keep

Fail = Callable[[list[Request], Exception], None]


def narrow(
    held: Sequence[Request], trees: Sequence[Candidates], vocab: int, fail: Fail
) -> tuple[list[Request], list[Candidates], Masks]:
    """What of a step is left once constraints were asked: sequences, their trees, the masks of their rows.

    fail: called with a sequence that can not go on, and why; it is not among what is left.
    """
    left: list[tuple[Request, Candidates, np.ndarray | None]] = []
    for seq, tree in zip(held, trees, strict=True):
        if seq.constraint is None:
            left.append((seq, tree, None))
            continue
        try:
            left.append((seq, *narrow_tree(seq.constraint, tree, vocab, seq.ending)))
        except Exception as error:  # noqa: BLE001 - the request boundary of the engine
            fail([seq], error)
    return [seq for seq, _, _ in left], [tree for _, tree, _ in left], [mask for _, _, mask in left]


def narrow_tree(
    constraint: Constraint, tree: Candidates, vocab: int, ending: frozenset[int]
) -> tuple[Candidates, np.ndarray]:
    """The tree as far as it is allowed, and u32[1 + its nodes, words]. Raises EngineError where nothing may
    come.
    """
    ask = _Asked(constraint, vocab)
    root = ask(())
    if root is None:
        raise EngineError(
            "The constraint of this request allows no token here, and does not say that the text is "
            "finished. Widen it: its text cannot be continued."
        )
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    masks = {-1: root}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if token in ending or parent not in masks or not _has(masks[parent], token):
            continue
        path = (*paths[parent], token)
        mask = ask(path)
        if mask is not None:
            paths[node], masks[node] = path, mask
    return keep(tree, [node for node in masks if node >= 0]), np.stack(list(masks.values()))


class _Asked:
    """A constraint, asked for masks."""

    def __init__(self, constraint: Constraint, vocab: int) -> None:
        self._constraint = constraint
        self._words = -(-vocab // MASK_BITS)
        self._last = np.uint32((1 << (vocab - 1) % MASK_BITS + 1) - 1)

    def __call__(self, path: Sequence[int]) -> np.ndarray | None:
        """u32[words], nothing set beyond the vocabulary; None where nothing is set at all."""
        out = np.zeros(self._words, np.uint32)
        self._constraint.mask(path, out)
        out[-1] &= self._last
        return out if out.any() else None


def _has(mask: np.ndarray, token: int) -> bool:
    return bool(mask[token // MASK_BITS] >> np.uint32(token % MASK_BITS) & np.uint32(1))


def check_picked(seq: Request, picked: Sequence[int]) -> None:
    """Tell the constraint what was picked. Raises EngineError where that cannot be text."""
    if AHEAD in picked:
        raise EngineError("The device ended a text that goes on; this is a bug.")
    if seq.constraint is None:
        return
    for token in picked:
        if not seq.constraint.advance(token):
            raise EngineError(
                f"Token {token} came where the constraint of this request does not allow it: what it allows "
                "there is forbidden by logit_bias or min_tokens. Change those."
            )
