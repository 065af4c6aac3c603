"""Clients that misbehave, and what it costs the others: memory of the server, latency of one that behaves.

    python benchmarks/serving/abuse.py [--seconds 8] [--connections 10000] [ATTACK ...]

Each attack runs in a process of its own for `--seconds`, against a server with a scripted engine. Meanwhile
a good client, another process, asks `/health` and streams a short answer in turn. A row shows the server's
resident memory before, at most and after, its connections at most, and the good client's latencies.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

import psutil
from bench import PacedChannel, toy

from luce_core.server.connection import Limits
from luce_core.server.sockets import most_connections
from luce_core.testing.server import Served, serving

CHAT = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, "stream": True}
HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("attacks", nargs="*", default=["nobody", *ATTACKS])
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--as-client", nargs=2, metavar=("ROLE", "URL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_client:
        as_client(*options.as_client, options)
        return
    print(f"{'':16}{'RSS MiB':>21}{'conn.':>8}{'/health ms':>22}{'stream ms':>22}")
    print(f"{'':16}{'before':>7}{'most':>7}{'after':>7}{'':8}" + f"{'p50':>6}{'p99':>8}{'max':>8}" * 2)
    for attack in options.attacks:
        row(attack, options)


def row(attack: str, options: argparse.Namespace) -> None:
    """One attack against a server of its own."""
    limits = Limits(connections=most_connections(), read_s=4.0, idle_s=60.0, write_s=4.0)
    with toy() as pipeline:
        channel = PacedChannel(20_000, pipeline.target.backend.spec.vocab, gather_s=0.0)
        with serving(pipeline, channel=lambda *_: channel, limits=limits) as served:
            start_client("good", served.url, options, 0.5).communicate()  # warm
            before, watch = rss(), Watch(served)
            attacker = start_client(attack, served.url, options, options.seconds)
            good = start_client("good", served.url, options, options.seconds)
            latencies = json.loads(good.communicate()[0])
            attacker.wait()
            watch.stop()
            deadline = time.monotonic() + 30
            while served.server.server_state.connections and time.monotonic() < deadline:
                time.sleep(0.1)
            after = rss()
    numbers = "".join(f"{value:{6 + 2 * (i % 3 > 0)}.0f}" for i, value in enumerate(latencies))
    print(f"{attack:16}{before:7}{watch.rss:7}{after:7}{watch.connections:8}{numbers}")


class Watch:
    """The most memory and connections of this process while it runs."""

    def __init__(self, served: Served) -> None:
        self.rss = self.connections = 0
        self._served, self._stopped = served, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(0.1):
            self.rss = max(self.rss, rss())
            self.connections = max(self.connections, len(self._served.server.server_state.connections))

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


def rss() -> int:
    return psutil.Process().memory_info().rss >> 20


def start_client(role: str, url: str, options: argparse.Namespace, seconds: float) -> subprocess.Popen[str]:
    argv = [sys.executable, __file__, f"--seconds={seconds}", f"--connections={options.connections}"]
    return subprocess.Popen([*argv, "--as-client", role, url], stdout=subprocess.PIPE, text=True)


# --- in a process of its own


def as_client(role: str, url: str, options: argparse.Namespace) -> None:
    parts = urlsplit(url)
    address = (parts.hostname or "", parts.port or 0)
    until = time.monotonic() + options.seconds
    if role == "good":
        print(json.dumps(good(address, until)))
    elif role != "nobody":
        ATTACKS[role](address, until, options.connections)


def good(address: tuple[str, int], until: float) -> list[float]:
    """p50, p99, max of `/health` and of a stream of 20 tokens, in ms."""
    times: dict[str, list[float]] = {"health": [], "stream": []}
    body = json.dumps({**CHAT, "max_tokens": 20}).encode()
    requests = {
        "health": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b'"waiting"'),
        "stream": (HEAD.format(len(body)).encode() + body, b"[DONE]\n\n\r\n0\r\n\r\n"),
    }
    with socket.create_connection(address, timeout=60) as kept:
        while time.monotonic() < until:
            for name, (request, end) in requests.items():
                start = time.perf_counter()
                kept.sendall(request)
                seen = b""
                while end not in seen:
                    data = kept.recv(65536)
                    if not data:
                        raise SystemExit(f"the good client was cut off: {seen!r}")
                    seen += data
                times[name].append(1e3 * (time.perf_counter() - start))
            time.sleep(0.01)
    found = []
    for one in times.values():
        ordered = sorted(one)
        found += [statistics.median(one), ordered[min(len(one) - 1, len(one) * 99 // 100)], ordered[-1]]
    return found


def connect(address: tuple[str, int], count: int) -> list[socket.socket]:
    return [socket.create_connection(address, timeout=60) for _ in range(count)]


def idle(address: tuple[str, int], until: float, count: int) -> None:
    """Connections that say nothing."""
    held = connect(address, count)
    time.sleep(max(0.0, until - time.monotonic()))
    del held


def drip(start: bytes, address: tuple[str, int], until: float, count: int) -> None:
    """Send `start`, then a byte a second."""
    held = connect(address, count // 10)
    for one in held:
        one.sendall(start)
    while time.monotonic() < until:
        for one in held:
            with suppress(OSError):
                one.send(b"x")
        time.sleep(1)


def slow_heads(address: tuple[str, int], until: float, count: int) -> None:
    drip(b"GET /health HTTP/1.1\r\nx-a: ", address, until, count)


def slow_bodies(address: tuple[str, int], until: float, count: int) -> None:
    drip(HEAD.format(10**6).encode() + b'{"', address, until, count)


def big_bodies(address: tuple[str, int], until: float, count: int) -> None:
    """100 MB where 32 MiB are allowed, sent whatever the server says; half with a length, half in chunks."""
    selector = selectors.DefaultSelector()
    block = b"%x\r\n%b\r\n" % (1 << 16, bytes(1 << 16))
    while time.monotonic() < until:
        while len(selector.get_map()) < 20:
            (one,) = connect(address, 1)
            chunked = len(selector.get_map()) % 2
            head = HEAD.format(10**8)
            one.sendall(
                (
                    head.replace("Content-Length: 100000000", "Transfer-Encoding: chunked")
                    if chunked
                    else head
                ).encode()
            )
            one.setblocking(False)
            selector.register(
                one, selectors.EVENT_WRITE, [memoryview(block if chunked else bytes(1 << 16)), 0]
            )
        for key, _ in selector.select(0.1):
            view, at = key.data
            try:
                at += key.fileobj.send(view[at:])
                key.data[1] = 0 if at == len(view) else at
            except OSError:
                selector.unregister(key.fileobj)
                key.fileobj.close()


def unread(address: tuple[str, int], until: float, count: int) -> None:
    """Long streams nobody reads."""
    body = json.dumps({**CHAT, "max_tokens": 30_000}).encode()
    held = []
    for _ in range(count // 50):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(address)
        one.sendall(HEAD.format(len(body)).encode() + body)
        held.append(one)
    time.sleep(max(0.0, until - time.monotonic()))


def pipelined(address: tuple[str, int], until: float, count: int) -> None:
    """As many requests as the sockets take, behind a stream that goes on; no answer is read."""
    body = json.dumps({**CHAT, "max_tokens": 30_000}).encode()
    flood = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000
    held = connect(address, count // 50)
    for one in held:
        one.sendall(HEAD.format(len(body)).encode() + body)
        one.setblocking(False)
    while time.monotonic() < until:
        for one in held:
            with suppress(OSError):
                one.send(flood)
        time.sleep(0.02)


def resets(address: tuple[str, int], until: float, count: int) -> None:
    """Requests and resets, as fast as it goes."""
    body = json.dumps({**CHAT, "max_tokens": 1000}).encode()
    while time.monotonic() < until:
        for one in connect(address, 20):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            one.sendall(HEAD.format(len(body)).encode() + body)
            one.close()


Attack = Callable[[tuple[str, int], float, int], None]
ATTACKS: dict[str, Attack] = {
    attack.__name__.replace("_", "-"): attack
    for attack in (idle, slow_heads, slow_bodies, big_bodies, unread, pipelined, resets)
}

if __name__ == "__main__":
    main()
