"""A network of one layer, written here so that the core's suite needs no plugin."""

from __future__ import annotations

import numpy as np
import pytest

from luce_core.contracts import (
    AttentionSpec,
    Field,
    Group,
    ModelPlan,
    ModelSpec,
    Pages,
    Slot,
    StateLayout,
    StateSizes,
)
from luce_core.testing.gguf_factory import write_gguf

WIDTH, VOCAB = 8, 12
LAYOUT = StateLayout(
    groups=(Group("full"),),
    pages=(Pages("kv", "full", 0, {"k": Field((1, WIDTH), "kv.k"), "v": Field((1, WIDTH), "kv.v")}),),
    slots=(Slot("conv", 0, Field((2, WIDTH), "f32"), {"row": Field((WIDTH,), "f32")}, "shift"),),
)


class OneLayer:
    nextn = None

    def __init__(self, spec, weights, ops):
        self.ops = ops
        self.table = weights.linear("token_embd")
        self.norm = weights.norm("norm", 1e-5)
        self.qkv = weights.group("", "q", "k", "v", fused="qkv", rows=(WIDTH,) * 3)
        self.out = weights.linear("out")
        self.conv = weights.vec("conv")
        self.kv, self.slot = weights.region("kv"), weights.slot("conv")
        self.attention = AttentionSpec(0, 1, 1, WIDTH, WIDTH, WIDTH**-0.5, None)
        self.head = weights.linear("output", "token_embd")

    def trunk(self, batch, final=None):
        ops = self.ops
        x = ops.embed(batch, self.table, scale=2.0)
        q, k, v = ops.norm_linear(x, self.norm, self.qkv)
        k = ops.conv_window(batch, k, self.conv, self.slot)
        y = ops.attention(batch, q, k, v, self.kv, self.attention)
        x = ops.linear_out(y, self.out, residual=x)
        ops.tap(batch, 0, x)
        return x

    def logits(self, final):
        return self.ops.head(final, self.norm, self.head)


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    names = {"token_embd": (VOCAB, WIDTH), "norm": (WIDTH,), "out": (WIDTH, WIDTH), "conv": (WIDTH, 3)}
    names |= dict.fromkeys("qkv", (WIDTH, WIDTH))
    return {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in names.items()}


@pytest.fixture
def write(tmp_path, tensors):
    """write(**changes to tensors; None drops one) -> path"""

    def write(changes=None, name="one.gguf", quant=None):
        found = {k: v for k, v in {**tensors, **(changes or {})}.items() if v is not None}
        return write_gguf(tmp_path / name, {"general.architecture": "one"}, found, quant=quant)

    return write


@pytest.fixture
def sizes():
    return StateSizes(4, {"one/full": 20}, num_slots=3, max_held_rows=5, k_type="f32", v_type="f16")


@pytest.fixture
def plan():
    """plan(path, **changes) -> ModelPlan"""

    def plan(path, device=("cpu",), **changes):
        spec = ModelSpec(
            arch="one",
            identity="",
            num_layers=1,
            hidden=WIDTH,
            vocab=VOCAB,
            context=64,
            position_axes=1,
            tap_width=WIDTH,
            final_width=WIDTH,
            layout=LAYOUT,
            nextn_layout=None,
            tree="any",
            tokens={},
        )
        return ModelPlan("one", "target", str(path), spec, "a test", device, **changes)

    return plan


@pytest.fixture
def build():
    return OneLayer
