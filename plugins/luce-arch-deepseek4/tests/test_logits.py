"""Logits of the published fixture, however the text is cut. Reference: float64, token by token.

300 tokens: two entries of the layers with one per 128, 75 of those with one per 4, of which 8 are picked.
Every comparison is of logits, with a bound on the difference: argmax agreement survives gross errors.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from luce_core.testing.recorded_contract import RecordedContract
from luce_core.testing.rig import ModelRig

FIXTURES = Path(__file__).parent / "fixtures"
HOOKS = "luce_arch_deepseek4.hooks"
TOLERANCE = 1e-4
"""Absolute; logits deviate by 0.65."""
BLOCK = 128
EXPECTED = np.load(FIXTURES / "tiny-deepseek4.npz")
IDS, LOGITS = EXPECTED["input_ids"].tolist(), torch.tensor(EXPECTED["logits_fp64"])


class TestDeepSeek4(RecordedContract):
    """Cuts within entries; a cached prefix of two long ones. Rounded caches, as long as all entries are
    picked: 1.1e-3 and 9.6e-3; behind row 31 a rounded indexer may pick others, which is another answer.
    """

    hooks, file, block_tokens = HOOKS, FIXTURES / "tiny-deepseek4-f32.gguf", BLOCK
    recording, key, tolerance = FIXTURES / "tiny-deepseek4.npz", "logits_fp64", 4e-5
    cuts, singles, prefix = ((1, 3, 6, 100, 127, 130, 255),), 135, 256
    starts, tree_at = (1, 126, 254), 123
    f16, bf16, rounded = 2.2e-3, 2.2e-2, 32


def rig_of(name):
    torch.set_num_threads(1)
    return ModelRig(FIXTURES / f"{name}.gguf", HOOKS, block_tokens=BLOCK, num_blocks=24)


@pytest.fixture
def rig():
    return rig_of("tiny-deepseek4-f32")


def assert_close(got, want):
    assert got.shape == want.shape
    worst = float((got - want).abs().max())
    assert worst <= TOLERANCE, f"logits differ by {worst:.2g}"


def test_a_quantized_file():
    """MXFP4, Q8_0, BF16."""
    assert_close(rig_of("tiny-deepseek4").fresh(IDS), LOGITS)


def test_chains_accepted_over_the_end_of_an_entry(rig):
    seq = rig.open()
    rig.prefill({seq: IDS[:121]})
    for at in range(121, 151, 6):
        held = rig.hold({seq: IDS[at : at + 6]})
        assert_close(held.logits[0], LOGITS[at : at + 6])
        rig.commit(held, [list(range(6))])


@pytest.mark.parametrize("start", [120, 123, 250])
def test_a_tree_whose_branches_close_the_same_entry(rig, start):
    """Both the wrong and the right continuation close entries of 4 and, from 120 or 250, of 128 tokens."""
    seq = rig.open()
    rig.prefill({seq: IDS[:start]})
    right = IDS[start : start + 9]
    wrong = [token ^ 1 for token in right]
    tokens = [right[0], *wrong[1:], *right[1:]]
    parents = [-1, *range(8), 0, *range(9, 16)]
    held = rig.hold({seq: tokens}, {seq: parents})
    path = [0, *range(9, 17)]
    assert_close(held.logits[0][path], LOGITS[start : start + 9])
    assert float((held.logits[0][1:9] - held.logits[0][9:]).abs().max()) > 0.1
    rig.commit(held, [path])
    rest = range(start + 9, start + 14)
    assert_close(torch.stack([rig.decode(seq, IDS[at]) for at in rest]), LOGITS[start + 9 : start + 14])


def test_rows_not_accepted_leave_no_entry(rig):
    seq = rig.open()
    rig.prefill({seq: IDS[:125]})
    for _ in range(2):
        held = rig.hold({seq: [token ^ 1 for token in IDS[125:133]]})
        rig.commit(held, [[]])
    held = rig.hold({seq: [*IDS[125:128], *(token ^ 1 for token in IDS[128:134])]})
    rig.commit(held, [[0, 1, 2]])
    assert_close(torch.stack([rig.decode(seq, token) for token in IDS[128:134]]), LOGITS[128:134])


def test_a_tap_is_all_streams(rig):
    assert rig.spec.tap_width == rig.spec.final_width == 4 * rig.spec.hidden
