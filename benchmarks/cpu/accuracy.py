"""How close each tier and llama.cpp stay to the exact tier, token by token, on the same text.

    python benchmarks/cpu/accuracy.py MODEL.gguf [--peer VENV/bin/python] [--tokens 160] [--json OUT]

Teacher-forced: a prompt, then the exact tier's own greedy text, one token per step. Per engine: share of
steps with the same top token, the exact tier's gap between first and second where the top differs (a flip
at a small gap is a tie broken the other way), and the KL divergence from the exact distribution.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from peers import file_facts, luce, machine_facts, refuse_unless_same

from luce_core.bench.peer import llama_cpp_worker
from luce_core.bench.worker import Worker

PROMPTS = (
    "The history of the city begins with a small settlement on the river, where traders",
    "def quicksort(items):\n    \"\"\"Sort a list of numbers by dividing it.\"\"\"\n    if len(items)",
    "Photosynthesis is the process by which plants use sunlight to make food. It",
    "Dear Sir or Madam, I am writing to complain about the service that I received",
)
PROMPT_TOKENS = 12


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer", help="python with llama-cpp-python")
    parser.add_argument("--no-repack", action="store_true", help="as in compare.py")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=100, help="greedy tokens per prompt")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    asked = {"threads": options.threads, "k_type": "f16", "v_type": "f16", "context": 1024}
    exact = luce(options.model, [], **asked)
    others = {name: luce(options.model, [name], **asked) for name in ("cpu-c", "cpu-c-rows", "cpu-torch")}
    if options.peer:
        others["llama.cpp"] = llama_cpp_worker(
            options.peer, options.model, repack=not options.no_repack, chunk=512, **asked,
        )
    refuse_unless_same(exact, *others.values(), flash_attention=False)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in others}
    with tempfile.TemporaryDirectory() as folder:
        for text in texts(options, exact):
            want = teacher(exact, text, Path(folder))
            for name, side in others.items():
                found[name].append(differences(want, teacher(side, text, Path(folder))))
    result = {
        **machine_facts(),
        **file_facts(options.model),
        **asked,
        "engines": {name: side.about["engine"] for name, side in others.items()},
        "steps": sum(part["steps"] for part in next(iter(found.values()))),
        "accuracy": {name: together(parts) for name, parts in found.items()},
    }
    for side in (exact, *others.values()):
        side.close()
    print(table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def texts(options: argparse.Namespace, exact: Worker) -> list[list[int]]:
    """Prompts followed by what the exact tier says."""
    from luce_core.gguf import read_header
    from luce_core.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_metadata(read_header(options.model).metadata)
    found = []
    for prompt in PROMPTS:
        ids = list(tokenizer.encode(prompt))
        exact.ask("reset", tokens=ids[:-1])
        found.append([*ids, *exact.ask("greedy", token=ids[-1], count=options.tokens)])
    return found


def teacher(side: Worker, text: list[int], folder: Path) -> np.ndarray:
    """f64[steps, vocab]"""
    path = folder / "logits.npy"
    side.ask("teacher", tokens=text, out=str(path), prompt=PROMPT_TOKENS)
    return np.load(path).astype(np.float64)


def differences(want: np.ndarray, got: np.ndarray) -> dict[str, Any]:
    top = want.argmax(-1)
    two = np.sort(want, -1)[:, -2:]
    flips = top != got.argmax(-1)
    log_p, log_q = log_softmax(want), log_softmax(got)
    return {
        "steps": len(want),
        "gaps": (two[flips, 1] - two[flips, 0]).tolist(),
        "kl": (np.exp(log_p) * (log_p - log_q)).sum(-1).tolist(),
    }


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    steps = sum(part["steps"] for part in parts)
    gaps = [gap for part in parts for gap in part["gaps"]]
    kl = [value for part in parts for value in part["kl"]]
    return {
        "agreement": 1 - len(gaps) / steps,
        "flips": len(gaps),
        "largest_gap": max(gaps, default=0.0),
        "mean_kl": float(np.mean(kl)),
        "p99_kl": float(np.quantile(kl, 0.99)),
    }


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['device']}; {result['model']}; {result['steps']} steps; commit {result['commit']}",
        f"{'':14}{'same top':>10}{'flips':>7}{'largest gap':>13}{'mean KL':>11}{'p99 KL':>11}",
    ]
    for name, row in result["accuracy"].items():
        lines.append(
            f"{name:14}{row['agreement']:10.2%}{row['flips']:7}{row['largest_gap']:13.3f}{row['mean_kl']:11.2e}{row['p99_kl']:11.2e}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
