"""What is cached, by content: a tree of full blocks, checkpoints hung on it, and who was used last.

A node stands for one full block of tokens and is found by a hash chained over everything before it; its
keys are compared as well, so a collision can never hand out another text's state. A checkpoint stands for
one exact length: the node of its last full block, plus the keys after it. Structure and order only: bytes
and reference counts are `prefix.py`'s.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from attrs import frozen

Keys = tuple[int, ...]


class Entry:
    """Something evictable. `blocks` and `saved` are by group index; an empty tuple is nothing there."""

    __slots__ = ("blocks", "host_bytes", "id", "reserved", "saved", "stamp", "wanted")

    def __init__(self, id: int, num_groups: int) -> None:
        self.id = id
        self.blocks: list[Keys] = [()] * num_groups
        self.saved: dict[int, tuple[int, Any]] | None = None
        """On the host tier: group index -> (number of blocks, what the store read)."""
        self.host_bytes = 0
        self.wanted = 0
        """Stopped sequences that come back for it."""
        self.reserved = 0
        """Host bytes set aside while it is wanted."""
        self.stamp = 0


class Node(Entry):
    """One full block, the depth-th of its text. `users`: live sequences whose text runs through it."""

    __slots__ = ("checkpoints", "children", "depth", "digest", "keys", "parent", "users")

    def __init__(self, id: int, num_groups: int, parent: Node | None, keys: Keys, digest: bytes) -> None:
        super().__init__(id, num_groups)
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent else 0
        self.keys = keys
        self.digest = digest
        self.users = 0
        self.children: dict[int, list[Node]] = {}
        """By first key."""
        self.checkpoints: dict[Keys, Checkpoint] = {}
        """By the keys after this block."""


class Checkpoint(Entry):
    """What else must be restored at exactly `length`: slots, window blocks, the partly filled block."""

    __slots__ = ("anchor", "keys", "length", "snapshot", "usable")

    def __init__(
        self, id: int, num_groups: int, anchor: Node, keys: Keys, length: int, usable: Mapping[str, int]
    ) -> None:
        super().__init__(id, num_groups)
        self.anchor = anchor
        self.keys = keys
        self.length = length
        self.usable = usable
        """Best-effort model -> first index with state; `length` = none."""
        self.snapshot: Any = None


@frozen
class Found:
    """A cached prefix: full blocks, who has the partly filled block behind them, a checkpoint just there."""

    length: int
    chain: tuple[Node, ...]
    source: Entry | None = None
    checkpoint: Checkpoint | None = None


def chained_digest(parent: bytes, keys: Keys) -> bytes:
    """The hash of a block given the hash of everything before it."""
    try:
        packed = array("q", keys).tobytes()
    except OverflowError:  # content hashes may be wider than 63 bits
        packed = ",".join(map(str, keys)).encode()
    return blake2b(parent + packed, digest_size=16).digest()


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading keys agree."""
    length = min(len(left), len(right))
    return next((i for i in range(length) if left[i] != right[i]), length)


