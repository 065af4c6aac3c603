"""What depends on the compute capability, and cards that are taken for older ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from luce_backend_triton import attention, capability, devices, nvrtc
from luce_backend_triton.capability import Ability
from luce_backend_triton.devices import Card
from luce_backend_triton.options import TritonOptions

from luce_core.contracts import DeviceInfo
from luce_core.errors import UsageError

H200 = Card(0, "NVIDIA H200", 150_000_000_000, 132, (9, 0), 4.917e12)
TITAN = Card(0, "TITAN V", 12 << 30, 80, (7, 0), 6.5e11)
CUDA = SimpleNamespace(type="cuda", index=None)
FIRST = DeviceInfo("cuda:0", "a card", 1 << 30, 1.0)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """Nothing that was found out before counts, or is kept."""
    monkeypatch.setattr(capability, "_told", [])
    monkeypatch.delenv(capability.VARIABLE, raising=False)
    for found in (capability._on, capability._from_environment):
        found.cache_clear()
    yield
    for found in (capability._on, capability._from_environment):
        found.cache_clear()


@pytest.fixture
def card(monkeypatch):
    """-> makes a card the only one there is, with a torch built for `archs`."""

    def make(one, *archs):
        monkeypatch.setattr(devices, "cards", lambda: () if one is None else (one,))
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(archs))

    return make


@pytest.mark.parametrize(
    ("number", "abilities"),
    [
        ((6, 1), set()),
        ((7, 0), {"atomics"}),
        ((7, 5), {"atomics", "mma"}),
        ((8, 0), {"atomics", "mma", "matrix", "bf16"}),
        ((8, 9), {"atomics", "mma", "matrix", "bf16"}),
        ((9, 0), {"atomics", "mma", "matrix", "bf16", "overlap"}),
        ((12, 1), {"atomics", "mma", "matrix", "bf16", "overlap"}),
    ],
)
def test_abilities(number, abilities):
    ability = Ability(number)
    every = ("atomics", "mma", "matrix", "bf16", "overlap")
    assert {name for name in every if getattr(ability, name)} == abilities
    features = frozenset({"cuda", "gpu", f"sm_{number[0]}{number[1]}"})
    assert capability.of_features(features) == ability


def test_a_card_is_what_it_is_unless_it_is_taken_for_another(card, monkeypatch):
    card(H200)
    assert capability.on(CUDA) == Ability((9, 0))
    assert capability.on(CUDA).arch == "sm_90"
    assert capability.on(torch.device("cpu")) == Ability((9, 0))
    monkeypatch.setenv(capability.VARIABLE, "7.5")
    capability._from_environment.cache_clear()
    assert capability.on(CUDA).arch == "compute_75"
    assert not capability.on(torch.device("cpu")).matrix
    assert not attention.room_of(torch.device("cpu")).matrix
    monkeypatch.setenv(capability.VARIABLE, "9.0")
    capability._from_environment.cache_clear()
    assert capability.on(CUDA).arch == "sm_90"


def test_what_the_environment_says_is_read_strictly(monkeypatch):
    monkeypatch.setenv(capability.VARIABLE, "turing")
    with pytest.raises(UsageError, match="LUCE_TRITON_CAPABILITY: 'turing' is no compute capability"):
        capability.forced()


def test_an_option_tells_the_process_that_runs(card):
    card(H200, "sm_80", "sm_90")
    capability.prepare(FIRST, TritonOptions())
    assert capability.on(CUDA).arch == "sm_90"
    capability.prepare(FIRST, TritonOptions(capability="8.6"))
    assert capability.on(CUDA).arch == "compute_86"


def test_a_card_that_was_only_planned_for_runs_nothing(card):
    card(None)
    with pytest.raises(UsageError, match="'cuda:0' is not there: --triton-capability made it up"):
        capability.prepare(FIRST, TritonOptions(capability="7.5"))


def test_kernels_of_a_newer_card_are_refused(card):
    card(TITAN, "sm_70")
    with pytest.raises(UsageError, match=r"7\.5 asks for kernels that 'TITAN V', .* 7\.0, cannot"):
        capability.prepare(FIRST, TritonOptions(capability="7.5"))
    capability.prepare(FIRST, TritonOptions(capability="6.1"))


def test_a_torch_without_kernels_for_the_card_is_said(card):
    card(TITAN, "sm_75", "sm_80", "compute_120")
    with pytest.raises(UsageError, match=r"for 'TITAN V'.*it has sm_75, sm_80, compute_120\. .*12\.6"):
        capability.prepare(FIRST, None)
    card(TITAN)
    with pytest.raises(UsageError, match="it has none for any card"):
        capability.prepare(FIRST, None)


@pytest.mark.parametrize(
    ("name", "number", "runs"),
    [
        ("sm_86", (8, 9), True), ("sm_86", (8, 0), False), ("sm_80", (9, 0), False), ("sm_90a", (9, 0), True),
        ("compute_90", (12, 0), True), ("compute_90", (8, 9), False), ("sm_120", (12, 1), True),
    ],
)  # fmt: skip
def test_which_code_of_torch_runs_where(name, number, runs):
    assert capability.runs_on(name, number) is runs


@pytest.mark.skipif(not nvrtc.nvrtc("compute_75"), reason="no NVRTC")
def test_cuda_is_compiled_as_for_the_older_card_and_left_to_the_driver():
    """Copies that run ahead, and the larger products, are what 7.5 lacks."""
    from luce_backend_triton import few_rows
    from luce_backend_triton.few_rows import Shape
    from luce_backend_triton.formats import FORMATS

    parts = nvrtc.parts(few_rows.FRONTS["mma"], "mma")
    source = "".join((nvrtc.SOURCES / part).read_text() for part in parts)
    defined = few_rows.defines(FORMATS["Q4_K"], Shape("mma", 8, 1, 4, 2))
    shown = {arch: nvrtc.compile_cuda(source, "mma", arch, defined) for arch in ("compute_75", "compute_80")}
    assert [b".target sm_75" in shown["compute_75"], b".target sm_80" in shown["compute_80"]] == [True, True]
    for word in (b"cp.async", b"m16n8k16"):
        assert word not in shown["compute_75"]
        assert word in shown["compute_80"]
