"""Self-checks in processes of their own: beside each other, told in order, ended with who asked."""

from multiprocessing import active_children

import pytest

from luce_core.cli.self_checks import SelfCheck, side_by_side
from luce_core.contracts import DeviceInfo, Equivalence, OpLayer

SOURCE = """
import time
from pathlib import Path
from luce_core.contracts import KernelCheck
HERE = Path(__file__).parent
def waits(device):
    yield KernelCheck("first", 0.0, 0.0)
    while not (HERE / "written").exists():
        time.sleep(0.01)
    yield KernelCheck("behind the other", 0.0, 0.0)
def writes(device):
    yield KernelCheck(device, 0.0, 0.0)
    (HERE / "written").touch()
def prepares(device, options):
    (HERE / "prepared").write_text(f"{device.id} {options}")
def prepared(device):
    yield KernelCheck((HERE / "prepared").read_text(), 0.0, 0.0)
"""
DEVICE = DeviceInfo("cpu", "cpu", 1, 1.0, frozenset())


@pytest.fixture
def check(tmp_path, monkeypatch):
    """The named function of SOURCE as a self-check."""
    (tmp_path / "checks_by_side.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(name, prepare="", options=None):
        run = f"checks_by_side:{name}"
        layer = OpLayer("one", (), Equivalence.BITS, self_checks=(run,), prepare=prepare)
        return SelfCheck(layer, run, "plugin 'p'", DEVICE, options)

    return make


def whats(found):
    return [one if isinstance(one, str) else one.what for _, one in found]


def test_they_run_beside_each_other_and_are_told_in_order(check):
    found = side_by_side([check("waits"), check("writes")], 2)
    assert whats(found) == ["first", "behind the other", "cpu"]
    assert not active_children()


def test_one_at_a_time_is_told_as_it_goes_and_ended_with_who_asked(check):
    found = side_by_side([check("waits"), check("writes")], 1)
    assert next(found)[1].what == "first"
    assert len(active_children()) == 1
    found.close()
    assert not active_children()


def test_the_layer_is_made_ready_in_the_process_of_each_check(check):
    one = check("prepared", "checks_by_side:prepares", options="of the plugin")
    assert whats(side_by_side([one], 1)) == ["cpu of the plugin"]


def test_an_error_is_told_in_place_and_the_next_goes_on(check, tmp_path):
    (tmp_path / "written").touch()
    found = whats(side_by_side([check("absent"), check("waits")], 1))
    assert "'checks_by_side:absent' of op layer 'one' of plugin 'p'" in found[0]
    assert found[1:] == ["first", "behind the other"]
