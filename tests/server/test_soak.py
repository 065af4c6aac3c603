"""The soak of benchmarks/serving, short: hundreds of requests of every kind leave nothing behind."""

import importlib.util
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "serving" / "soak.py"


@pytest.fixture(scope="module")
def soak():
    spec = importlib.util.spec_from_file_location("serving_soak", SOAK)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.slow
def test_three_hundred_requests_leave_nothing_behind(soak, caplog):
    caplog.set_level("CRITICAL", logger="luce_core.engine")  # steps fail on purpose
    with soak.served() as one:
        result = soak.soak(one, 300, 16, seed=5)
    assert soak.leaks(result) == {}
    kinds = {outcome.partition(":")[0] for outcome in result["outcomes"]}
    assert kinds == {kind.__name__ for kind in soak.KINDS}
    assert sum(result["outcomes"].values()) == 300
    # One record per request that reached the engine, however its client went.
    reasons = {record.done.reason for record in one.records}
    assert {"stop", "length", "cancelled"} <= reasons <= {"stop", "length", "cancelled", "error"}


def test_a_leak_would_be_told(soak):
    result = {"before": {"threads": 3, "resident MiB": 5}, "after": {"threads": 4, "resident MiB": 9}}
    assert soak.leaks(result) == {"threads": (3, 4)}
