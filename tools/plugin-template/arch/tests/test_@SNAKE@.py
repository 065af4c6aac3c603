"""The core's contract kit on a small random model, and one comparison with plain torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from luce_core.testing.arch import ArchContract
from luce_core.testing.gguf_factory import write_gguf
from luce_core.testing.plugin import PluginContract
from luce_core.testing.rig import ModelRig

HOOKS = "@MODULE@.hooks"
LAYERS, WIDTH, HEADS, KV_HEADS, DIM, FFN, VOCAB, EPS = 2, 32, 4, 2, 8, 48, 64, 1e-5


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    dice = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return dice.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)

    made = {
        "token_embd.weight": matrix(VOCAB, WIDTH),
        "output.weight": matrix(VOCAB, WIDTH),
        "output_norm.weight": 1 + matrix(WIDTH),
    }
    for layer in range(LAYERS):
        blk = f"blk.{layer}."
        made |= {
            f"{blk}attn_norm.weight": 1 + matrix(WIDTH),
            f"{blk}attn_q.weight": matrix(HEADS * DIM, WIDTH),
            f"{blk}attn_k.weight": matrix(KV_HEADS * DIM, WIDTH),
            f"{blk}attn_v.weight": matrix(KV_HEADS * DIM, WIDTH),
            f"{blk}attn_output.weight": matrix(WIDTH, HEADS * DIM),
            f"{blk}ffn_norm.weight": 1 + matrix(WIDTH),
            f"{blk}ffn_gate.weight": matrix(FFN, WIDTH),
            f"{blk}ffn_up.weight": matrix(FFN, WIDTH),
            f"{blk}ffn_down.weight": matrix(WIDTH, FFN),
        }
    return made


def write_model(folder: Path) -> Path:
    keys = {
        "block_count": LAYERS,
        "vocab_size": VOCAB,
        "embedding_length": WIDTH,
        "context_length": 256,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": EPS,
    }
    metadata = {"general.architecture": "@NAME@"} | {f"@NAME@.{key}": value for key, value in keys.items()}
    return write_gguf(folder / "small.gguf", metadata, tensors())


class TestPlugin(PluginContract):
    hooks = HOOKS


class TestArchitecture(ArchContract):
    hooks = HOOKS
    optional_tensors = frozenset({"output.weight"})
    tree_nodes = 3

    def make_model(self, folder: Path) -> Path:
        return write_model(folder)


# --- the same network in plain torch: no cache, no ops, one sequence


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


def rope(x: Tensor) -> Tensor:
    """x [H, T, D]; pairs lie half a head apart."""
    half = DIM // 2
    angle = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    low, high = x[..., :half], x[..., half:]
    turned = (low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin())
    return torch.cat(turned, dim=-1)


def reference(tokens: list[int]) -> Tensor:
    w = {name.removesuffix(".weight"): torch.from_numpy(value) for name, value in tensors().items()}
    x = w["token_embd"][tokens]
    future = torch.triu(torch.full((len(tokens), len(tokens)), -torch.inf), 1)
    for layer in range(LAYERS):
        blk = f"blk.{layer}."
        normed = rms(x, w[f"{blk}attn_norm"])
        q, k, v = (
            (normed @ w[f"{blk}attn_{name}"].T).view(len(tokens), -1, DIM).transpose(0, 1) for name in "qkv"
        )
        k, v = (item.repeat_interleave(HEADS // KV_HEADS, 0) for item in (rope(k), v))
        weight = torch.softmax(rope(q) @ k.transpose(1, 2) * DIM**-0.5 + future, -1)
        y = (weight @ v).transpose(0, 1).reshape(len(tokens), -1)
        x = x + y @ w[f"{blk}attn_output"].T
        normed = rms(x, w[f"{blk}ffn_norm"])
        gate = torch.nn.functional.silu(normed @ w[f"{blk}ffn_gate"].T)
        x = x + (gate * (normed @ w[f"{blk}ffn_up"].T)) @ w[f"{blk}ffn_down"].T
    return rms(x, w["output_norm"]) @ w["output"].T


def test_logits_equal_those_of_plain_torch(tmp_path: Path) -> None:
    tokens = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    got = ModelRig(write_model(tmp_path), HOOKS).fresh(tokens)
    wanted = reference(tokens)
    assert (got - wanted).abs().max() <= 2e-5 * wanted.abs().max()
