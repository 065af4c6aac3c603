"""After warming no step meets a kernel that is not there yet, however long its text: whole engines whose
kernels are not run, only written down as Triton tells machine codes apart.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

import pytest
import torch
from attrs import evolve
from luce_backend_triton import attention, attention_cuts, hooks, kernels
from luce_backend_triton.executor import GraphExecutor
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend

from luce_core.contracts import API, DeviceInfo, PluginInfo
from luce_core.engine.warming import warm
from luce_core.hookspecs import hookimpl
from luce_core.testing.dense import write_dense_model
from luce_core.testing.drafters import ScriptedDrafter
from luce_core.testing.pipeline import EngineRig, make_pipeline

DENSE_HOOKS = "luce_core.testing.dense.hooks"
H200 = attention_cuts.Room(132, 227 << 10, True)
LONGEST = 1 << 17

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on the CPU nothing has to be compiled")


class Replay:
    """Stands for a graph: what it holds was launched when it was captured."""

    def __init__(self, work):
        self.results = work()

    def replay(self):
        pass


def code_of(function, given):
    """What Triton compiles anew for: constants, options, and of every other argument its type, whether it is
    1, and whether it is a multiple of 16; and the kernel's name.
    """
    signature = inspect.signature(function.fn)
    apart = function.kwargs["do_not_specialize"] or ()
    found = []
    for name, value in given.items():
        parameter = signature.parameters.get(name)
        if parameter is None or "constexpr" in str(parameter.annotation):
            found.append((name, value))
        else:
            found.append((name, *native_specialize_impl(CUDABackend, value, False, name not in apart, True)))
    return tuple(sorted(found, key=str)), function.fn.__name__


@pytest.fixture
def codes(monkeypatch):
    """Those of the launches since; kernels do nothing, and their results are zeros."""
    found = set()

    def run(self, *args, grid, **given):
        given.pop("warmup", None)
        found.add(code_of(self, {**dict(zip(self.arg_names, args, strict=False)), **given}))

    monkeypatch.setattr(type(kernels.prepare), "run", run)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    monkeypatch.setattr(attention, "_room", lambda *_: H200)
    monkeypatch.setattr(attention, "INTERPRETED", False)
    return found


@pytest.fixture
def rig(tmp_path, monkeypatch):
    """rig(context, sequences, drafters) -> an engine of the layer `triton` over a dense model."""
    module = ModuleType("luce_launches_hooks")
    layers = [evolve(layer, features=frozenset(), prepare="") for layer in hooks.luce_register_ops()]
    module.luce_plugin_info = hookimpl(lambda: PluginInfo(name="launches", api=API))
    module.luce_register_ops = hookimpl(lambda: layers)
    cpu = DeviceInfo("cpu", "a card that is not there", 1 << 34, 1e9)
    module.luce_register_devices = hookimpl(lambda: [cpu])
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def make(context, sequences, drafters=()):
        options = {
            "op_layer": ("triton",), "ctx_size": context, "max_sequences": sequences, "chunk": 2048,
            "cache_type_k": "f16", "cache_type_v": "f16",
        }  # fmt: skip
        path = write_dense_model(tmp_path / "dense.gguf", quant="Q8_0", layers=1)
        executor = GraphExecutor("cpu", Replay, prompts=True)
        executor.compiles = True
        made = make_pipeline(path, DENSE_HOOKS, module.__name__, options=options, drafters=drafters)
        return EngineRig(evolve(made, executor=executor))

    return make


def new(codes, before):
    """Names of what came since."""
    return sorted(name for _, name in codes - before)


@pytest.mark.parametrize("context", [4096, LONGEST])
def test_no_text_is_long_enough_to_meet_another_kernel(rig, codes, context):
    made = rig(context, 1)
    warm(made.engine)
    before = set(codes)
    length = 20
    while length < context - 8:
        text = [(7 * place + length) % 250 for place in range(length)]
        made.generate(text, max_tokens=3)
        assert not new(codes, before), f"of a prompt of {length}"
        length = 2 * length + 5


def test_no_turn_behind_a_long_text_meets_another_kernel(rig, codes):
    made = rig(LONGEST, 1)
    warm(made.engine)
    before, text = set(codes), []
    for rows in (15, 40, 100, 200, 700, 1500, 3000, 9000, 30, 60, 130, 300, 40_000, 9, 20, 50, 120, 260, 900):
        text += [(11 * place + rows) % 250 for place in range(rows)]
        text += made.generate(text, max_tokens=3)[0]
        assert not new(codes, before), f"of {rows} rows behind {len(text) - rows}"


@pytest.mark.parametrize("sequences", [3, 12])
def test_several_texts_meet_no_other_kernel(rig, codes, sequences):
    made = rig(LONGEST // 4, sequences)
    warm(made.engine)
    before = set(codes)
    for length in (7, 50, 260, 1000, 9001):
        texts = [[(7 * place + s) % 250 for place in range(length + 3 * s)] for s in range(sequences)]
        made.generate(*texts, max_tokens=3)
        assert not new(codes, before), f"of {sequences} texts of {length}"


def chain(text, capacity):
    return [(text[-1] + 1) % 250] * capacity, range(-1, capacity - 1)


def test_trees_behind_no_text_meet_another_kernel(rig, codes):
    made = rig(LONGEST, 1, [ScriptedDrafter(chain)])
    warm(made.engine)
    before = set(codes)
    for length in (9, 40, 170, 300, 900, 2500, 7000, 20_000, 100_000):
        made.generate([(7 * place + length) % 250 for place in range(length)], max_tokens=19)
        assert not new(codes, before), f"of a prompt of {length}"


@pytest.mark.parametrize("room", [H200, attention_cuts.Room(20, 64 << 10, False)], ids=["9.0", "7.5"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(8, 2, 256), (24, 4, 256), (32, 32, 128), (64, 1, 64)]
)
def test_prompts_that_come_together_have_one_tile(room, heads, kv_heads, width):
    """However many, however short, whatever lies in front."""
    found = {
        evolve(attention_cuts.cut_together(rows, seqs, places, heads, kv_heads, width, 2, room), splits=1)
        for seqs in (2, 3, 9, 32)
        for rows in (seqs, 5 * seqs, 2048)
        for places in (256, 4096, 1 << 18)
    }
    assert len(found) == 1
    assert len({attention_cuts.searched(seqs) for seqs in range(2, 33)}) == 1
    assert attention_cuts.searched(33) == 64
