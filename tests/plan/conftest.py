"""A made-up architecture, devices and model files for planning."""

import sys
import types

import numpy as np
import pytest

from luce_core.contracts import (
    ArchSpec,
    DeviceInfo,
    Equivalence,
    Field,
    Group,
    ModelSpec,
    OpImpl,
    OpLayer,
    Pages,
    PartSpec,
    Slot,
    StateLayout,
    StoredSize,
)
from luce_core.gguf import read_header
from luce_core.options import load_options
from luce_core.plan import make_plan
from luce_core.plugins import from_modules
from luce_core.testing.fake_plugins import make_plugin
from luce_core.testing.gguf_factory import write_gguf

CPU = DeviceInfo(
    "cpu", "a CPU", 2**30, 50e9, frozenset({"cpu", "avx2"}), rank=0, provenance="measured in a test"
)
GPU0 = DeviceInfo("gpu:0", "a GPU", 2**33, 900e9, frozenset({"gpu", "graphs"}), rank=10)
GPU1 = DeviceInfo("gpu:1", "a GPU", 2**34, 900e9, frozenset({"gpu", "graphs"}), rank=9)


def describe(header, cache):
    """2 layers, 2 KV heads of 8 each: 2 * 2 * 2 * 8 = 64 cache values a token; other sizes from the file."""
    window, width = header.uint("glim.window", 0), header.uint("glim.width", 8)
    kv = {"k": Field((2, width), "kv.k"), "v": Field((2, width), "kv.v")}
    groups = [Group("full")]
    pages = [Pages("kv.0", "full", 0, kv), Pages("kv.1", "full", 1, kv)]
    if window:
        groups.append(Group("near", window=window))
        pages[1] = Pages("kv.1", "near", 1, kv)
    if header.uint("glim.stride", 0):
        groups.append(Group("rare", stride=header.uint("glim.stride")))
    if header.bool("glim.pooled", False):
        pages.append(Pages("pooled", "rare", 1, {"k": Field((1, width), "kv.k")}))
    slot = Slot("conv", 0, Field((3, 16), "f32"), {"row": Field((16,), "f32")}, "shift")
    return ModelSpec(
        arch="glim",
        identity="glim-1",
        num_layers=2,
        hidden=32,
        vocab=64,
        context=header.uint("glim.context"),
        position_axes=1,
        tap_width=32,
        final_width=32,
        layout=StateLayout(tuple(groups), tuple(pages), (slot,) if header.bool("glim.slot", False) else ()),
        nextn_layout=None,
        tree=header.str("glim.tree", "any"),
        tokens={},
        parameters=1000,
        weight_bytes=1250,
        active_bytes=1000,
        prompt_parameters=500,
        details={"asked": cache.context, "types": (cache.k_type, cache.v_type)},
        stored={f"t.{n}": StoredSize(10**12, 10**12) for n in range(header.uint("glim.tables", 0))},
    )


def fail_to_describe(header, cache):
    raise KeyError("glim.heads")


def guess(name="guess", needs=frozenset()):
    return PartSpec("drafter", name, "m:make", Equivalence.BITS, needs, "guesses")


PACK = OpImpl("pack_linear", "m:p", row_invariant=True)
LINEAR = OpImpl("linear", "m:l", row_invariant=True)
LAYERS = [
    OpLayer("fast", (PACK,), Equivalence.ROUNDING, frozenset({"cpu"})),
    OpLayer("batchy", (OpImpl("linear", "m:l"),), Equivalence.ROUNDING),
    OpLayer("gpu-only", (LINEAR,), Equivalence.BITS, frozenset({"gpu", "x"})),
]


@pytest.fixture(autouse=True)
def made_up_module(monkeypatch):
    module = types.ModuleType("made_up_glim")
    module.describe = describe
    module.fail = fail_to_describe
    module.wrong = lambda header, cache: {"arch": "glim"}
    monkeypatch.setitem(sys.modules, "made_up_glim", module)


@pytest.fixture
def arch():
    def make(describe="made_up_glim:describe", chat=()):
        return make_plugin(
            "glim",
            luce_register_archs=[ArchSpec(("glim",), describe, "made_up_glim:build", chat)],
            luce_register_ops=LAYERS,
        )

    return make


@pytest.fixture
def model(tmp_path):
    def write(context=4096, **more):
        path = tmp_path / "model.gguf"
        metadata = {"general.architecture": "glim", "glim.context": context}
        metadata |= {f"glim.{name}": value for name, value in more.items()}
        write_gguf(path, metadata, {"w": np.zeros((2, 32), np.float32)})
        return read_header(path)

    return write


@pytest.fixture
def plan(arch, model):
    """Plan a made-up model: plugins and CLI options in, `BackendPlan` out."""

    def make(*more_plugins, devices=(CPU,), header=None, card=None, **cli):
        registry = from_modules([arch(), *more_plugins])
        options = load_options(registry, {k.replace("__", "."): v for k, v in cli.items()}, {}, [], card=card)
        return make_plan(options, header or model(), registry, devices)

    return make
