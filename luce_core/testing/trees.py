"""Tree shapes for verification tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator


def tree_shapes(most: int) -> Iterator[tuple[int, ...]]:
    """Every unordered rooted tree of 1 to `most` nodes, once: parents by node, the root -1, children
    after parents.

    How many there are is sequence A000081: 1, 1, 2, 4, 9, 20, 48, 115, 286, ...
    """
    for size in range(1, most + 1):
        seen: set[str] = set()
        for tail in itertools.product(*(range(node) for node in range(1, size))):
            parents = (-1, *tail)
            if (
                all(a <= b for a, b in itertools.pairwise(parents))
                and (form := _canonical(parents)) not in seen
            ):
                seen.add(form)
                yield parents


def _canonical(parents: tuple[int, ...]) -> str:
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)

    def form(node: int) -> str:
        return "(" + "".join(sorted(form(child) for child in children[node])) + ")"

    return form(0)


def paths(parents: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every path from the root to a node, the node included."""
    for node in range(len(parents)):
        path = []
        at = node
        while at >= 0:
            path.append(at)
            at = parents[at]
        yield tuple(reversed(path))
