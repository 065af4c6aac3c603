"""A client that costs next to nothing: one process, raw sockets, bytes counted and not parsed.

Run by the other scripts here: `python client.py HOST PORT --streams 64 --max-tokens 500` opens so many
streams at once, reads each to its end and prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import re
import selectors
import socket
import time

TOKENS = re.compile(rb'"completion_tokens":(\d+)')
END = b"0\r\n\r\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=500)
    parser.add_argument("--field", action="append", default=[], help="NAME=JSON, added to the body")
    options = parser.parse_args()
    more = {name: json.loads(value) for name, _, value in (one.partition("=") for one in options.field)}
    print(json.dumps(run(options.host, options.port, options.streams, options.max_tokens, more)))


def run(host: str, port: int, streams: int, max_tokens: int, more: dict) -> dict:
    body = {
        "messages": [{"role": "user", "content": "count"}],
        "stream": True,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream_options": {"include_usage": True},
        **more,
    }
    raw = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(raw)}\r\n"
    request = head.encode() + b"Content-Type: application/json\r\n\r\n" + raw
    selector = selectors.EpollSelector()
    for _ in range(streams):
        connection = socket.create_connection((host, port))
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, [b"", b""])  # first and last bytes
        connection.sendall(request)
    started, cpu = time.perf_counter(), time.process_time()
    first = last = 0.0
    num_bytes = num_reads = num_events = open_streams = 0
    open_streams = streams
    ends: list[list[bytes]] = []
    while open_streams:
        for key, _ in selector.select():
            data = key.fileobj.recv(1 << 18)
            num_reads += 1
            num_bytes += len(data)
            num_events += data.count(b"data: ")
            key.data[0] = key.data[0] or data[:64]
            key.data[1] = (key.data[1] + data)[-1024:]
            last = time.perf_counter()
            first = first or last
            if not data or key.data[1].endswith(END):
                selector.unregister(key.fileobj)
                key.fileobj.close()
                ends.append(key.data)
                open_streams -= 1
    tokens = 0
    for begin, end in ends:
        if not begin.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in end:
            raise SystemExit(f"a stream went wrong: {begin!r} ... {end!r}")
        tokens += int(TOKENS.findall(end)[-1])
    return {
        "streams": streams,
        "tokens": tokens,
        "events": num_events,
        "reads": num_reads,
        "bytes": num_bytes,
        "ttfb_s": first - started,
        "seconds": last - first,
        "cpu_s": time.process_time() - cpu,
    }


if __name__ == "__main__":
    main()
