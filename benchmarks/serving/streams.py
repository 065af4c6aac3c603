"""Many streams at once: tokens a second through HTTP, event-loop lag, CPU of the server.

    python benchmarks/serving/streams.py [--streams 64] [--rate 20000] [--seconds 10] [--long 200000]

The channel is scripted: it emits `--rate` tokens a second in all, from a thread of the server's process, as
the engine would. With `--long` a second client keeps sending prompts of so many characters that are rendered
and tokenized meanwhile (and refused, since they exceed the context).
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time

import httpx
from bench import LagProbe, PacedChannel, client, toy

from luce_core.testing.server import serving


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=20_000)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--long", type=int, default=0)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    rows = [measure(options) for _ in range(options.repetitions)]
    for row in rows:
        print(json.dumps({key: round(value, 3) for key, value in row.items()}))
    print("median " + json.dumps({key: round(statistics.median(r[key] for r in rows), 3) for key in rows[0]}))


def measure(options: argparse.Namespace) -> dict[str, float]:
    probe = LagProbe()
    each = int(options.rate * options.seconds / options.streams)
    with toy(context=max(32768, each + 1000)) as pipeline:
        channel = PacedChannel(options.rate, pipeline.target.backend.spec.vocab)
        with serving(pipeline, wrap=probe, channel=lambda *_: channel) as served:
            stop = threading.Event()
            long = threading.Thread(target=send_long, args=(served.url, options.long, stop))
            if options.long:
                long.start()
            cpu = time.process_time()
            got = client(served.url, streams=options.streams, max_tokens=each)
            cpu = time.process_time() - cpu
            stop.set()
            if options.long:
                long.join()
    return {
        "tokens_per_s": got["tokens"] / got["seconds"],
        "late_s": channel.late_s,
        "events": got["events"],
        "reads": got["reads"],
        "server_cpu_us_per_token": 1e6 * cpu / got["tokens"],
        "client_cpu_us_per_token": 1e6 * got["cpu_s"] / got["tokens"],
        **{f"lag_ms_{name}": value for name, value in probe.percentiles().items()},
    }


def send_long(url: str, length: int, stop: threading.Event) -> None:
    words = "the quick brown fox jumps over the lazy dog, " * (length // 45 + 1)
    body = {"messages": [{"role": "user", "content": words[:length]}], "max_tokens": 1}
    with httpx.Client(base_url=url, timeout=60) as http:
        while not stop.is_set():
            http.post("/v1/chat/completions", json=body)


if __name__ == "__main__":
    main()
