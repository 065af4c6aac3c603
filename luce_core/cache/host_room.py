"""Where copies of states lie in host memory, in few pieces. Torch-free: the plan counts them with it."""

from __future__ import annotations

from collections.abc import Sequence

PIECE_BYTES = 16 << 20
"""Of pinned memory that is taken at a time. torch rounds up to powers of two, so pieces are that."""
ALIGN = 256
MOST_UNDER_WAY = 2
"""Snapshots that lie in pinned memory at a time; the next one waits for the first of them."""


def pieces(sizes: Sequence[int], *, pinned: bool) -> tuple[list[int], list[tuple[int, int]]]:
    """sizes: bytes of each copy -> (bytes of the pieces, (piece, offset in it) of each copy). A copy begins
    at a multiple of ALIGN.
    """
    padded = [-(-size // ALIGN) * ALIGN for size in sizes]
    left, used = sum(padded), 0
    taken: list[int] = []
    places = []
    for size in padded:
        if not taken or used + size > taken[-1]:
            whole = 1 << (left - 1).bit_length() if pinned else left
            taken.append(max(size, min(PIECE_BYTES, whole)))
            used = 0
        places.append((len(taken) - 1, used))
        used += size
        left -= size
    return taken, places


def pinned_bytes(sizes: Sequence[int]) -> int:
    """What all snapshots under way take, of copies of these sizes."""
    taken, _ = pieces(sizes, pinned=True)
    return MOST_UNDER_WAY * sum(1 << (size - 1).bit_length() for size in taken if size)
