"""Candidate trees on the host: merging sources, cutting to a budget, walking the accepted path."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from luce_core.contracts import TokenTree


@frozen
class Candidates:
    """(host) The candidate tree of one sequence, in topological order; parent -1 = the last decided row."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    survival: tuple[float, ...] = ()
    sources: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)


def read_tree(tree: TokenTree, source: int) -> list[Candidates]:
    """One `Candidates` per sequence of a drafter's proposal. Synchronizes."""
    counts = tree.count.tolist()
    tokens, parents, survival = tree.token.tolist(), tree.parent.tolist(), tree.survival.tolist()
    return [
        Candidates(tuple(tokens[s][:n]), tuple(parents[s][:n]), tuple(survival[s][:n]), (source,) * n)
        for s, n in enumerate(counts)
    ]


def check_tree(tree: Candidates, vocab: int) -> str | None:
    """What is wrong with a proposal, or None. A drafter's bug must not reach the target."""
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if not -1 <= parent < node:
            return f"node {node} has parent {parent}; wanted -1 or an earlier node"
        if not 0 <= token < vocab:
            return f"node {node} holds token {token}; the vocabulary has {vocab}"
    return None


def merge(trees: Sequence[Candidates], capacity: int) -> Candidates:
    """One tree: equal tokens under one parent become one node, then the likeliest `capacity` nodes stay.

    A node that several sources propose survives with 1 - Π(1 - p): the sources are taken as independent. No
    node outlives
    its parent, so keeping the likeliest never orphans one.
    """
    trees = [tree for tree in trees if len(tree)]
    if len(trees) == 1 and len(trees[0]) <= capacity and _tidy(trees[0]):
        return trees[0]
    merged: dict[tuple[int, int], int] = {}
    tokens: list[int] = []
    parents: list[int] = []
    survival: list[float] = []
    sources: list[int] = []
    for tree in trees:
        place: list[int] = []
        for token, parent, chance, source in zip(
            tree.tokens, tree.parents, tree.survival, tree.sources, strict=True
        ):
            above = place[parent] if parent >= 0 else -1
            node = merged.get((above, token))
            if node is None:
                node = merged[above, token] = len(tokens)
                tokens.append(token)
                parents.append(above)
                survival.append(chance)
                sources.append(source)
            else:
                survival[node] = 1.0 - (1.0 - survival[node]) * (1.0 - chance)
            place.append(node)
    for node, above in enumerate(parents):
        if above >= 0:
            survival[node] = min(survival[node], survival[above])
    return _cut(Candidates(tuple(tokens), tuple(parents), tuple(survival), tuple(sources)), capacity)


def _tidy(tree: Candidates) -> bool:
    """No two equal siblings, and no node likelier than its parent."""
    monotone = all(
        above < 0 or chance <= tree.survival[above]
        for above, chance in zip(tree.parents, tree.survival, strict=True)
    )
    return monotone and len(set(zip(tree.parents, tree.tokens, strict=True))) == len(tree)


def _cut(tree: Candidates, capacity: int) -> Candidates:
    if len(tree) <= capacity:
        return tree
    best = sorted(range(len(tree)), key=lambda node: (-tree.survival[node], node))[:capacity]
    return keep(tree, sorted(best))


def keep(tree: Candidates, nodes: Sequence[int]) -> Candidates:
    """The tree of these nodes, which rise, each with its parent."""
    if len(nodes) == len(tree):
        return tree
    place = {node: new for new, node in enumerate(nodes)} | {-1: -1}
    return Candidates(
        tuple(tree.tokens[node] for node in nodes),
        tuple(place[tree.parents[node]] for node in nodes),
        tuple(tree.survival[node] for node in nodes),
        tuple(tree.sources[node] for node in nodes),
    )


def accept(tokens: Sequence[int], parents: Sequence[int], picked: Sequence[int], sure: int) -> list[int]:
    """The accepted rows of one sequence: the decided ones, then every candidate the target itself picked.

    tokens, parents, picked: by row of the sequence; parents are rows. The pick at the last row is the new
    anchor.
    """
    path = list(range(sure))
    children: dict[tuple[int, int], int] = {}
    for row in range(sure, len(tokens)):
        children.setdefault((parents[row], tokens[row]), row)
    while (row := children.get((path[-1], picked[path[-1]]), -1)) >= 0:
        path.append(row)
    return path
