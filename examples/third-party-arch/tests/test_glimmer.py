"""The contract kit on glimmer, and its formula in numpy."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from luce_core.errors import ModelFormatError
from luce_core.gguf import GgufFile
from luce_core.testing.arch import ArchContract
from luce_core.testing.gguf_factory import write_gguf
from luce_core.testing.plugin import PluginContract
from luce_core.testing.rig import ModelRig

HOOKS = "luce_arch_glimmer.hooks"


def write_model(path: Path, **options) -> Path:
    script = Path(__file__).parents[1] / "make_model.py"
    spec = importlib.util.spec_from_file_location("make_model", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.write_model(path, **options)


class TestGlimmerPlugin(PluginContract):
    hooks = HOOKS


class TestGlimmer(ArchContract):
    hooks = HOOKS
    tree_nodes = 5

    def make_model(self, folder: Path) -> Path:
        return write_model(folder / "glimmer.gguf")


def rms(x, weight):
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def silu(x):
    return x / (1 + np.exp(-x))


def turned(x):
    """RoPE on [T, H, 16], halves."""
    angle = np.arange(len(x))[:, None] * 1e4 ** (-np.arange(8) / 8)
    z = (x[..., :8] + 1j * x[..., 8:]) * np.exp(1j * angle)[:, None]
    return np.concatenate([z.real, z.imag], axis=-1)


def forward(ids, w):
    """Logits of every row in float64."""
    x = w["token_embd"][ids]
    count = len(ids)
    for layer in range(2):
        t = {name.removeprefix(f"blk.{layer}."): value for name, value in w.items()}
        n = rms(x, t["norm"])
        q = turned((n @ t["attn_q"].T).reshape(count, 4, 16))
        k = turned((n @ t["attn_k"].T).reshape(count, 2, 16))
        v = (n @ t["attn_v"].T).reshape(count, 2, 16)
        attended = np.zeros((count, 4, 16))
        for row in range(count):
            for head in range(4):
                scores = k[: row + 1, head // 2] @ q[row, head] / 4
                weight = np.exp(scores - scores.max())
                attended[row, head] = weight / weight.sum() @ v[: row + 1, head // 2]
        rows = np.concatenate([np.zeros((3, 64)), n @ t["conv_in"].T])
        conv = sum(rows[i : i + count] * t["conv"][:, i] for i in range(4))
        mlp = silu(n @ t["ffn_gate"].T) * (n @ t["ffn_up"].T)
        x = (
            x
            + attended.reshape(count, 64) @ t["attn_output"].T
            + mlp @ t["ffn_down"].T
            + silu(conv) @ t["conv_out"].T
        )
    return rms(x, w["output_norm"]) @ w["token_embd"].T


@pytest.mark.parametrize("quant", [None, "Q8_0"])
def test_logits_are_those_of_the_formula(tmp_path, quant):
    path = write_model(tmp_path / "glimmer.gguf", quant=quant)
    with GgufFile.open(path) as file:
        names = list(file.header.tensors)
        weights = {name.removesuffix(".weight"): file.dequantize(name).astype(np.float64) for name in names}
        formats = {file.header.tensors[name].format.name for name in names}
    assert formats == {"F32", quant or "F32"}
    ids = np.random.default_rng(1).integers(0, 250, 40)
    want = forward(ids, weights)
    got = ModelRig(path, HOOKS).fresh(ids.tolist()).numpy()
    assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max()


def test_a_kernel_out_of_range_is_named(tmp_path):
    path = write_model(tmp_path / "glimmer.gguf")
    with GgufFile.open(path) as file:
        metadata = {**file.header.metadata, "glimmer.conv_kernel": 1}
        tensors = {name: np.array(file.dequantize(name)) for name in file.header.tensors}
    broken = write_gguf(tmp_path / "broken.gguf", metadata, tensors)
    with pytest.raises(ModelFormatError, match=r"'glimmer.conv_kernel' is the number 1"):
        ModelRig(broken, HOOKS)
