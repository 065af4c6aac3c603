"""A server that says exactly what a test wants it to say, over real sockets; results made by hand."""

import json
import re
import socket
import threading
from contextlib import contextmanager, suppress

import pytest

from luce_core.bench.cases import Case
from luce_core.bench.facts import Host, Subject
from luce_core.bench.runner import Result
from luce_core.bench.stats import spread

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def event(payload):
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def chunk(text, **more):
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **more})


def finish(**more):
    return event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], **more})


DONE = b"data: [DONE]\n\n"


def whole(status, body, *headers):
    """An answer in one piece."""
    data = json.dumps(body).encode()
    head = [
        f"HTTP/1.1 {status} X",
        f"content-length: {len(data)}",
        "content-type: application/json",
        *headers,
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + data


MODELS = whole(200, {"object": "list", "data": [{"id": "raw"}]}, "server: rawhide")


class Raw:
    """`answers` are called with (socket, body of the request), one per POST, the last again and again."""

    def __init__(self, *answers, models=MODELS):
        self.answers = list(answers)
        self.models = models
        self.bodies = []
        self.heads = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self._lock = threading.Lock()
        self._threads = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def _accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, client):
        with client:
            try:
                head, body = self._read(client)
            except ConnectionError:
                return
            if not head:
                return  # a probe
            self.heads.append(head)
            if head.startswith("GET"):
                client.sendall(self.models)
                return
            with self._lock:
                self.bodies.append(json.loads(body))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            with suppress(ConnectionError):  # the client had enough
                answer(client, self.bodies[-1])

    @staticmethod
    def _read(client):
        data = b""
        while b"\r\n\r\n" not in data:
            piece = client.recv(65536)
            if not piece:
                return "", b""
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        found = re.search(rb"content-length: (\d+)", head, re.I)
        while found and len(body) < int(found[1]):
            body += client.recv(65536)
        return head.decode(), body

    def die(self):
        """No more connections, at once: a process that is gone."""
        with suppress(OSError):  # it is dead already
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def close(self):
        self.die()
        self._accepting.join()
        for thread in self._threads:
            thread.join()


def says(*pieces):
    """An answer of these bytes, then the end of the connection."""

    def answer(client, body):
        for piece in pieces:
            client.sendall(piece)

    return answer


GOOD = says(STREAM, chunk("a"), chunk("b"), finish(), DONE)


@pytest.fixture
def raw():
    """raw(*answers, models=...) -> context manager of a `Raw`."""

    @contextmanager
    def make(*answers, **more):
        made = Raw(*answers, **more)
        try:
            yield made
        finally:
            made.close()

    return make


# --- results made by hand

HOST = Host("2026-11-29T12:00:00+00:00", "0.1.0", "abc123", "3.11.7", "a CPU", 2, 0.5)
SUBJECT = Subject(
    model="tiny",
    architecture="llama",
    quant="Q4_1",
    parameters=134_500_000,
    weight_bytes=96 << 20,
    device="cpu",
    device_name="a CPU, 2 cores",
    context=4096,
    k_type="f16",
    v_type="f16",
    chunk=512,
    max_sequences=4,
    threads=2,
    op_layers=("cpu-c",),
    drafters=(),
    flash_attention=True,
    driver="",
    torch="2.13.0",
    plugins={"luce-backend-cpu": "0.1.0"},
    bandwidth="11.9 GB/s of cpu (measured here)",
)


def result(kind, tokens, depth=0, rates=(1.0,), peer=None, **more):
    fields = {
        "case": Case(kind, tokens, depth, 1),
        "tokens_s": spread(rates),
        "tokens": tokens * len(rates),
        "drafted": 0,
        "accepted": 0,
        "bound_tokens_s": None,
        "peak_rss_bytes": 1 << 28,
        "peak_device_bytes": None,
        "peer_tokens_s": None if peer is None else spread(peer),
        "peer_rss_bytes": None if peer is None else 1 << 27,
    }
    return Result(**{**fields, **more})
