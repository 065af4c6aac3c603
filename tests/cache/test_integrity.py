"""`check_integrity` notices every single belief that went wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from luce_core.cache.index import Node

from .world import LAYOUTS, World


def busy_world() -> World:
    """Two running sequences that share blocks, cached blocks, a checkpoint, something on the host."""
    w = World(LAYOUTS["everything"], blocks=24, slots=4)
    first = w.start(list(range(10)))
    w.checkpoint(first)
    second = w.open([*range(10), 50])
    w.extend(second, [50, 51, 52])
    third = w.start(list(range(70, 79)))
    w.checkpoint(third)
    assert w.manager.reserve(third, 8)
    w.close(third, in_flight=True)
    w.manager.check_integrity()
    return w


def node(m: Any, used: bool) -> Any:
    return next(e for e in m._index.entries.values() if isinstance(e, Node) and bool(e.users) == used)


def checkpoint(m: Any) -> Any:
    """Of the sequence that was closed."""
    return next(e for e in m._index.entries.values() if not isinstance(e, Node) and e.length == 9)


def state(m: Any) -> Any:
    return m._seqs[0]


def drop_first(items: list[Any]) -> None:
    del items[0]


CORRUPTIONS: dict[str, Callable[[Any], Any]] = {
    "a reference too many": lambda m: m._pools[0].hold(state(m).tables[0].blocks[0]),
    "a reference too few": lambda m: m._pools[0].seq_refs.__setitem__(state(m).tables[0].blocks[0], 0),
    "a cache reference too many": lambda m: m._pools[0].keep(node(m, True).blocks[0][0]),
    "a lost block": lambda m: m._pools[0].free.pop(),
    "a block listed twice": lambda m: m._pools[0].free.append(m._pools[0].free[0]),
    "a used block listed as free": lambda m: m._pools[0].free.append(state(m).tables[0].blocks[0]),
    "a wrong count of used blocks": lambda m: setattr(m._pools[0], "used", 1),
    "a wrong count of cached blocks": lambda m: setattr(m._pools[0], "cached", 9),
    "a fence forgotten": lambda m: setattr(m._pools[0], "retired", 99),
    "a key lost": lambda m: state(m).tail.pop(),
    "a length of its own": lambda m: setattr(state(m), "length", 9),
    "a capacity below the length": lambda m: setattr(state(m), "capacity", 3),
    "a chain with a gap": lambda m: (drop_first(state(m).nodes), state(m).tail.extend([1, 2, 3, 4])),
    "a table that starts late": lambda m: setattr(state(m).tables[0], "start", 1),
    "a table that ends early": lambda m: state(m).tables[0].blocks.pop(),
    "two writers of one block": lambda m: (
        m._pools[0].hold(state(m).tables[0].blocks[2]),
        m._pools[0].drop(m._seqs[1].tables[0].blocks[3]),
        m._seqs[1].tables[0].blocks.__setitem__(3, state(m).tables[0].blocks[2]),
    ),
    "a block used by nobody it knows": lambda m: setattr(node(m, False), "users", 1),
    "a block that forgot its user": lambda m: setattr(node(m, True), "users", 0),
    "a block not found by its hash": lambda m: m._index.by_digest.pop(node(m, True).digest),
    "a hash of another text": lambda m: setattr(node(m, True), "keys", (9, 9, 9, 9)),
    "an entry off the tree": lambda m: checkpoint(m).anchor.checkpoints.clear(),
    "an entry off the list": lambda m: m._index.entries.pop(checkpoint(m).id),
    "an order that forgot an entry": lambda m: m._index.hide(checkpoint(m)),
    "a used block in the order": lambda m: m._index.order["nodes"].__setitem__(node(m, True), None),
    "a parent used before its child": lambda m: setattr(checkpoint(m), "stamp", 10**9),
    "a checkpoint of another length": lambda m: setattr(checkpoint(m), "length", 3),
    "a snapshot nobody counted": lambda m: setattr(checkpoint(m), "host_bytes", 0),
    "host bytes of nobody": lambda m: setattr(m._cache, "host_bytes", 1),
    "more cached than allowed": lambda m: setattr(m._cache, "cache_bytes", 1),
    "more on the host than allowed": lambda m: setattr(m._cache, "host_limit", 1),
    "a lost slot": lambda m: m._slots.free.pop(),
    "a slot given out twice": lambda m: m._slots.free.append(state(m).slot),
}


@pytest.mark.parametrize("what", CORRUPTIONS)
def test_every_corruption_is_noticed(what: str) -> None:
    w = busy_world()
    CORRUPTIONS[what](w.manager)
    with pytest.raises(AssertionError):
        w.manager.check_integrity()
