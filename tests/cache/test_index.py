"""The prefix index: texts are told apart by their keys, whatever their hashes say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce_core.cache.index import PrefixIndex, chained_digest, common_prefix

KEYS = st.lists(st.integers(-(2**80), 2**80), min_size=1, max_size=6).map(tuple)


def index(identity: str = "weights") -> PrefixIndex:
    return PrefixIndex(identity, 1, 4, exact=False, granularity=1)


def test_two_blocks_with_one_hash_are_not_confused() -> None:
    tree = index()
    node = tree.extend(tree.root, (1, 2, 3, 4))
    tree.by_digest[chained_digest(tree.root.digest, (5, 6, 7, 8))] = node
    assert tree.walk([1, 2, 3, 4], 4) == [node]
    assert tree.walk([5, 6, 7, 8], 4) == []
    with pytest.raises(AssertionError, match="have one hash"):
        tree.extend(tree.root, (5, 6, 7, 8))


def test_the_identity_of_the_models_is_in_every_hash() -> None:
    one, other = index("a"), index("b")
    assert one.extend(one.root, (1, 2, 3, 4)).digest != other.extend(other.root, (1, 2, 3, 4)).digest


@given(KEYS, KEYS)
def test_different_blocks_have_different_hashes(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    assert (chained_digest(b"p", left) == chained_digest(b"p", right)) == (left == right)
    assert chained_digest(b"p", left) != chained_digest(b"q", left)


@given(KEYS, KEYS, KEYS)
def test_common_prefix(shared: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...]) -> None:
    length = common_prefix(shared + left, shared + right)
    assert length >= len(shared)
    assert (shared + left)[:length] == (shared + right)[:length]
    assert (shared + left)[length : length + 1] != (shared + right)[length : length + 1] or left == right
