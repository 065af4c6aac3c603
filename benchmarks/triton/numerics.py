"""How close the layers of the Triton plugin stay to the f32 reference on real weights, token by token.

    python benchmarks/triton/numerics.py MODEL.gguf ... [--layers triton,triton-invariant] [--tokens 512]
                                         [--decoded 64] [--cache f16] [--interpret | --fibers]

Teacher-forced over one fixed text, in three ways: as a prompt, 16 rows held at a time, and row after row. For
each: the share of places with the same most likely token, the reference's gap between its first and second
where that differs (in units of its logits), the Kullback-Leibler divergence from the reference's
distribution, and the relative error of logits. The reference runs over the same type of cache, so what is
seen is what the kernels round. The tolerances stand in the plugin's README.

--interpret: without a card, `triton-portable` in Triton's interpreter, which takes minutes a forward: 32
tokens as a prompt, 16 held, one by itself. Prompts of more than 64 rows, through dense weights, are left to a
card.

--fibers: without a card, the CUDA C++ of one and of 8 rows run thread by thread (tests/simt.h of the plugin),
over the first rows of some matrices of the model; x is the norm's weight times random numbers. Relative error
of results beside float64.
"""
# ruff: noqa: E402

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

INTERPRET = {"--interpret", "--fibers"} & set(sys.argv) != set()
if INTERPRET:  # Triton reads it when it is imported
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from luce_backend_triton.few_rows import Shape
from luce_backend_triton.formats import FORMATS
from torch import Tensor

from luce_core.contracts import SeqId
from luce_core.gguf import GgufFile, read_header
from luce_core.testing.rig import ModelRig
from luce_core.text.tokenizer import Tokenizer

HOOKS = (
    "luce_arch_llama.hooks",
    "luce_arch_gemma.hooks",
    "luce_arch_qwen3.hooks",
    "luce_backend_triton.hooks",
)
HELD = 16
TEXT = """\
The river rose in the night, and by morning the lower fields were under water. Anna walked along the dike
with the old surveyor, who counted the marks on the posts and wrote the numbers in a small book. "In my
father's time," he said, "the ice came first, then the flood. Now there is no ice, and nobody knows when
to move the cattle." She asked him how often the dike had been repaired. He turned some pages. In 1887 it
broke near the mill; in 1912 and 1926 it held, but the village lost two barns. def mean(values): return
sum(values) / len(values) was what the schoolteacher had written on the board that week, to show the
children how to find the height of an average spring. They had measured 3.1, 2.8, 4.0 and 3.5 metres, so
the answer was 3.35. Water boils at 100 degrees at sea level, he told them, and at less on a mountain,
because the air presses less. The children liked the mountain better than the river. When they went home,
the road was wet, and the smaller ones were carried. At the bakery one could buy bread until noon; after
that there were only rolls. The capital of France is Paris, the capital of Norway is Oslo, and neither of
them has ever sent help to this valley.
"""


