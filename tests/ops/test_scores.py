"""Scoring a text's own tokens, against double precision by definition."""

import numpy as np
import pytest
import torch

from luce_core.ops import build_ops


def expected(logits, targets):
    """(log-probabilities, ranks) in float64."""
    wide = logits.numpy().astype(np.float64)
    top = wide.max(-1, keepdims=True)
    normal = wide - top - np.log(np.exp(wide - top).sum(-1, keepdims=True))
    own = normal[np.arange(len(targets)), targets]
    return normal, own, [1 + int((row > row[t]).sum()) for row, t in zip(wide, targets, strict=True)]


@pytest.mark.parametrize("block", [1, 3, 64])
@pytest.mark.parametrize("top", [0, 1, 5])
def test_scores_by_definition_however_the_rows_are_cut(block, top):
    generator = torch.Generator().manual_seed(0)
    final = torch.randn(10, 8, generator=generator)
    matrix = torch.randn(31, 8, generator=generator) * 3
    targets = torch.randint(0, 31, (10,), generator=generator)
    asked = []

    def head(rows):
        asked.append(len(rows))
        return rows @ matrix.T

    own, rank, values, ids = build_ops().prompt_logprobs(head, final, targets, top, block)
    normal, want, ranks = expected(final @ matrix.T, targets.tolist())
    assert max(asked) <= block
    assert own.numpy() == pytest.approx(want, abs=1e-5)
    assert rank.tolist() == ranks
    order = np.argsort(-normal, axis=-1, kind="stable")[:, :top]
    assert ids.tolist() == order.tolist()
    assert values.numpy() == pytest.approx(np.take_along_axis(normal, order, -1), abs=1e-5)


def test_ties_share_a_rank_and_impossible_tokens_are_minus_infinity():
    logits = torch.tensor([[2.0, 2.0, 1.0, -torch.inf]]).repeat(4, 1)
    own, rank, _, _ = build_ops().prompt_logprobs(lambda rows: rows, logits, torch.tensor([0, 1, 2, 3]), 0, 4)
    assert rank.tolist() == [1, 1, 3, 4]
    assert own[3] == -torch.inf


def test_huge_logits_do_not_overflow():
    logits = torch.tensor([[3e38, -3e38, 0.0]])
    own, rank, values, ids = build_ops().prompt_logprobs(lambda rows: rows, logits, torch.tensor([0]), 9, 1)
    assert (own.tolist(), rank.tolist()) == ([0.0], [1])
    assert ids.tolist() == [[0, 2, 1]]
    assert values[0, 0] == 0.0
