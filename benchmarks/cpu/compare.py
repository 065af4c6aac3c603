"""The model alone, without an engine around it, beside llama.cpp: repetitions in turn.

    python benchmarks/cpu/compare.py MODEL.gguf --peer VENV/bin/python [--threads 2] [--json OUT]

`--peer` is the Python of a venv with llama-cpp-python; without it only this project is measured. Each row
is the median of the repetitions with their range; a ratio compares medians of the same run. The box matters:
run it on an idle one. `luce-core bench --peer` measures the whole engine; the difference is what that costs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

from attrs import asdict
from peers import file_facts, luce, machine_facts, refuse_unless_same

from luce_core.bench.conditions import gain
from luce_core.bench.peer import llama_cpp_worker
from luce_core.bench.render import number
from luce_core.bench.stats import spread
from luce_core.bench.worker import Worker

MIB = 2**20
CHUNK = 512


def main() -> None:
    options = arguments()
    kinds = {"k_type": options.kv, "v_type": options.kv}
    asked = {"threads": options.threads, "context": options.context, **kinds}
    sides = {"luce": luce(options.model, options.layers, **asked)}
    if options.peer:
        sides["llama.cpp"] = llama_cpp_worker(
            options.peer, options.model, repack=not options.no_repack, chunk=CHUNK, **asked,
        )
        refuse_unless_same(*sides.values())
    rng = random.Random(0)
    result = {
        **machine_facts(),
        **file_facts(options.model),
        **asked,
        "batch": 1,
        "repetitions": options.repetitions,
        "engines": {name: dict(side.about) for name, side in sides.items()},
        "prefill": prefill(sides, options, rng),
        "decode": decode(sides, options, rng),
        "memory": memory(sides, options),
    }
    for side in sides.values():
        side.close()
    print(table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer", help="python with llama-cpp-python")
    parser.add_argument(
        "--no-repack",
        action="store_true",
        help="llama.cpp without rearranged weights, for where its AMX code (0.3.36) dies of SIGILL",
    )
    parser.add_argument("--layers", type=lambda text: text.split(",") if text else [], default=["cpu-c"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv", default="f16", choices=["f16", "f32", "bf16"])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument(
        "--depths", type=lambda text: [int(part) for part in text.split(",")], default=[0, 1024, 3072],
    )
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--decode", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def prefill(sides: dict[str, Worker], options: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """Tokens per second of one chunk behind `depth` tokens."""
    found: dict[str, Any] = {}
    for depth in options.depths:
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(options.repetitions):
            text = tokens(rng, depth + options.prefill)
            for name, side in sides.items():
                side.ask("reset", tokens=text[:depth])
                rates[name].append(options.prefill / side.ask("prefill", tokens=text[depth:]))
        found[str(depth)] = {name: asdict(spread(values)) for name, values in rates.items()}
    return found


def decode(sides: dict[str, Worker], options: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """Tokens per second of greedy decoding behind `depth` tokens: of each repetition, the median token."""
    found: dict[str, Any] = {}
    for depth in options.depths:
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(options.repetitions):
            text = tokens(rng, max(1, depth))
            for name, side in sides.items():
                side.ask("reset", tokens=text)
                rates[name].append(1 / statistics.median(side.ask("decode", token=7, count=options.decode)))
        found[str(depth)] = {name: asdict(spread(values)) for name, values in rates.items()}
    return found


def memory(sides: dict[str, Worker], options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for name, side in sides.items():
        now = side.ask("memory")
        found[name] = {
            **now, "imports": side.about["imports_bytes"], "model": now["rss"] - side.about["imports_bytes"],
        }
    kv = sides["luce"].about["kv_bytes"]
    return {"file": options.model.stat().st_size, "kv": kv, **found}


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 40000) for _ in range(count)]


def cell(values: dict[str, float]) -> str:
    return f"{number(values['median'])} ({number(values['low'])}-{number(values['high'])})"


def gain_lines(result: dict[str, Any], other: str) -> list[str]:
    def ratio(what: str, depth: str) -> float:
        row = result[what][depth]
        return row["luce"]["median"] / row[other]["median"]

    return [
        f"gain over {other} at {depth}: {gain(ratio('prefill', depth), ratio('decode', depth)):.2f}"
        for depth in result["prefill"]
    ]


def table(result: dict[str, Any]) -> str:
    names = list(result["engines"])
    columns = [*names, "ratio"] if len(names) > 1 else names
    lines = [
        f"{result['device']}; {result['model']}; kv {result['k_type']}; context {result['context']}; "
        f"{result['threads']} threads; batch 1; commit {result['commit']}; load {result['load']:.2f}",
        *(f"  {name}: {result['engines'][name]['engine']}" for name in names),
        f"{'tokens/s: median (range)':28}" + "".join(f"{name:>26}" for name in columns),
    ]
    for what in ("prefill", "decode"):
        for depth, row in result[what].items():
            cells = [cell(row[name]) for name in names]
            ratios = "".join(f"{row[names[0]]['median'] / row[other]['median']:26.2f}" for other in names[1:])
            lines.append(f"{what + ' at ' + depth:28}" + "".join(f"{text:>26}" for text in cells) + ratios)
    lines += [line for other in names[1:] for line in gain_lines(result, other)]
    room = result["memory"]
    allowed = 1.5 * room["file"] + room["kv"]
    lines.append(f"resident for the model, MiB (1.5 x file + KV = {allowed / MIB:.0f})")
    lines += [
        f"  {name}: {room[name]['model'] / MIB:.0f} (+ {room[name]['imports'] / MIB:.0f} for the libraries)"
        for name in names
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
