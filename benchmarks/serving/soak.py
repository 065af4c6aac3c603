"""Thousands of requests of every kind, many of them cut off: afterwards nothing may be left behind.

    python benchmarks/serving/soak.py [--requests 20000] [--concurrency 16] [--seed 0] [--channel child]

Chats and completions, streamed or not, several choices, stop strings, log-probabilities; clients that
reset, close or half-close the connection while their request is queued, prefilled, decoded or not even
complete; wrong JSON, wrong fields, prompts beyond the context, bodies beyond the limit, a full queue,
failing steps. Every answer that comes is checked. What the process holds is counted after a warm-up and
at the end; the exit status is 1 when there is more of anything.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import gc
import json
import logging
import os
import random
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch

from luce_core.contracts import GenerationChannel
from luce_core.pipeline import Pipeline
from luce_core.server.connection import Limits
from luce_core.server.settings import ServerSettings
from luce_core.testing.pipeline import TOY_HOOKS, make_pipeline, registry_of
from luce_core.testing.server import Served, on_a_thread, serving
from luce_core.testing.toy import write_toy_model

CONTEXT = 256
WATCHED = (
    "Answers",
    "Choice",
    "Client",
    "Connection",
    "EventStream",
    "RequestResponseCycle",
    "Sequence",
    "TextFold",
)
"""Types of which an instance belongs to one request or connection."""
POOL = ("asyncio_", "uvloop_")
"""Names of threads that tokenize: a pool that grows with demand, to a fixed size."""
PATIENCE_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--channel", choices=("thread", "child"), default="thread")
    options = parser.parse_args()
    logging.getLogger("luce_core.engine").setLevel(logging.CRITICAL)  # steps fail on purpose
    start = time.perf_counter()
    with served(options.channel) as one:
        result = soak(one, options.requests, options.concurrency, options.seed)
    for name, count in sorted(result["outcomes"].items()):
        print(f"{name:40}{count:8}")
    print(f"{options.requests} requests in {time.perf_counter() - start:.0f} s")
    print(f"{'':40}{'before':>10}{'after':>10}")
    for name, before in result["before"].items():
        print(f"{name:40}{before:10}{result['after'][name]:10}")
    left = leaks(result)
    print("nothing is left behind" if not left else f"LEFT BEHIND: {left}")
    sys.exit(bool(left))


def leaks(result: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """What there is more of afterwards. Memory is shown only: caches fill, allocators keep."""
    pairs = {name: (before, result["after"][name]) for name, before in result["before"].items()}
    return {name: pair for name, pair in pairs.items() if pair[1] > pair[0] and name != "resident MiB"}


@contextmanager
def served(channel: str = "thread", max_queue: int = 40) -> Iterator[Served]:
    """A toy server: 8 run, 32 may wait, little cache."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = write_toy_model(Path(folder) / "toy.gguf", context=CONTEXT)
        pipeline = make_pipeline(path, options={"max_sequences": 8, "chunk": 64})
        make = {"thread": failing_now_and_then, "child": in_a_child}[channel]
        with serving(
            pipeline,
            channel=make,
            max_queue=max_queue,
            settings=ServerSettings(body_limit_bytes=100_000),
            limits=Limits(read_s=20.0, write_s=20.0),
            heartbeat_s=0.05,
        ) as one:
            yield one