class PrefixIndex:
    """Finds prefixes and knows the order of use.

    exact: a hit must end at a checkpoint (slots or windows); otherwise any multiple of `granularity` does.
    """

    def __init__(
        self, identity: str, num_groups: int, block_tokens: int, *, exact: bool, granularity: int
    ) -> None:
        self.block_tokens = block_tokens
        self.exact = exact
        self._granularity = granularity
        self._num_groups = num_groups
        self.root = Node(0, num_groups, None, (), blake2b(identity.encode(), digest_size=16).digest())
        self._next_id = 1
        self._clock = 0
        self.by_digest: dict[bytes, Node] = {}
        self.entries: dict[int, Entry] = {}
        self.order: dict[str, OrderedDict[Entry, None]] = {
            "nodes": OrderedDict(),
            "checkpoints": OrderedDict(),
            "host": OrderedDict(),
            "wanted": OrderedDict(),
        }
        """Oldest first. A node is listed while no sequence uses it; a child is older than its parent. What is
        wanted is not listed once it lies on the host.
        """

    # --- finding

    def walk(self, keys: Sequence[int], limit: int) -> list[Node]:
        """The cached full blocks at the start of `keys`, within `limit` tokens."""
        chain: list[Node] = []
        node, size = self.root, self.block_tokens
        for start in range(0, limit - size + 1, size):
            chunk = tuple(keys[start : start + size])
            child = self.by_digest.get(chained_digest(node.digest, chunk))
            if child is None or child.keys != chunk:
                break
            chain.append(child)
            node = child
        return chain

    def find(self, keys: Sequence[int], limit: int) -> Found:
        """The longest prefix of at most `limit` tokens that can be restored."""
        chain = self.walk(keys, limit)
        find = self._find_checkpoint if self.exact else self._find_tail
        return find(keys, limit, chain)

    def _find_checkpoint(self, keys: Sequence[int], limit: int, chain: list[Node]) -> Found:
        for depth in range(len(chain), -1, -1):
            node = chain[depth - 1] if depth else self.root
            base = depth * self.block_tokens
            rest = tuple(keys[base : min(limit, base + self.block_tokens)])
            fitting = [c for tail, c in node.checkpoints.items() if rest[: len(tail)] == tail]
            if fitting:
                best = max(fitting, key=lambda c: c.length)
                return Found(best.length, tuple(chain[:depth]), best if best.keys else None, best)
        return Found(0, ())

    def _find_tail(self, keys: Sequence[int], limit: int, chain: list[Node]) -> Found:
        node = chain[-1] if chain else self.root
        base = len(chain) * self.block_tokens
        rest = tuple(keys[base : min(limit, base + self.block_tokens)])
        source: Entry | None = None
        shared = 0
        candidates: list[Node | Checkpoint] = [*node.checkpoints.values()]
        if rest:
            candidates += node.children.get(rest[0], ())
        for candidate in candidates:
            length = common_prefix(candidate.keys, rest)
            if length > shared:
                source, shared = candidate, length
        shared -= shared % self._granularity
        checkpoint = node.checkpoints.get(rest[:shared])
        if not shared:
            source = None
        elif checkpoint is not None:
            source = checkpoint
        return Found(base + shared, tuple(chain), source, checkpoint)

    # --- growing and shrinking

    def extend(self, parent: Node, keys: Keys) -> Node:
        """The node of block `keys` behind `parent`; made when there is none. Its blocks are the caller's."""
        digest = chained_digest(parent.digest, keys)
        node = self.by_digest.get(digest)
        if node is None:
            node = Node(self.new_id(), self._num_groups, parent, keys, digest)
            parent.children.setdefault(keys[0], []).append(node)
            self.by_digest[digest] = node
            self.entries[node.id] = node
            self.touch(node)
        assert node.keys == keys, f"blocks {node.keys} and {keys} have one hash"
        return node

    def add_checkpoint(self, anchor: Node, keys: Keys, length: int, usable: Mapping[str, int]) -> Checkpoint:
        """A new checkpoint behind `anchor`, where there is none with these keys."""
        made = Checkpoint(self.new_id(), self._num_groups, anchor, keys, length, usable)
        anchor.checkpoints[keys] = made
        self.entries[made.id] = made
        self.touch(made)
        return made

    def unlink(self, entry: Entry) -> None:
        """Take a leaf out of the tree and the order."""
        del self.entries[entry.id]
        self.hide(entry)
        if isinstance(entry, Checkpoint):
            del entry.anchor.checkpoints[entry.keys]
        elif isinstance(entry, Node) and entry.parent is not None:
            siblings = entry.parent.children[entry.keys[0]]
            siblings.remove(entry)
            if not siblings:
                del entry.parent.children[entry.keys[0]]
            del self.by_digest[entry.digest]

    def new_id(self) -> int:
        """Never given to another entry."""
        self._next_id += 1
        return self._next_id - 1

    # --- order of use

    def touch(self, entry: Entry) -> None:
        """`entry` was used now."""
        self._clock += 1
        entry.stamp = self._clock
        self.relist(entry)

    def relist(self, entry: Entry) -> None:
        """Put `entry` into the list of its tier and kind, at the end."""
        self.hide(entry)
        if isinstance(entry, Node) and entry.users:
            return
        kind = "nodes" if isinstance(entry, Node) else "checkpoints"
        if entry.wanted:
            kind = "wanted"
        if entry.saved is not None:
            kind = "" if entry.wanted else "host"
        if kind:
            self.order[kind][entry] = None

    def pin(self, node: Node) -> None:
        """A sequence runs through `node`: it is not evictable."""
        node.users += 1
        self.hide(node)

    def unpin(self, node: Node) -> None:
        """One sequence less; call from the deepest node up, so that a child stays older than its parent."""
        node.users -= 1
        if not node.users:
            self.touch(node)

    def oldest(self, *kinds: str) -> Entry | None:
        """The entry of these lists that was used longest ago."""
        heads = (next(iter(self.order[kind]), None) for kind in kinds)
        return min((head for head in heads if head is not None), key=lambda e: e.stamp, default=None)

    def subtree(self, node: Node) -> Iterator[Entry]:
        """`node` and everything behind it, leaves first."""
        stack, found = [node], [node]
        while stack:
            top = stack.pop()
            children = [child for siblings in top.children.values() for child in siblings]
            stack += children
            found += children
        for member in reversed(found):
            yield from list(member.checkpoints.values())
            yield member

    def hide(self, entry: Entry) -> None:
        """Out of the order: not evictable until `touch` or `relist`."""
        for entries in self.order.values():
            entries.pop(entry, None)
