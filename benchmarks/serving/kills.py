"""Kill the engine's process again and again under load, and count what its clients saw.

    python benchmarks/serving/kills.py [MODEL] --kills 200 --clients 8

Starts `luce-core serve` on a free port, keeps `--clients` requests in flight (streamed and whole, short and
long), kills the engine with SIGKILL at a random moment, and waits until a request is answered again. Prints
how long that took, how every request ended, and what the server's process holds (descriptors, threads,
memory) after ten recoveries and after the last. A stream that ends without its last event, an answer
that is neither complete nor an error in the API's form, and a descriptor or thread more than at first are
failures: the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import Any

import httpx
import psutil

URL = re.compile(r"at (http://\S+)/v1")
RETRY = {429, 503}


class Load:
    """Clients that ask for ever; `ends` counts how their requests ended."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.ends: Counter[str] = Counter()
        self.random = random.Random(seed)
        self.answered_s = 0.0
        self.stop = False

    async def client(self) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=120) as http:
            while not self.stop:
                stream = self.random.random() < 0.5
                body = {
                    "messages": [{"role": "user", "content": f"Count to {self.random.randint(3, 99)}."}],
                    "max_tokens": self.random.choice((4, 16, 64, 256)),
                    "stream": stream,
                }
                end = await (self.streamed(http, body) if stream else self.whole(http, body))
                self.ends[end] += 1
                if end == "answered":
                    self.answered_s = time.monotonic()
                elif end.startswith("refused"):
                    await asyncio.sleep(0.1)

    async def whole(self, http: httpx.AsyncClient, body: dict[str, Any]) -> str:
        answer = await http.post("/v1/chat/completions", json=body)
        return judged(answer.status_code, answer.json())

    async def streamed(self, http: httpx.AsyncClient, body: dict[str, Any]) -> str:
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                return judged(answer.status_code, json.loads(await answer.aread()))
            events = [line[6:] async for line in answer.aiter_lines() if line.startswith("data: ")]
        if events[-1:] != ["[DONE]"]:
            return "BAD: a stream without an end"
        chunks = [json.loads(event) for event in events[:-1]]
        if "error" in chunks[-1]:
            return "error event"
        finishes = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        return "answered" if sum(map(bool, finishes)) == 1 else "BAD: a stream without one finish"


def judged(status: int, body: dict[str, Any]) -> str:
    if status == 200:
        return "answered"
    if "message" not in body.get("error", {}):
        return f"BAD: {status} without the API's envelope"
    return f"refused {status}" if status in RETRY else f"error {status}"


def held(process: psutil.Process) -> dict[str, int]:
    return {
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "children": len(process.children(recursive=True)),
        "resident MiB": process.memory_info().rss >> 20,
    }


async def quiet(process: psutil.Process, url: str) -> dict[str, int]:
    """What is held when nothing runs: clients have left, their connections are closed."""
    async with httpx.AsyncClient(base_url=url) as http:
        while True:
            health = (await http.get("/health")).json()
            if health["status"] == "ok" and not health["running"] and not health["waiting"]:
                break
            await asyncio.sleep(0.2)
    await asyncio.sleep(1.0)
    return held(process)


async def round_of(load: Load, server: psutil.Process, pause_s: float) -> float:
    """Kill once; seconds until somebody was answered again."""
    await asyncio.sleep(pause_s)
    (engine,) = server.children()
    engine.kill()
    killed_s = time.monotonic()
    while load.answered_s <= killed_s + 0.05:  # what was on its way when it died does not count
        if time.monotonic() - killed_s > 120:
            raise SystemExit("No answer within 120 s of a kill.")
        await asyncio.sleep(0.01)
    return load.answered_s - killed_s


async def measure(url: str, server: psutil.Process, arguments: argparse.Namespace) -> int:
    load = Load(url, arguments.seed)
    times: list[float] = []
    before: dict[str, int] = {}
    warm = min(arguments.kills - 1, 10)  # threads of the tokenizer's pool come as they are needed
    for part in (warm, arguments.kills - warm):
        load.stop = False
        clients = [asyncio.create_task(load.client()) for _ in range(arguments.clients)]
        for _ in range(part):
            times.append(await round_of(load, server, load.random.uniform(0.05, arguments.pause)))
            if len(times) % 20 == 0:
                print(f"{len(times)} kills, {dict(load.ends)}", file=sys.stderr, flush=True)
        load.stop = True
        await asyncio.gather(*clients)
        before = before or await quiet(server, url)
    after = await quiet(server, url)
    times.sort()
    print(f"kills {len(times)}, clients {arguments.clients}, model {arguments.model or 'default'}")
    print(
        f"back after, s: median {statistics.median(times):.2f}, "
        f"p90 {times[int(0.9 * (len(times) - 1))]:.2f}, longest {times[-1]:.2f}"
    )
    for end, count in sorted(load.ends.items()):
        print(f"  {count:6d} {end}")
    for name in before:
        print(f"{name}: {before[name]} after the first {warm}, {after[name]} after the last")
    leaked = any(after[name] > before[name] for name in ("descriptors", "threads", "children"))
    return int(leaked or any(end.startswith("BAD") for end in load.ends))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--pause", type=float, default=1.5, help="longest pause between kills, s")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "luce_core", "serve", *filter(None, [arguments.model]), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            output = iter(server.stdout or ())
            url = next(found[1] for line in output if (found := URL.search(line)))
            threading.Thread(target=lambda: [None for _ in output], daemon=True).start()
            return asyncio.run(measure(url, psutil.Process(server.pid), arguments))
        finally:
            server.terminate()


if __name__ == "__main__":
    sys.exit(main())
