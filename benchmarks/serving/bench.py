"""What the scripts here share: a toy model, channels with a known pace, a client in its own process."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch

from luce_core.contracts import (
    ChannelHealth,
    Done,
    EngineEvent,
    GenerationChannel,
    GenerationRequest,
    Progress,
    Tokens,
)
from luce_core.pipeline import Pipeline
from luce_core.testing.pipeline import TOY_HOOKS, make_pipeline, registry_of
from luce_core.testing.toy import write_toy_model

HERE = Path(__file__).parent
CONTEXT = 32768


@contextmanager
def toy(max_sequences: int = 64, context: int = CONTEXT, **options: Any) -> Iterator[Pipeline]:
    """A pipeline over the toy model, one torch thread."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = write_toy_model(Path(folder) / "toy.gguf", context=context)
        yield make_pipeline(path, options={"max_sequences": max_sequences, **options})


def client(url: str, **options: Any) -> dict[str, Any]:
    """Run client.py against `url` and return what it measured."""
    parts = urlsplit(url)
    argv = [sys.executable, str(HERE / "client.py"), parts.hostname, str(parts.port)]
    argv += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the client failed:\n{done.stderr}")
    return json.loads(done.stdout)


class Spin:
    """Work of a known length that holds no interpreter lock, as a kernel would."""

    def __init__(self) -> None:
        self.data = bytes(1 << 22)
        rates = []
        for _ in range(20):
            start = time.thread_time()  # not of the clock: others may run in between
            hashlib.sha256(self.data).digest()
            rates.append(len(self.data) / (time.thread_time() - start))
        self.bytes_per_s = sorted(rates)[len(rates) // 2]

    def __call__(self, seconds: float) -> None:
        hashlib.sha256(memoryview(self.data)[: max(4096, int(seconds * self.bytes_per_s))]).digest()


class Pace:
    """What a script and a paced model share, be it in another process: how long a forward takes, and when
    each of them began by the machine's clock. A file of float64.
    """

    def __init__(self, path: Path, room: int = 1 << 20) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * room))
        self._shared = np.memmap(path, np.float64, mode="r+")

    @property
    def seconds(self) -> float:
        return float(self._shared[0])

    @seconds.setter
    def seconds(self, value: float) -> None:
        self._shared[0] = value

    def begun(self) -> None:
        """(model) A forward begins."""
        at = int(self._shared[1])
        self._shared[2 + at % (len(self._shared) - 2)] = time.monotonic()
        self._shared[1] = at + 1

    def take(self) -> list[float]:
        """When the forwards since the last call began."""
        count = int(self._shared[1])
        self._shared[1] = 0
        return self._shared[2 : 2 + count].tolist()


def paced_registry(path: Path) -> Any:
    """A toy whose forwards take what the `Pace` at `path` says, and compute nothing."""
    from luce_core.model.backend import NetworkBackend
    from luce_core.testing.toy.network import ToyNetwork

    pace, spin = Pace(path), Spin()

    def trunk(self: Any, batch: Any, final: Any = None) -> Any:
        pace.begun()
        spin(pace.seconds)
        return torch.zeros(batch.token.shape[0], 4)

    network: Any = ToyNetwork
    network.trunk = trunk
    network.logits = lambda self, final: torch.zeros(final.shape[0], self.vocab)
    backend: Any = NetworkBackend
    backend.commit = lambda self, batch, commit: None
    return registry_of(TOY_HOOKS)


def in_a_child(make_registry: Any, pipeline: Pipeline, max_queue: int) -> GenerationChannel:
    """An engine in a process of its own, which can import this folder."""
    from luce_core.supervision.messages import Boot
    from luce_core.supervision.supervised import SupervisedChannel

    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    ready = threading.Event()
    boot = Boot(pipeline.plan, make_registry, beat_s=0.25, log_level="error")
    channel = SupervisedChannel(boot, max_queue=max_queue, on_ready=ready.set)
    if not ready.wait(120):
        raise SystemExit(f"the engine's process is not ready: {channel.health()}")
    return channel


class PacedChannel:
    """Emits a token to every open request at each tick, `rate` tokens a second in all, from a thread.

    It stays on an absolute schedule: when it is late it does not wait, and `late_s` says how late it ended.
    """

    def __init__(self, rate: float, vocab: int, gather_s: float = 0.2) -> None:
        self.rate, self.vocab, self.gather_s = rate, vocab, gather_s
        self.late_s = 0.0
        self._lock = threading.Condition()
        self._open: dict[str, list[Any]] = {}
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="paced-channel")
        self._thread.start()

    def submit(self, request: GenerationRequest, sink: Callable[[EngineEvent], None]) -> None:
        with self._lock:
            self._open[request.request] = [request, sink, 0]
            self._lock.notify()
        sink(Progress(request.request, "queued", 0, len(request.prompt)))

    def cancel(self, request: str) -> None:
        with self._lock:
            found = self._open.pop(request, None)
        if found:
            found[1](_done(found[0], found[2], "cancelled"))

    def stats(self) -> Mapping[str, float]:
        return {"alive": 1.0, "running": len(self._open), "waiting": 0, "unfinished": len(self._open)}

    def health(self) -> ChannelHealth:
        return ChannelHealth("ready")

    def close(self, drain_s: float) -> None:
        with self._lock:
            self._stop = True
            self._lock.notify()
        self._thread.join()

    def _run(self) -> None:
        due = time.perf_counter()
        while not self._stop:
            with self._lock:
                while not self._open and not self._stop:
                    self._lock.wait()
                    due = time.perf_counter() + self.gather_s  # let the others of a burst arrive
                open_now = list(self._open.values())
            due += max(len(open_now), 1) / self.rate
            wait = due - time.perf_counter()
            if wait > 0:
                time.sleep(wait)
            self.late_s = max(0.0, -wait)
            for found in open_now:
                self._step(found)

    def _step(self, found: list[Any]) -> None:
        request, sink, emitted = found
        if request.request not in self._open:
            return
        found[2] = emitted = emitted + 1
        sink(Tokens(request.request, (65 + (emitted * 7) % 26,)))
        if emitted == request.max_tokens:
            with self._lock:
                self._open.pop(request.request, None)
            sink(_done(request, emitted, "length"))


def _done(request: GenerationRequest, emitted: int, reason: Any) -> Done:
    usage = {"prompt_tokens": len(request.prompt), "completion_tokens": emitted, "cached_tokens": 0}
    usage |= {"drafted_tokens": 0, "accepted_tokens": 0}
    times = dict.fromkeys(("queue_ms", "prefill_ms", "decode_ms", "ttft_ms"), 1.0)
    return Done(request.request, reason, usage, times)


class LagProbe:
    """ASGI middleware that measures how late timers of the server's loop fire, from the first request on."""

    PERIOD_S = 0.005

    def __init__(self) -> None:
        self.lags_ms: list[float] = []
        self._task: Any = None

    def __call__(self, app: Any) -> Any:
        async def wrapped(scope: Any, receive: Any, send: Any) -> None:
            if self._task is None:
                self._task = asyncio.ensure_future(self._probe())
            await app(scope, receive, send)

        return wrapped

    async def _probe(self) -> None:
        while True:
            due = time.perf_counter() + self.PERIOD_S
            await asyncio.sleep(self.PERIOD_S)
            self.lags_ms.append(1e3 * (time.perf_counter() - due))

    def percentiles(self) -> dict[str, float]:
        found = sorted(self.lags_ms)
        return {f"p{share}": found[min(len(found) - 1, len(found) * share // 100)] for share in (50, 99)} | {
            "max": found[-1]
        }
