"""What HTTP costs one client: tokens a second of the engine alone and through a stream, in turn.

    python benchmarks/serving/overhead.py [--rate 1500] [--tokens 3000] [--repetitions 7]

The model's forward is replaced by work of a fixed length that holds no interpreter lock, set so that the
engine alone makes about `--rate` tokens a second. The client is a process of its own.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from typing import Any

from bench import client, pace_backend, toy

from luce_core.contracts import Done, EngineEvent, GenerationRequest, SamplingParams
from luce_core.testing.server import Served, serving


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=1500)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    with toy(max_sequences=4) as pipeline, serving(pipeline) as served:
        backend = served.engine.programs.backend
        pace_backend(backend, 0.0)
        own_s = statistics.median(1 / alone(served, options.tokens)[0] for _ in range(3))
        pace_backend(backend, max(0.0, 1 / options.rate - own_s))
        print(f"a step of the engine without a model: {own_s * 1e6:.0f} us")
        rows: dict[str, list[tuple[float, float]]] = {"engine alone": [], "through HTTP": []}
        for _ in range(options.repetitions):
            rows["engine alone"].append(alone(served, options.tokens))
            rows["through HTTP"].append(streamed(served, options.tokens))
        shares = [1 - http[0] / own[0] for own, http in zip(*rows.values(), strict=True)]
    for name, found in rows.items():
        rate, cpu = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"{name:14}{rate:9.1f} tokens/s {cpu * 1e6:7.0f} us of CPU a token (this process)")
    spread = f"{min(shares) * 100:.1f} to {max(shares) * 100:.1f}"
    print(f"HTTP costs {statistics.median(shares) * 100:.1f} % of decode time ({spread})")


def alone(served: Served, tokens: int) -> tuple[float, float]:
    """(tokens/s between first and last, CPU seconds a token) straight from the channel."""
    times: list[float] = []
    ended = threading.Event()

    def sink(event: EngineEvent) -> None:
        times.append(time.perf_counter())
        if isinstance(event, Done):
            ended.set()

    params = SamplingParams(temperature=0.0)
    cpu = time.process_time()
    request: Any = GenerationRequest(f"alone{time.perf_counter()}", (1, 2, 3), tokens, params)
    served.service.channel.submit(request, sink)
    ended.wait()
    return (tokens - 1) / (times[-2] - times[1]), (time.process_time() - cpu) / tokens


def streamed(served: Served, tokens: int) -> tuple[float, float]:
    """The same through a streamed answer."""
    cpu = time.process_time()
    got = client(served.url, streams=1, max_tokens=tokens)
    return (got["tokens"] - 1) / got["seconds"], (time.process_time() - cpu) / tokens


if __name__ == "__main__":
    main()
