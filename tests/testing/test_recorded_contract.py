"""The contract of recorded answers holds for a true recording and catches each kind of untrue one."""

from importlib import import_module
from textwrap import dedent

import pytest

# Imported here so that the runs inside these tests share one copy of them.
for part in ("recorded_contract", "dense", "dense.hooks", "dense.network", "rig"):
    import_module(f"luce_core.testing.{part}")

SUITE = """
from pathlib import Path

import numpy as np
import torch

from luce_core.testing.dense import write_dense_model
from luce_core.testing.recorded_contract import RecordedContract
from luce_core.testing.rig import ModelRig

HOOKS = "luce_core.testing.dense.hooks"
FILE = write_dense_model(Path(__file__).with_name("dense.gguf"), layers=1)
ids = np.random.default_rng(0).integers(0, 250, 112)
one = ModelRig(FILE, HOOKS)
logits = one.fresh(ids.tolist()).numpy()
more = {"embed_out": one.backend.embed(torch.tensor(ids, dtype=torch.int32)).numpy()}
CHANGE
np.savez(FILE.with_suffix(".npz"), input_ids=ids, logits=logits, **more)


class TestRecorded(RecordedContract):
    hooks, file, f16, bf16 = HOOKS, FILE, 2e-3, 2e-2
    cuts, singles, rounded, tree_at = ((1, 100),), 20, 30, 60
"""


def failures(pytester, change="", only="", body=""):
    """Names of the kit's tests that fail."""
    pytester.makepyfile(test_recorded=SUITE.replace("CHANGE", dedent(change)) + body)
    run = pytester.inline_run("-q", "-p", "no:cacheprovider", "-k", only, "test_recorded.py")
    reports = run.getreports("pytest_runtest_logreport")
    assert reports, "nothing was collected"
    return {r.nodeid.split("::")[-1].partition("[")[0].removeprefix("test_") for r in reports if r.failed}


def test_a_true_recording_passes(pytester):
    assert failures(pytester) == set()


@pytest.mark.parametrize(
    ("change", "caught"),
    [
        ("logits[0, 3] += 1e-2", {"one_prefill_gives_what_was_recorded"}),
        ("logits[105] += 1e-2", {"one_prefill_gives_what_was_recorded", "chunks_then_single_tokens_give_it"}),
        ("logits[7] += 1e-2", {"single_tokens_give_it", "chunks_then_single_tokens_give_it"}),
        ("logits[64] += 1e-2", {"decided_rows_and_a_tree_behind_them"}),
        ("logits[68] += 1e-2", {"decided_rows_and_a_tree_behind_them"}),
        ("logits[63] += 1e-2", {"rejected_candidates_leave_nothing"}),
        ("logits[98] += 1e-2", {"beside_other_sequences_at_other_places"}),
        ("logits[100] += 1e-2", {"a_cached_prefix_gives_it"}),
        ("more['embed_out'][50] += 1e-2", {"a_drafter_sees_what_was_recorded"}),
        ("logits[29] += 2", {"rounded_caches_stay_near"}),
        ("logits = logits[:-1]", {"one_prefill_gives_what_was_recorded"}),
    ],
)
def test_an_untrue_recording_is_caught(pytester, change, caught):
    assert failures(pytester, change, " or ".join(caught)) == caught


def test_a_cache_that_is_not_rounded_is_caught(pytester):
    """A plugin that keeps f32 whatever the cache type is would pass a bound alone."""
    ignoring = """
    def _rig(self, cache_type="f32", **more):
        return super()._rig(**more)
"""
    assert failures(pytester, only="rounded", body=ignoring) == {"rounded_caches_stay_near"}
