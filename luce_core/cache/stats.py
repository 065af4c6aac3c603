"""What the block manager tells metrics."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen


@frozen
class CacheStats:
    """Figures for metrics; blocks by "model/group"."""

    used_blocks: Mapping[str, int]
    cached_blocks: Mapping[str, int]
    free_blocks: Mapping[str, int]
    """Including those that wait for a fence."""
    cached_bytes: int
    host_bytes: int
    checkpoints: int
    asked_tokens: int
    """Prompt tokens of every sequence opened."""
    hit_tokens: int
    evictions: int
    spills: int
    copies: int
    """Blocks made private by copying."""
    sequences: int
    free_slots: int
