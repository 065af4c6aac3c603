"""The core's contract kit, and the proposals themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from @MODULE@.drafter import @CLASS@, follow

from luce_core.contracts import Round
from luce_core.testing.plugin import PluginContract


class TestPlugin(PluginContract):
    hooks = "@MODULE@.hooks"


@pytest.mark.parametrize(
    ("tokens", "most", "expected"),
    [
        ([5, 6, 7, 5], 2, [6, 7]),
        ([5, 6, 7, 5], 9, [6, 7, 5]),
        ([5, 1, 5, 2, 5], 1, [2]),
        ([1, 2, 3], 4, []),
        ([1], 4, []),
        ([5, 5], 0, []),
    ],
)
def test_what_followed_before_is_proposed(tokens: list[int], most: int, expected: list[int]) -> None:
    assert follow(tokens, most) == expected


def test_every_sequence_gets_its_own_chain_within_the_capacity() -> None:
    history = torch.zeros(3, 16, dtype=torch.int32)
    history[2, :5] = torch.tensor([4, 8, 9, 3, 4])
    history[0, :2] = torch.tensor([1, 2])
    unused: Any = None
    tree = @CLASS@(8).propose(
        Round(
            slot=torch.tensor([2, 0]),
            anchor=torch.tensor([4, 2]),
            length=torch.tensor([4, 1]),
            usable_from=torch.tensor([0, 0]),
            history=history,
            params=unused,
            noise=unused,
            capacity=2,
            room=torch.tensor([2, 2]),
        )
    )
    assert tree.count.tolist() == [2, 0]
    assert tree.token[0].tolist() == [8, 9]
    assert tree.parent[0].tolist() == [-1, 0]
