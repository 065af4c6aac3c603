"""What HTTP costs one client: the engine's time per token alone and while a client reads a stream, in turn.

    python benchmarks/serving/overhead.py [--channel thread|child] [--rate 1500] [--repetitions 30]

The model's forward is replaced by work of a fixed length that holds no interpreter lock, set so that the
engine alone makes about `--rate` tokens a second. The engine lives in a process of its own, as in
`serve`, or on a thread of the server's (`--no-engine-process`). Times are those at which the model's
forwards begin, by the machine's clock, and the median steps of runs next to each other are compared: on a
busy machine most steps still run undisturbed, while a rate does not. The client is a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from bench import Pace, client, in_a_child, paced_registry, toy

from luce_core.contracts import Done, EngineEvent, GenerationRequest, SamplingParams
from luce_core.testing.server import Served, on_a_thread, serving


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--channel", choices=("thread", "child"), default="child")
    parser.add_argument("--rate", type=float, default=1500)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repetitions", type=int, default=150)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pace"
        pace = Pace(path)
        channel: Any = partial(in_a_child, partial(paced_registry, path))
        if options.channel == "thread":
            paced_registry(path)  # the toy of this process is paced from here on
            channel = on_a_thread
        with toy(max_sequences=4, threads=1) as pipeline, serving(pipeline, channel=channel) as served:
            compare(served, pace, options)


def compare(served: Served, pace: Pace, options: argparse.Namespace) -> None:
    runs = {"engine alone": alone, "through HTTP": streamed}
    steps: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(8):  # the first ones are not typical
        alone(served, options.tokens)
        step = statistics.median(lengths(pace))
        if turn > 1:
            pace.seconds = max(0.0, pace.seconds + 1 / options.rate - step)
    print(f"{'work added':14}{1e6 * pace.seconds:7.0f} us a token")
    shares = []
    for _ in range(options.repetitions):
        middles: dict[str, list[float]] = {name: [] for name in runs}
        for name in ("engine alone", "through HTTP", "through HTTP", "engine alone"):  # drift cancels out
            before = time.process_time()
            runs[name](served, options.tokens)
            cpu[name].append((time.process_time() - before) / options.tokens)
            found = lengths(pace)
            steps[name] += found
            middles[name].append(statistics.median(found))
        shares.append(100 * (sum(middles["through HTTP"]) / sum(middles["engine alone"]) - 1))
    report(steps, cpu, shares)


def lengths(pace: Pace) -> list[float]:
    """Of the steps since the last call, but for the one that read the prompt."""
    return [after - before for before, after in itertools.pairwise(pace.take()[1:])]


def report(steps: dict[str, list[float]], cpu: dict[str, list[float]], shares: list[float]) -> None:
    """Quartiles of the steps, and what HTTP adds in a repetition."""
    for name, one in steps.items():
        low, middle, high = (1e6 * step for step in statistics.quantiles(one, n=4))
        mean, used = 1e6 * statistics.fmean(one), 1e6 * statistics.median(cpu[name])
        print(
            f"{name:14}{middle:7.0f} us a token ({low:.0f}-{high:.0f}, mean {mean:.0f}), "
            f"{used:.0f} us of CPU in the server"
        )
    low, high = median_within(shares)
    print(
        f"HTTP costs {statistics.median(shares):.1f} % of decode time "
        f"({low:.1f} to {high:.1f} % with 95 % confidence, {len(shares)} repetitions)"
    )


def median_within(values: list[float]) -> tuple[float, float]:
    """Where the true median lies with 95 % confidence: ranks around the middle, by the binomial law."""
    ordered, reach = sorted(values), 0.98 * math.sqrt(len(values))
    first = max(0, math.floor(len(values) / 2 - reach))
    return ordered[first], ordered[len(values) - 1 - first]


def alone(served: Served, tokens: int) -> None:
    """Tokens straight from the channel."""
    ended = threading.Event()

    def sink(event: EngineEvent) -> None:
        if isinstance(event, Done):
            ended.set()

    params = SamplingParams(temperature=0.0)
    request: Any = GenerationRequest(f"alone{time.perf_counter()}", (1, 2, 3), tokens, params)
    served.service.channel.submit(request, sink)
    ended.wait()


def streamed(served: Served, tokens: int) -> None:
    """The same through a streamed answer."""
    client(served.url, streams=1, max_tokens=tokens)


if __name__ == "__main__":
    main()
