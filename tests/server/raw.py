"""Raw sockets for tests of connections, and a gate that holds the engine where a test wants it."""

import json
import socket
import struct
import threading

PATIENCE_S = 30


class Raw:
    """One connection that sends exactly what it is told."""

    def __init__(self, url, *, receive_buffer=None, wrap=None):
        host, port = url.removeprefix("http://").removeprefix("https://").split(":")
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect((host, int(port)))
        if wrap:
            self.socket = wrap(self.socket)
        self.seen = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, data):
        self.socket.sendall(data)
        return self

    def post(self, path="/v1/chat/completions", *, head="", **body):
        """A request for a chat of one word, with these fields."""
        body = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, **body}
        raw = json.dumps(body).encode()
        return self.send(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{head}"
            f"Content-Length: {len(raw)}\r\n\r\n".encode()
            + raw
        )

    def get(self, path="/health", *, head=""):
        return self.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n".encode())

    def until(self, *patterns):
        """Read until one of the patterns came; the bytes read so far, which stay."""
        while not any(pattern in self.seen for pattern in patterns):
            data = self.socket.recv(65536)
            if not data:
                raise AssertionError(f"closed before {patterns!r}: {self.seen!r}")
            self.seen += data
        return self.seen

    def rest(self):
        """Everything up to the end of the connection, be it a reset."""
        try:
            while data := self.socket.recv(65536):
                self.seen += data
        except ConnectionResetError:
            self.seen += b"<reset>"
        return self.seen

    def responses(self, count):
        """(status, body) of so many answers with a length."""
        found = []
        while len(found) < count:
            head = self.until(b"\r\n\r\n").partition(b"\r\n\r\n")[0]
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
            length = int(fields.get(b"content-length", 0))
            start = len(head) + 4
            while len(self.seen) < start + length:
                data = self.socket.recv(65536)
                assert data, "closed in the middle of a body"
                self.seen += data
            found.append((int(head.split()[1]), self.seen[start : start + length]))
            self.seen = self.seen[start + length :]
        return found

    def leave(self, manner):
        """ "reset": RST; "close": FIN, then nothing is taken any more; "half": FIN, but reading goes on."""
        if manner == "reset":
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if manner == "half":
            self.socket.shutdown(socket.SHUT_WR)
        else:
            self.socket.close()


class Gate:
    """Lets a backend's forwards of one phase through until `hold`, then keeps the next one waiting."""

    def __init__(self, engine):
        self._backend = engine.programs.backend
        self._forward = self._backend.forward
        self._backend.forward = self
        self._phase, self._free, self.held = None, threading.Event(), threading.Event()
        self.after = 0

    def hold(self, phase, skip=0):
        """Keep the forward of `phase` that comes after `skip` others."""
        self._free.clear()
        self.held.clear()
        self._skip, self._phase, self.after = skip, phase, 0

    def open(self):
        self._phase = None
        self._free.set()

    def restore(self):
        self.open()
        self._backend.forward = self._forward

    def __call__(self, batch):
        if batch.phase == self._phase:
            if self._skip:
                self._skip -= 1
            else:
                self.held.set()
                assert self._free.wait(PATIENCE_S), "nobody opened the gate"
                return self._forward(batch)
        self.after += 1
        return self._forward(batch)


class Calls:
    """Stands in for a method of the channel; each call can be waited for."""

    def __init__(self, channel, name):
        self._channel, self._name = channel, name
        self._method = getattr(channel, name)
        self._lock = threading.Condition()
        self.seen = []
        setattr(channel, name, self)

    def __call__(self, first, *rest):
        self._method(first, *rest)
        with self._lock:
            self.seen.append(getattr(first, "request", first))
            self._lock.notify_all()

    def wait(self, count):
        with self._lock:
            assert self._lock.wait_for(lambda: len(self.seen) >= count, PATIENCE_S), self.seen
            return self.seen

    def restore(self):
        delattr(self._channel, self._name)


def wait_until(condition):
    """Block until `condition()`; it is looked at every few milliseconds, since nothing announces it."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.005)):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError("it never came true")
