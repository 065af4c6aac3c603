"""What HTTP costs one client: the engine's time per token alone and while a client reads a stream, in turn.

    python benchmarks/serving/overhead.py [--channel thread|child] [--rate 1500] [--repetitions 30]

The model's forward is replaced by work of a fixed length that holds no interpreter lock, set so that the
engine alone makes about `--rate` tokens a second. The engine lives in a process of its own, as in
`serve`, or on a thread of the server's (`--no-engine-process`). There, times are taken where the engine
hands its tokens over, and the median of all steps is compared: on a busy machine most steps still run
undisturbed, while a rate does not. Of the child, each answer's mean by its own clock is known. The client
is a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import threading
import time
from functools import partial
from typing import Any

from bench import client, in_a_child, pace_backend, paced_registry, toy

from luce_core.contracts import Done, EngineEvent, GenerationRequest, SamplingParams, Tokens
from luce_core.testing.server import Served, serving

OWN_S = 150e-6  # about what a step of the engine takes without a model


class Watch:
    """Times of the tokens of every request that passes the channel."""

    def __init__(self, channel: Any, mean: bool) -> None:
        self.mean = mean
        self.steps: list[float] = []
        self._submit = channel.submit
        channel.submit = self

    def __call__(self, request: GenerationRequest, sink: Any) -> None:
        times: list[float] = []

        def timed(event: EngineEvent) -> None:
            sink(event)
            if isinstance(event, Tokens):
                times.append(time.perf_counter())
            elif isinstance(event, Done) and self.mean:
                self.steps.append(event.timings["decode_ms"] / 1e3 / (event.usage["completion_tokens"] - 1))
            elif isinstance(event, Done):
                self.steps += [after - before for before, after in itertools.pairwise(times)]

        self._submit(request, timed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--channel", choices=("thread", "child"), default="thread")
    parser.add_argument("--rate", type=float, default=1500)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--repetitions", type=int, default=30)
    options = parser.parse_args()
    with toy(max_sequences=4, threads=1) as pipeline:
        if options.channel == "child":
            registry = partial(paced_registry, 1 / options.rate - OWN_S)
            with serving(pipeline, channel=partial(in_a_child, registry)) as served:
                compare(served, options)
        else:
            with serving(pipeline) as served:
                backend = served.engine.programs.backend
                pace_backend(backend, max(0.0, 1 / options.rate - OWN_S))
                compare(served, options)


def compare(served: Served, options: argparse.Namespace) -> None:
    watch = Watch(served.service.channel, mean=options.channel == "child")
    steps: dict[str, list[float]] = {"engine alone": [], "through HTTP": []}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    alone(served, options.tokens)
    for _ in range(options.repetitions):
        for name, run in (("engine alone", alone), ("through HTTP", streamed)):
            watch.steps, before = [], time.process_time()
            run(served, options.tokens)
            cpu[name].append((time.process_time() - before) / options.tokens)
            steps[name] += watch.steps
    report(steps, cpu)


def report(steps: dict[str, list[float]], cpu: dict[str, list[float]]) -> None:
    """Quartiles of the steps, and what HTTP adds to each."""
    found = {name: [1e6 * step for step in statistics.quantiles(one, n=4)] for name, one in steps.items()}
    for name, (low, middle, high) in found.items():
        used = 1e6 * statistics.median(cpu[name])
        print(
            f"{name:14}{middle:7.0f} us a token ({low:.0f}-{high:.0f}), {used:.0f} us of CPU in this process"
        )
    shares = [100 * (http / own - 1) for own, http in zip(*found.values(), strict=True)]
    print(f"HTTP costs {shares[1]:.1f} % of decode time (lower quartile {shares[0]:.1f} %)")


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
