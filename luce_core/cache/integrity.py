"""Everything the block manager believes, counted again from scratch. AssertionError names the values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from luce_core.cache.groups import GroupInfo
from luce_core.cache.index import Checkpoint, Node, PrefixIndex, chained_digest
from luce_core.cache.pool import BlockPool
from luce_core.cache.prefix import PrefixCache
from luce_core.cache.retained import Retained
from luce_core.cache.sequence import SeqState
from luce_core.contracts import SeqId


def check_pools(
    groups: Sequence[GroupInfo],
    pools: Sequence[BlockPool],
    seqs: Mapping[SeqId, SeqState],
    index: PrefixIndex,
) -> None:
    """Reference counts, the free lists and the four kinds of block."""
    for group, pool in zip(groups, pools, strict=True):
        seq_refs, cache_refs = [0] * pool.num_blocks, [0] * pool.num_blocks
        for state in seqs.values():
            for block in state.tables[group.index].blocks:
                seq_refs[block] += 1
        for entry in index.entries.values():
            for block in entry.blocks[group.index]:
                cache_refs[block] += 1
        pool.check(seq_refs, cache_refs)


def check_sequences(
    groups: Sequence[GroupInfo],
    pools: Sequence[BlockPool],
    seqs: Mapping[SeqId, SeqState],
    index: PrefixIndex,
) -> None:
    """Every sequence: its text, its chain, what its tables cover, and that nobody else writes its blocks."""
    size = index.block_tokens
    writers: dict[tuple[int, int], SeqId] = {}
    for seq, state in seqs.items():
        covered = len(state.nodes) * size + len(state.tail)
        assert covered == state.length, f"sequence {seq}: {covered} keys kept, length {state.length}"
        assert len(state.tail) < size, f"sequence {seq}: {len(state.tail)} keys in a block of {size}"
        assert state.capacity >= state.length, f"sequence {seq}: capacity {state.capacity} < {state.length}"
        above: Node | None = index.root
        for node in state.nodes:
            assert node.parent is above, f"sequence {seq}: chain broken at block {node.depth}"
            assert node.id in index.entries, f"sequence {seq}: block {node.depth} left the index"
            above = node
        for group in groups:
            table = state.tables[group.index]
            needed = max(0, state.length - (group.window or state.length))
            needed = max(needed, state.usable.get(group.model, 0))
            first = table.start * size
            assert first <= needed, f"sequence {seq}: {group.key} starts at {first}, needed from {needed}"
            end = table.end * size
            lacking = state.usable.get(group.model, 0) >= state.length or state.length == 0
            assert lacking or end >= state.length, (
                f"sequence {seq}: {group.key} ends at {end} < {state.length}"
            )
            distinct = len(set(table.blocks))
            assert distinct == len(table.blocks), f"sequence {seq}: {group.key} repeats in {table.blocks}"
            written = 0 if state.shared else -(-state.length // size) - bool(state.tail)
            for block in () if state.shared else table.blocks[max(0, written - table.start) :]:
                other = writers.setdefault((group.index, block), seq)
                assert other == seq, f"{group.key} block {block}: sequences {other} and {seq} both write it"


def check_index(
    index: PrefixIndex,
    seqs: Mapping[SeqId, SeqState],
    cache: PrefixCache,
    snapshot_bytes: Callable[[int], int],
) -> None:
    """The tree, who uses it, the order of use, and the bytes on the host."""
    reached = list(index.subtree(index.root))[:-1]
    assert set(reached) == set(index.entries.values()), (
        f"{len(reached)} entries hang on the tree, {len(index.entries)} are listed"
    )
    users: dict[Node, int] = {}
    for state in seqs.values():
        for node in state.nodes:
            users[node] = users.get(node, 0) + 1
    listed = {entry: kind for kind, entries in index.order.items() for entry in entries}
    host_bytes = 0
    for entry in reached:
        host_bytes += 0 if entry.wanted else entry.host_bytes
        kind: str | None
        if isinstance(entry, Node):
            _check_node(entry, index, users.get(entry, 0))
            kind = "nodes"
        else:
            assert isinstance(entry, Checkpoint), f"entry {entry.id} is a {type(entry).__name__}"
            _check_checkpoint(entry, index, snapshot_bytes)
            kind = "checkpoints"
        if entry.wanted:
            kind = "wanted"
        if entry.saved is not None:
            kind = None if entry.wanted else "host"
            assert not any(entry.blocks), f"entry {entry.id} on the host holds device blocks {entry.blocks}"
        want = None if isinstance(entry, Node) and entry.users else kind
        assert listed.get(entry) == want, f"entry {entry.id} is listed as {listed.get(entry)}, wanted {want}"
    assert host_bytes == cache.host_bytes, f"{host_bytes} host bytes held, counted {cache.host_bytes}"
    evictable = any(index.order.values())
    assert cache.held_bytes <= cache.cache_bytes or not evictable, (
        f"{cache.held_bytes} bytes cached, budget {cache.cache_bytes}"
    )
    assert cache.host_bytes <= cache.host_limit, f"{cache.host_bytes} host bytes, budget {cache.host_limit}"


def check_retained(index: PrefixIndex, cache: PrefixCache, retained: Retained) -> None:
    """Who is waited for, and the host memory set aside for it."""
    wanted = Counter(entry.id for entry in retained.entries())
    found = {entry.id: entry.wanted for entry in index.entries.values() if entry.wanted}
    assert wanted == found, f"stopped sequences come back for {dict(wanted)}, counted {found}"
    entries = [entry for entry in index.entries.values() if entry.wanted]
    swapped = sum(entry.host_bytes for entry in entries)
    reserved = sum(entry.reserved for entry in entries)
    for entry in entries:
        assert entry.host_bytes <= entry.reserved, (
            f"entry {entry.id}: {entry.host_bytes} bytes on the host, {entry.reserved} set aside"
        )
    assert cache.swap_bytes == swapped, f"{swapped} bytes swapped, counted {cache.swap_bytes}"
    assert cache.swap_reserved == reserved, f"{reserved} bytes set aside, counted {cache.swap_reserved}"
    assert reserved <= cache.swap_limit, f"{reserved} bytes set aside, budget {cache.swap_limit}"


def _check_node(node: Node, index: PrefixIndex, users: int) -> None:
    parent = node.parent
    assert parent is not None, f"block {node.id} has no parent"
    assert node.users == users, f"block {node.id}: {users} sequences use it, counted {node.users}"
    assert index.by_digest.get(node.digest) is node, f"block {node.id} is not found by its hash"
    assert node.digest == chained_digest(parent.digest, node.keys), f"block {node.id}: hash does not chain"
    for behind in [*node.checkpoints.values(), *(c for cs in node.children.values() for c in cs)]:
        idle = not node.users
        assert not idle or behind.stamp < node.stamp or behind.saved is not None or node.saved is not None, (
            f"entry {behind.id} was used after block {node.id} before it"
        )
        assert not (idle and isinstance(behind, Node) and behind.users), (
            f"block {behind.id} is used, block {node.id} before it is not"
        )
    useless = index.exact and not (node.users or node.children or node.checkpoints)
    assert not useless, f"block {node.id} is kept with no checkpoint behind it"


def _check_checkpoint(
    checkpoint: Checkpoint, index: PrefixIndex, snapshot_bytes: Callable[[int], int]
) -> None:
    length = checkpoint.anchor.depth * index.block_tokens + len(checkpoint.keys)
    assert checkpoint.length == length, f"checkpoint {checkpoint.id} says {checkpoint.length}, holds {length}"
    if checkpoint.snapshot is not None:
        size = snapshot_bytes(length)
        assert checkpoint.host_bytes >= size, (
            f"checkpoint {checkpoint.id}: a snapshot of {size} bytes, counted {checkpoint.host_bytes}"
        )
