"""What of a cached prefix a new sequence gets, group by group."""

from __future__ import annotations

from luce_core.cache.groups import BestEffort, GroupInfo
from luce_core.cache.index import Found
from luce_core.cache.sequence import GroupTable


def found_usable(model: BestEffort, found: Found, block_tokens: int) -> int:
    """First index with state of a model the hit may lack; the whole length = none."""
    base = 0
    if model.exact:
        if found.checkpoint is None:
            return found.length
        base = found.checkpoint.usable[model.name]
    if found.source is not None and not all(found.source.blocks[group] for group in model.whole):
        return found.length
    start = len(found.chain)
    while start and all(found.chain[start - 1].blocks[group] for group in model.whole):
        start -= 1
    return min(found.length, max(base, start * block_tokens))


def found_table(group: GroupInfo, found: Found, usable: int, block_tokens: int) -> GroupTable:
    """The shared blocks of one group; none where a drafter has no state below `found.length`."""
    if usable and usable >= found.length:
        return GroupTable(found.length // block_tokens, [])
    if group.window is not None:
        kept = found.checkpoint.blocks[group.index] if found.checkpoint else ()
        return GroupTable(-(-found.length // block_tokens) - len(kept), list(kept))
    start = usable // block_tokens
    blocks = [node.blocks[group.index][0] for node in found.chain[start:]]
    if found.source is not None:
        blocks.append(found.source.blocks[group.index][-1])
    return GroupTable(start, blocks)
