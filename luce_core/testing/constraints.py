"""A constraint small enough to be read: a finite automaton over token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen


@frozen
class Automaton:
    """A `ConstraintSpec`: states are numbers, and a text begins in 0."""

    moves: Mapping[int, Mapping[int, int]]
    """State -> token -> next state."""
    accepting: frozenset[int]
    """States in which the text may end. One without moves is the end where no id ends the text."""

    def start(self, vocab: int, ending: frozenset[int]) -> Walk:
        """A text at its beginning."""
        return Walk(self, vocab, ending)


class Walk:
    """One text's `Constraint`."""

    def __init__(self, automaton: Automaton, vocab: int, ending: frozenset[int]) -> None:
        self._of = automaton
        self._vocab = vocab
        self._ending = ending
        self.state: int | None = 0
        """None: the text has ended."""

    @property
    def is_finished(self) -> bool:
        return self.state in self._of.accepting and not self._allowed(self.state)

    def mask(self, path: Sequence[int], out: Any) -> None:
        """As the contract says; KeyError where the path is not allowed."""
        state = self.state
        for token in path:
            state = self._of.moves[state][token]  # type: ignore[index]
        for token in self._allowed(state):
            out[token // 32] |= 1 << token % 32

    def advance(self, token: int) -> bool:
        if token not in self._allowed(self.state):
            return False
        self.state = None if token in self._ending else self._of.moves[self.state][token]  # type: ignore[index]
        return True

    def _allowed(self, state: int | None) -> frozenset[int]:
        if state is None:
            return frozenset()
        ends = self._ending if state in self._of.accepting else frozenset()
        tokens = frozenset(self._of.moves.get(state, {})) | ends
        return frozenset(token for token in tokens if token < self._vocab)