def tokens_of(path: Path, count: int) -> list[int]:
    ids = list(Tokenizer.from_metadata(read_header(path).metadata).encode(TEXT))
    return (ids * -(-count // len(ids)))[:count]


def held_logits(rig: ModelRig, seq: SeqId, text: list[int], start: int, rows: int) -> Tensor:
    """Of the rows from `start` on, `rows` at a time. Alone, one row leaves no trace."""
    found = []
    for first in range(start, len(text), rows):
        part = text[first : first + rows]
        held = rig.hold({seq: part})
        found.append(held.logits[0].cpu())
        rig.commit(held, [list(range(len(part))) if len(text) > start + 1 else []])
    return torch.cat(found)


def shown(name: str, got: Tensor, want: Tensor) -> str:
    got, want = got.double(), want.double()
    log_p, log_q = want.log_softmax(-1), got.log_softmax(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    flips = got.argmax(-1) != want.argmax(-1)
    best = want.topk(2).values
    gap = float((best[:, 0] - best[:, 1])[flips].max()) if flips.any() else 0.0
    error = float((got - want).norm() / want.norm())
    return (
        f"  {name:22} {len(want):5} {1 - float(flips.double().mean()):8.2%} {gap:8.3f} "
        f"{float(divergence.mean()):9.1e} {float(divergence.quantile(0.99)):9.1e} "
        f"{float(divergence.max()):9.1e} {error:9.1e}"
    )


def measure(path: Path, given: argparse.Namespace) -> None:
    text, device = tokens_of(path, given.tokens), "cpu" if INTERPRET else "cuda:0"
    start = given.tokens - given.decoded
    blocks = given.tokens // 16 + 8

    def rig_of(*layers: str) -> ModelRig:
        return ModelRig(
            path, *HOOKS, layers=layers, device=device, cache_type=given.cache, block_tokens=16,
            num_blocks=3 * blocks,
        )  # fmt: skip

    want = rig_of().fresh(text).cpu()
    print(f"{path.name}, {given.cache} cache, {device}{' (interpreter)' * INTERPRET}")
    print(
        f"  {'':22} {'rows':>5} {'same top':>8} {'gap':>8} {'mean KL':>9} {'p99':>9} {'max':>9} {'error':>9}"
    )
    for name in given.layers.split(","):
        rig, began = rig_of(name), time.perf_counter()
        seq = rig.open()
        print(shown(f"{name}, prompt", rig.prefill({seq: text[:start]})[seq].cpu(), want[:start]), flush=True)
        alone = start + (1 if INTERPRET else given.decoded)
        other = seq
        if not INTERPRET:
            other = rig.open()
            rig.prefill({other: text[:start]})
        rows = held_logits(rig, other, text[:alone], start, 1)
        print(shown("one row", rows, want[start:alone]), flush=True)
        rows = held_logits(rig, seq, text, start, HELD)
        print(shown(f"{HELD} held rows", rows, want[start:]), flush=True)
        print(f"  {time.perf_counter() - began:.0f} s")


# --- CUDA C++ on a CPU


ROWS = 96
"""Of a matrix."""
MATRICES = ("attn_q", "attn_v", "attn_output", "ffn_up", "ffn_down")
NORMS = {"attn_q": "attn_norm", "attn_v": "attn_norm", "ffn_up": "ffn_norm"}


def fibers(path: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "plugins/luce-backend-triton/tests"))
    import simt

    generator = torch.Generator().manual_seed(0)
    with GgufFile.open(path) as opened, tempfile.TemporaryDirectory() as folder:
        layer = opened.header.uint("{a}.block_count") // 2
        print(f"{path.name}, layer {layer}, {ROWS} rows of each matrix")
        for name in MATRICES:
            info = opened.header.tensor(f"blk.{layer}.{name}.weight")
            if info.format.name not in FORMATS:
                print(f"  {name}: {info.format.name}, which has no records")
                continue
            data = np.array(opened.raw(info.name))[:ROWS].view(np.uint8).reshape(ROWS, -1)
            exact = torch.from_numpy(np.array(info.format.dequantize(data))).double()
            x = torch.randn(8, exact.shape[1], generator=generator)
            if name in NORMS:
                x *= torch.from_numpy(np.array(opened.dequantize(f"blk.{layer}.{NORMS[name]}.weight")))
            found = []
            for rows, shape in ((1, Shape("gemv", 1, 1, 4, 2)), (8, Shape("mma", 8, 2, 2, 2))):
                bias, residual = torch.zeros(ROWS), torch.zeros(rows, ROWS)
                to = Path(folder) / f"{name} {shape.kind}"
                y = simt.product(to, info.format.name, data, x[:rows], shape, 3, bias, residual).double()
                want = x[:rows].double() @ exact.T
                found.append(f"{shape.kind} {float((y - want).norm() / want.norm()):.1e}")
            print(
                f"  {name:12} {info.format.name:5} {exact.shape[1]:5} columns: {', '.join(found)}", flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument(
        "--layers", default="triton-portable" if INTERPRET else "triton,triton-invariant,triton-portable"
    )
    parser.add_argument("--tokens", type=int, default=48 if INTERPRET else 512, help="of the text")
    parser.add_argument("--decoded", type=int, default=16 if INTERPRET else 128, help="of them, at its end")
    parser.add_argument("--cache", default="f16")
    parser.add_argument("--interpret", action="store_true")
    parser.add_argument("--fibers", action="store_true")
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    for path in given.models:
        if given.fibers:
            fibers(path)
        else:
            measure(path, given)


if __name__ == "__main__":
    main()
