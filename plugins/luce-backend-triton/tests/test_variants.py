"""benchmarks/triton/variants.py: a setting reaches what was chosen; one that reaches nothing is told."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from luce_backend_triton import attention_cuts, executor, few_rows, nvrtc, shapes
from luce_backend_triton.product import Rows

SCRIPTS = Path(__file__).parents[3] / "benchmarks" / "triton"


@pytest.fixture
def variants(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in ("decode", "variants"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import variants

    return variants


def test_a_choice_that_was_made_is_made_anew(variants):
    room = attention_cuts.Room(132, 227 << 10, True)

    def splits():
        return attention_cuts.cut(1, 1, 128, 8, 2, 256, 2, room).splits

    assert splits() == 1
    with variants.given("attention_cuts.ALONE=64"):
        assert splits() > 1
    assert splits() == 1


def test_a_variant_may_have_several_settings_and_tuples_for_values(variants):
    with variants.given("shapes.GEMV=((4, 2, 1), (2, 2, 1)),shapes.SMALL_TILES=0,few_rows.OVERLAP=False"):
        assert shapes._gemv_cuts(1, 1, 132) == ((4, 2, 1), (2, 2, 1))
        assert not few_rows.OVERLAP
    assert shapes._gemv_cuts(1, 1, 132) != ((4, 2, 1), (2, 2, 1))
    with pytest.raises(AttributeError, match="NOTHING"), variants.given("shapes.NOTHING=1"):
        pass


class Loaded:
    """Stands for `nvrtc.Kernel`."""

    def __init__(self, image, *_args, **_named):
        self.image = image

    def launch(self, grid, threads, shared_bytes, stream, args):
        pass


@pytest.fixture
def step(variants, monkeypatch):
    """run(variant, rows) -> launches of one captured step of products on a card that is not there. Machine
    code is what the source has of IMMA: nothing else, for one row.
    """
    about = SimpleNamespace(shared_memory_per_block_optin=227 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    monkeypatch.setattr(few_rows.capability, "on", lambda _: SimpleNamespace(arch="sm_90", overlap=True))
    monkeypatch.setattr(torch.cuda, "device", lambda _: pytest.MonkeyPatch().context())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=lambda: True))
    monkeypatch.setattr(nvrtc, "Kernel", Loaded)

    def cubin(name, arch, defined, after=""):
        several = defined["X_ROWS"] > 1
        return f"{name} {several and defined.get('IMMA', 1)}".encode()

    monkeypatch.setattr(nvrtc, "cubin", cubin)
    monkeypatch.setattr(executor.GraphExecutor, "_try_to_capture", lambda self, name, prepared, work: work())

    def run(variant, rows=1, program="verify"):
        def work():
            Rows(torch.randn(rows, 256)).few("gemv")
            few_rows.kernel(0, "Q4_K", few_rows.Shape("gemv", rows, 1, 8, 2)).launch((4, 1, 1), 256, 9, 0, ())

        with variants.given(variant), variants.launches() as found:
            work()  # plain calls come first, and are not counted
            assert not found
            executor.GraphExecutor._try_to_capture(None, program, None, work)
        return found

    return run


def test_launches_of_captured_steps_are_told_apart_by_what_runs(variants, step):
    plain = step(variants.AS_IT_IS)
    assert sorted(key.split()[0] for key in plain.elements()) == ["gemv", "prepare"]
    assert step(variants.AS_IT_IS) == plain
    assert step("few_rows.OVERLAP=False") != plain
    assert step("attention_cuts.ALONE=64") == plain  # there is no attention in it
    assert step(variants.AS_IT_IS, program="prefill") == Counter()


def test_a_definition_counts_where_the_machine_code_is_another(variants, step):
    assert step("define.IMMA=0") == step(variants.AS_IT_IS)
    other = step("define.IMMA=0", rows=2)
    assert other != step(variants.AS_IT_IS, rows=2)
    said = variants.difference(step(variants.AS_IT_IS, rows=2), other)
    assert said == "1 launches for 1: gemv"
