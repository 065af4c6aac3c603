"""What types of the cache cost in accuracy: a text's next-token distributions over quantized keys and values,
against those over f16.

    python benchmarks/cache_types.py MODEL.gguf [--text FILE] [--tokens 2048] [--chunk 256] [--threads 2]
        [--hooks luce_arch_llama.hooks luce_backend_cpu.hooks] [--layers cpu-c] [--device cpu]
        [--types f16 q8_0 ...] [--own-attention]

For every type of keys by every type of values: the mean and the 99th percentile of KL(f16 || type) in
millinats, how often the most probable token is the same, and the perplexity of the text. The plain reference
computes all attention, so that nothing but the cache differs; with --own-attention the layers' own does.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import torch
from attrs import frozen
from torch import Tensor

from luce_core.contracts import CODECS
from luce_core.ops import attention as reference
from luce_core.testing.rig import ModelRig
from luce_core.text import Tokenizer

HOOKS = ("luce_arch_llama.hooks", "luce_backend_cpu.hooks")
TEXT = Path(__file__).parents[1] / "docs" / "architecture.md"
BLOCK = 32


@frozen
class Distance:
    """Of one text's distributions from those over f16."""

    kl: float
    kl_99: float
    """Nats."""
    same: float
    """Share of rows with the same most probable token."""
    perplexity: float


def main() -> None:
    """Measure and print a table as docs/cache-types.md has it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hooks", nargs="+", default=HOOKS)
    parser.add_argument("--layers", nargs="+", default=["cpu-c"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--own-attention", action="store_true")
    parser.add_argument("--types", nargs="+", default=["f16", *CODECS])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    want, tokens = logits(args, "f16", "f16")
    print(f"{args.model.name}, {args.text.name}, {len(tokens)} tokens, layers {' '.join(args.layers)}\n")
    print("| K | V | KL mean | KL 99 % | same first | perplexity |\n|---|---|---|---|---|---|")
    for k_type, v_type in [*itertools.product(args.types, args.types), ("f32", "f32")]:
        got = want if (k_type, v_type) == ("f16", "f16") else logits(args, k_type, v_type)[0]
        found = distance(want, got, tokens)
        print(
            f"| {k_type} | {v_type} | {1000 * found.kl:.2f} | {1000 * found.kl_99:.1f} | {found.same:.2%} "
            f"| {found.perplexity:.2f} |",
            flush=True,
        )


def logits(args: argparse.Namespace, k_type: str, v_type: str) -> tuple[Tensor, list[int]]:
    """f32[tokens, V] of every row of the text, and the text."""
    rig = ModelRig(
        args.model, *args.hooks, layers=args.layers, block_tokens=BLOCK, num_slots=1, max_held_rows=1,
        num_blocks=args.tokens // BLOCK + 4, cache_type=k_type, v_type=v_type, device=args.device,
        overlay=None if args.own_attention else {"attention": reference.attention},
    )  # fmt: skip
    tokenizer = Tokenizer.from_metadata(rig.header.metadata)
    tokens = tokenizer.encode(args.text.read_text(encoding="utf-8"))[: args.tokens]
    seq, found = rig.open(), []
    for start in range(0, len(tokens), args.chunk):
        found.append(rig.prefill({seq: tokens[start : start + args.chunk]})[seq].cpu())
    return torch.cat(found), tokens


def distance(want: Tensor, got: Tensor, tokens: list[int]) -> Distance:
    """By blocks of rows: all logits at once would be several GB."""
    divergence, same, losses = [], [], []
    for rows in torch.arange(len(tokens)).split(128):
        p, q = want[rows].float().log_softmax(-1), got[rows].float().log_softmax(-1)
        divergence.append((p.exp() * (p - q)).sum(-1))
        same.append(p.argmax(-1) == q.argmax(-1))
        kept = rows[rows < len(tokens) - 1]
        following = torch.tensor([tokens[row + 1] for row in kept.tolist()])
        losses.append(-q[: len(kept)].gather(1, following[:, None])[:, 0])
    kl = torch.cat(divergence)
    return Distance(
        float(kl.mean()), float(kl.quantile(0.99)), float(torch.cat(same).float().mean()),
        float(torch.cat(losses).mean().exp()),
    )  # fmt: skip


if __name__ == "__main__":
    main()