def failing_now_and_then(pipeline: Pipeline, max_queue: int) -> GenerationChannel:
    """An engine in this process of which every 500th forward raises."""
    backend: Any = pipeline.target.backend
    forward, calls = backend.forward, 0

    def failing(batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 500 == 0:
            raise ValueError("this step fails")
        return forward(batch)

    backend.forward = failing
    return on_a_thread(pipeline, max_queue)


def in_a_child(pipeline: Pipeline, max_queue: int) -> GenerationChannel:
    """An engine in a process of its own."""
    from luce_core.supervision.messages import Boot
    from luce_core.supervision.supervised import SupervisedChannel

    ready = threading.Event()
    boot = Boot(pipeline.plan, partial(registry_of, TOY_HOOKS), beat_s=0.05, log_level="error")
    channel = SupervisedChannel(boot, max_queue=max_queue, on_ready=ready.set)
    if not ready.wait(PATIENCE_S):
        raise SystemExit(f"the engine's process is not ready: {channel.health()}")
    return channel


def soak(one: Served, requests: int, concurrency: int, seed: int) -> dict[str, Any]:
    """Warm up, count, send, count again."""
    outcomes: collections.Counter[str] = collections.Counter()
    asyncio.run(send(one.url, 20 + min(requests // 10, 80), concurrency, seed + 1, collections.Counter()))
    before = held(one)
    asyncio.run(send(one.url, requests, concurrency, seed, outcomes))
    after = held(one)
    return {"outcomes": outcomes, "before": before, "after": after}


def held(one: Served) -> dict[str, int]:
    """What this process holds, once everything has come to rest."""
    rest(one)
    loop: Any = one.server.servers[0].get_loop()
    stats = one.channel.stats()
    gc.collect()
    kinds = collections.Counter(map(type, gc.get_objects()))
    ours = {
        kind.__name__: count
        for kind, count in kinds.items()
        if str(kind.__module__).startswith(("luce_core", "uvicorn"))
    }
    figures = {
        "threads": sum(not one.name.startswith(POOL) for one in threading.enumerate()),
        "tasks": len(asyncio.run_coroutine_threadsafe(_tasks(), loop).result()),
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "connections": len(one.server.server_state.connections),
        "requests being answered": len(one.server.server_state.tasks),
        **{
            name: int(stats[name])
            for name in ("unfinished", "running", "waiting", "cache_sequences", "cache_used_blocks")
            if name in stats
        },
        **{f"objects: {name}": ours.get(name, 0) for name in WATCHED},
        "resident MiB": psutil.Process().memory_info().rss >> 20,
    }
    engine = getattr(one.channel, "engine", None)
    if engine is not None:
        engine.blocks.check_integrity()
        figures["sequences of the engine"] = len(engine.running) + len(engine.waiting)
    return figures


async def _tasks() -> list[str]:
    await asyncio.sleep(0)
    return [task.get_name() for task in asyncio.all_tasks()]


def rest(one: Served) -> None:
    """Wait until no request and no connection is left; give up loudly."""
    deadline = time.monotonic() + PATIENCE_S
    state = one.server.server_state
    while (
        one.channel.stats()["unfinished"] or one.channel.stats().get("cache_sequences") or state.connections
    ):
        if time.monotonic() > deadline:
            raise SystemExit(f"no rest: {one.channel.stats()}, {len(state.connections)} connections")
        time.sleep(0.05)


# --- the client


async def send(
    url: str, requests: int, concurrency: int, seed: int, outcomes: collections.Counter[str]
) -> None:
    """`requests` requests from `concurrency` clients."""
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:
            rng = random.Random(f"{seed} {number}")
            kind = rng.choices(KINDS, WEIGHTS)[0]
            outcome = await asyncio.wait_for(kind(url, rng), PATIENCE_S)
            outcomes[f"{kind.__name__}: {outcome}"] += 1

    await asyncio.gather(*(client() for _ in range(concurrency)))


@contextmanager
def closing(writer: asyncio.StreamWriter) -> Iterator[None]:
    try:
        yield
    finally:
        writer.close()


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    return await asyncio.open_connection(parts.hostname, parts.port)


def request(path: str, body: Any, head: str = "", length: int | None = None) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{head}"
        f"Content-Length: {len(raw) if length is None else length}\r\n\r\n"
    ).encode() + raw


def question(rng: random.Random, **more: Any) -> tuple[str, dict[str, Any]]:
    """A path and a body that are fine."""
    text = "".join(rng.choices("abcdef ghij", k=rng.choice((1, 10, 60, 150))))
    body: dict[str, Any] = {"max_tokens": rng.choice((1, 2, 5, 12)), "seed": rng.randrange(1000), **more}
    if rng.random() < 0.2:
        body["n"] = rng.choice((2, 3))
    if rng.random() < 0.3:
        body["stop"] = rng.choice(["a", ["e", "th"], "\n"])
    if rng.random() < 0.2:
        body["temperature"] = 0
    if rng.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
    if rng.random() < 0.6:
        if rng.random() < 0.2:
            body |= {"logprobs": True, "top_logprobs": 3}
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **body}
    if rng.random() < 0.2:
        body |= {"logprobs": 2, "echo": rng.random() < 0.5}
    return "/v1/completions", {"prompt": text, **body}


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of one response, chunked or with a length."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(head.split()[1])
    if b"transfer-encoding: chunked" in head:
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
        return status, body
    length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
    return status, await reader.readexactly(length)


def checked(status: int, body: bytes, count: int) -> str:
    """What a response is; a wrong one ends the soak."""
    if status != 200:
        json.loads(body)["error"]["message"]
        return str(status)
    if not body.startswith((b"data: ", b": ")):
        whole = json.loads(body)
        assert len(whole["choices"]) == count, whole
        assert all(choice["finish_reason"] in ("stop", "length") for choice in whole["choices"]), whole
        return "answered"
    events = [event for event in body.decode().split("\n\n") if event.startswith("data: ")]
    assert events[-1] == "data: [DONE]", body
    chunks = [json.loads(event[6:]) for event in events[:-1]]
    ends = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(choice["index"] for choice in ends) == list(range(count)), body
    failed = any("error" in chunk for chunk in chunks)
    assert failed == any(choice["finish_reason"] == "error" for choice in ends), body
    return "failed in the stream" if failed else "streamed"


async def plain(url: str, rng: random.Random) -> str:
    """One to three requests on one connection."""
    reader, writer = await connect(url)
    found = ""
    with closing(writer):
        for _ in range(rng.choice((1, 1, 2, 3))):
            path, body = question(rng, stream=rng.random() < 0.5)
            writer.write(request(path, body))
            status, raw = await answer(reader)
            found = checked(status, raw, body.get("n", 1))
            assert status in (200, 429, 500), raw
    return found


async def half_closed(url: str, rng: random.Random) -> str:
    """A request and the end of the sending side: streams are answered, whole answers given up."""
    reader, writer = await connect(url)
    with closing(writer):
        path, body = question(rng, stream=rng.random() < 0.7)
        writer.write(request(path, body))
        writer.write_eof()
        status, raw = await answer(reader)
        assert status in (200, 429, 499, 500), raw
        return checked(status, raw, body.get("n", 1))


async def leaving(url: str, rng: random.Random) -> str:
    """A request that is cut off: at once, after the head of the answer, or in the middle of it."""
    reader, writer = await connect(url)
    path, body = question(rng, stream=rng.random() < 0.7, ignore_eos=True)
    body["max_tokens"] = 40
    raw = request(path, body)
    when = rng.choice(("in the request", "at once", "soon", "in the answer"))
    writer.write(raw[: rng.randrange(len(raw))] if when == "in the request" else raw)
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        await writer.drain()
        if when == "soon":
            await asyncio.sleep(rng.random() * 0.1)
        if when == "in the answer" and body["stream"]:
            head = await reader.readuntil(b"\r\n\r\n")
            when += f" {int(head.split()[1])}"
            seen = b"" if when.endswith("200") else b"[DONE]"
            for _ in range(rng.choice((1, 3, 8))):
                if b"[DONE]" not in seen:
                    seen = await reader.readuntil(b"\n\n")
    if rng.random() < 0.6:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        return f"reset {when}"
    writer.close()
    return f"closed {when}"


async def wrong(url: str, rng: random.Random) -> str:
    """Requests that are refused."""
    path, body = question(rng)
    cases: dict[str, tuple[bytes, int]] = {
        "wrong JSON": (request(path, b'{"messages": ['), 400),
        "wrong field": (request(path, {**body, "temperature": "hot"}), 400),
        "beyond the context": (
            request("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 3000}]}),
            400,
        ),
        "beyond the limit": (request(path, b"{}", length=10**8), 413),
        "wrong type": (request(path, body).replace(b"application/json", b"text/plain"), 415),
        "wrong path": (request("/v1/nothing", body), 404),
        "no HTTP": (b"\x16\x03\x01 hello\r\n\r\n", 400),
    }
    name = rng.choice(list(cases))
    raw, wanted = cases[name]
    reader, writer = await connect(url)
    with closing(writer):
        writer.write(raw)
        status, answered = await answer(reader)
    assert status == wanted, (name, status, answered)
    return f"{name} {status}"


KINDS = (plain, leaving, half_closed, wrong)
WEIGHTS = (50, 30, 8, 12)

if __name__ == "__main__":
    main()
