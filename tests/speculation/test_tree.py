import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from luce_core.contracts import TokenTree
from luce_core.speculation.tree import Candidates, accept, check_tree, merge, read_tree


@st.composite
def trees(draw, most=10, vocab=4):
    count = draw(st.integers(0, most))
    parents = [draw(st.integers(-1, node - 1)) for node in range(count)]
    tokens = [draw(st.integers(0, vocab - 1)) for _ in range(count)]
    survival = [draw(st.floats(0.01, 1.0)) for _ in range(count)]
    return Candidates(tuple(tokens), tuple(parents), tuple(survival), (draw(st.integers(0, 3)),) * count)


def texts(tree):
    """Every path of a tree as a token string: what it really says."""
    found = set()
    for node in range(len(tree)):
        path, at = [], node
        while at >= 0:
            path.append(tree.tokens[at])
            at = tree.parents[at]
        found.add(tuple(reversed(path)))
    return found


@given(st.lists(trees(), max_size=3))
def test_merging_loses_and_invents_no_path(many):
    merged = merge(many, capacity=100)
    assert texts(merged) == set().union(*(texts(tree) for tree in many)) if many else not len(merged)
    assert len(texts(merged)) == len(merged)
    assert check_tree(merged, vocab=4) is None


@given(st.lists(trees(), min_size=1, max_size=3), st.integers(0, 6))
def test_a_cut_tree_is_a_tree_of_the_likeliest_nodes(many, capacity):
    whole, cut = merge(many, 100), merge(many, capacity)
    assert len(cut) <= capacity
    assert check_tree(cut, vocab=4) is None
    assert texts(cut) <= texts(whole)
    if len(cut) < len(whole):
        assert len(cut) == capacity
        best = sorted(whole.survival, reverse=True)[:capacity]
        assert sorted(cut.survival, reverse=True) == pytest.approx(best)


def test_sources_that_agree_make_a_node_likelier():
    one = Candidates((5,), (-1,), (0.5,), (0,))
    other = Candidates((5, 6), (-1, 0), (0.5, 0.4), (1, 1))
    assert merge([one, other], 8) == Candidates((5, 6), (-1, 0), (0.75, 0.4), (0, 1))


@given(trees(), st.lists(st.integers(0, 3), min_size=11, max_size=11), st.integers(1, 3))
def test_acceptance_follows_the_picks_as_far_as_the_tree_goes(tree, picks, sure):
    tree = merge([tree], 100)
    tokens = [0] * sure + list(tree.tokens)
    parents = list(range(-1, sure - 1)) + [
        parent + sure if parent >= 0 else sure - 1 for parent in tree.parents
    ]
    picked = [picks[row % 11] for row in range(len(tokens))]
    path = accept(tokens, parents, picked, sure)
    assert path[:sure] == list(range(sure))
    for above, row in zip(path[sure - 1 :], path[sure:], strict=False):
        assert parents[row] == above
        assert tokens[row] == picked[above]
    last = path[-1]
    assert not any(parents[row] == last and tokens[row] == picked[last] for row in range(sure, len(tokens)))


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (Candidates((1,), (0,), (1.0,), (0,)), "parent 0"),
        (Candidates((1, 1), (-1, 1), (1.0, 1.0), (0, 0)), "node 1 has parent 1"),
        (Candidates((1,), (-2,), (1.0,), (0,)), "parent -2"),
        (Candidates((9,), (-1,), (1.0,), (0,)), "token 9"),
        (Candidates((-1,), (-1,), (1.0,), (0,)), "token -1"),
    ],
)
def test_a_bad_proposal_is_named(tree, words):
    assert words in (check_tree(tree, vocab=9) or "")


def test_reading_a_proposal_stops_at_its_count():
    tree = TokenTree(
        token=torch.tensor([[4, 5, 0], [6, 0, 0]], dtype=torch.int32),
        parent=torch.tensor([[-1, 0, 0], [-1, 0, 0]], dtype=torch.int16),
        survival=torch.tensor([[1.0, 0.5, 0.0], [0.25, 0.0, 0.0]]),
        source=torch.zeros(2, 3, dtype=torch.uint8),
        count=torch.tensor([2, 1], dtype=torch.int32),
    )
    assert read_tree(tree, 2) == [
        Candidates((4, 5), (-1, 0), (1.0, 0.5), (2, 2)),
        Candidates((6,), (-1,), (0.25,), (2,)),
    ]
