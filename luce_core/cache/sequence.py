"""One running sequence as the block manager keeps it."""

from __future__ import annotations

from collections.abc import Mapping

from luce_core.cache.index import Node
from luce_core.contracts import SeqTable

NO_LIMIT = 1 << 40
"""Blocks a sequence may have where the state has no pages at all."""


class GroupTable:
    """The blocks of one sequence in one group: token blocks start, start + 1, ..."""

    __slots__ = ("blocks", "start")

    def __init__(self, start: int, blocks: list[int]) -> None:
        self.start = start
        self.blocks = blocks

    @property
    def end(self) -> int:
        return self.start + len(self.blocks)


class SeqState:
    """Mutable, one per open sequence."""

    __slots__ = ("capacity", "length", "nodes", "shared", "slot", "tables", "tail", "usable", "view")

    def __init__(self, slot: int, tables: list[GroupTable], nodes: list[Node]) -> None:
        self.slot = slot
        self.tables = tables
        self.nodes = nodes
        """The full blocks of the text so far."""
        self.tail: list[int] = []
        """Keys behind the last full block."""
        self.length = 0
        self.shared = False
        """The partly filled blocks may be others' too: copy before writing."""
        self.capacity = 0
        """Tokens there is private room for."""
        self.usable: dict[str, int] = {}
        self.view: Mapping[str, SeqTable] | None = None

    def set_capacity(self, block_tokens: int) -> None:
        """After tables changed."""
        end = min((table.end for table in self.tables), default=NO_LIMIT)
        room = self.length if self.shared else end * block_tokens
        self.capacity = max(self.length, room)
        self.view = None
