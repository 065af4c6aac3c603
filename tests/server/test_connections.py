"""Connections as such: who counts as gone, what a client may take, and what it costs the others."""

import asyncio
import itertools
import json
import socket
import ssl
import traceback
from contextlib import suppress

import httpx
import pytest
import trustme
from starlette.requests import Request

from luce_core.errors import RequestError
from luce_core.server.body import read_json
from luce_core.server.connection import AHEAD_BYTES, HEAD_BYTES, LINGER_BYTES, Limits
from luce_core.testing.pipeline import make_pipeline
from luce_core.testing.server import serving
from luce_core.testing.toy import write_toy_model

from .raw import PATIENCE_S, Calls, Gate, Raw, wait_until

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module", params=["uvloop", "asyncio"])
def single(request, tmp_path_factory):
    """A server that runs one request at a time, in small steps."""
    path = write_toy_model(tmp_path_factory.mktemp("single") / "toy.gguf", salt=7, context=512)
    pipeline = make_pipeline(path, options={"max_sequences": 1, "chunk": 8})
    with serving(pipeline, loop=request.param) as one:
        yield one


@pytest.fixture
def gate(single):
    one = Gate(single.engine)
    yield one
    one.restore()


@pytest.fixture
def calls(single):
    made = {name: Calls(single.channel, name) for name in ("submit", "cancel")}
    single.records.clear()
    yield made
    for one in made.values():
        one.restore()
    wait_until(lambda: not single.channel.stats()["unfinished"])
    assert not any(single.engine.blocks.stats().used_blocks.values())
    wait_until(lambda: not single.server.server_state.connections)


def reasons(single, count):
    wait_until(lambda: len(single.records) >= count)
    return [record.done.reason for record in single.records]


def new_messages(seen=itertools.count()):  # noqa: B008 - one for all
    """A prompt of some chunks that no cache knows."""
    return [{"role": "user", "content": f"{next(seen)} {'x' * 40}"}]


# --- leaving


@pytest.mark.parametrize("manner", ["reset", "close", "half"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("phase", "skip"), [("prefill", 1), ("held", 2)])
def test_who_leaves_while_it_runs_is_gone_before_the_next_step(
    single, gate, calls, phase, skip, stream, manner
):
    gate.hold(phase, skip)
    with Raw(single.url) as client:
        client.post(stream=stream, max_tokens=9, messages=new_messages())
        assert gate.held.wait(PATIENCE_S)
        if stream:
            client.until(b'"assistant"')
        client.leave(manner)
        before = gate.after
        if stream and manner == "half":
            gate.open()
            body = client.rest()
            assert body.count(b'"finish_reason":"length"') == 1
            assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert reasons(single, 1) == ["length"]
            assert calls["cancel"].seen == []
        else:
            calls["cancel"].wait(1)
            gate.open()
            assert reasons(single, 1) == ["cancelled"]
            assert gate.after == before
            if manner == "half":
                assert client.rest().startswith(b"HTTP/1.1 499")


@pytest.mark.parametrize("manner", ["reset", "close", "half"])
@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_the_queue_never_runs(single, gate, calls, stream, manner):
    gate.hold("held")
    with Raw(single.url) as first, Raw(single.url) as client:
        first.post(max_tokens=3)
        assert gate.held.wait(PATIENCE_S)
        client.post(stream=stream, max_tokens=5)
        calls["submit"].wait(2)
        if stream:
            client.until(b'"assistant"')
        client.leave(manner)
        if stream and manner == "half":
            gate.open()
            assert b"[DONE]" in client.rest()
            assert reasons(single, 2) == ["length", "length"]
        else:
            calls["cancel"].wait(1)
            gate.open()
            assert first.responses(1)[0][0] == 200
            assert sorted(reasons(single, 2)) == ["cancelled", "length"]
            assert single.records[-1].done.usage["completion_tokens"] in (0, 3)


def test_who_leaves_with_the_answer_in_hand_left_no_mark(single, calls):
    for manner in ("reset", "close"):
        with Raw(single.url) as client:
            client.post(stream=True, max_tokens=2).until(b"[DONE]")
            client.leave(manner)
    assert reasons(single, 2) == ["length", "length"]
    assert calls["cancel"].seen == []


def test_a_stop_string_is_a_stop_in_the_records_too(single, calls):
    with httpx.Client(base_url=single.url, timeout=60) as http:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 400, "temperature": 0}
        whole = http.post(CHAT, json={**body, "max_tokens": 20, "ignore_eos": True}).json()
        stop = whole["choices"][0]["message"]["content"][3]
        cut = http.post(CHAT, json={**body, "ignore_eos": True, "stop": stop}).json()
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert reasons(single, 2) == ["length", "stop"]


def test_a_request_sent_with_its_end_is_answered(single, calls):
    with Raw(single.url) as client:
        client.get("/health").leave("half")
        assert client.rest().startswith(b"HTTP/1.1 200")
    with Raw(single.url) as client:
        client.post(stream=True, max_tokens=2).leave("half")
        assert b"[DONE]" in client.rest()


def test_who_leaves_in_the_middle_of_a_request_is_nobodys_error(single, calls, caplog):
    for manner in ("reset", "close", "half"):
        for sent in (
            b"POST / HT",
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{",
        ):
            with Raw(single.url) as client:
                client.send(sent).leave(manner)
                if manner == "half":
                    assert client.rest() == b""
    wait_until(lambda: not single.server.server_state.connections)
    wait_until(lambda: not single.server.server_state.tasks)
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_silence_before_prefill_is_broken_by_comments(serve):
    with serve(front={"heartbeat_s": 0.01}, max_sequences=1) as one:
        gate = Gate(one.engine)
        gate.hold("prefill")
        with Raw(one.url) as client:
            client.post(stream=True, max_tokens=1, messages=[{"role": "user", "content": "x" * 40}])
            assert gate.held.wait(PATIENCE_S)
            client.until(b": waiting")
            gate.open()
            body = client.until(b"[DONE]")
            assert body.index(b'"assistant"') < body.index(b": waiting")
        gate.restore()


def test_under_tls_a_close_notify_is_leaving(serve, tmp_path):
    authority = trustme.CA()
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(tmp_path / "cert.pem")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with serve(front={"ssl_certfile": str(tmp_path / "cert.pem")}) as one:
        gate, cancelled = Gate(one.engine), Calls(one.channel, "cancel")
        gate.hold("held", 1)
        wrap = lambda plain: context.wrap_socket(plain, server_hostname="localhost")  # noqa: E731
        with Raw(one.url, wrap=wrap) as client:
            client.post(stream=True).until(b'"assistant"')
            assert gate.held.wait(PATIENCE_S)
            with suppress(ssl.SSLError):  # what was written before the other side's close_notify
                client.socket.unwrap()
            cancelled.wait(1)
            gate.restore()


# --- what a client may take


def test_a_head_that_does_not_come_to_its_end_is_a_408(serve):
    with serve(front={"limits": Limits(read_s=0.2)}) as one:
        with Raw(one.url) as client:
            answer = client.send(b"GET /health HTTP/1.1\r\nHost: loc").rest()
        assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
        with Raw(one.url) as silent:
            assert silent.rest() == b""
        with Raw(one.url) as client:
            client.get()
            client.responses(1)
            assert client.send(b"\r\n").rest() == b""  # a blank line begins no request


def test_a_body_that_does_not_come_to_its_end_is_a_408(serve, caplog):
    with serve(front={"limits": Limits(read_s=0.2)}) as one:
        with Raw(one.url) as client:
            client.send(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{{".encode())
            assert client.rest().startswith(b"HTTP/1.1 408")
        wait_until(lambda: not one.server.server_state.tasks)
        assert one.records == []
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_an_idle_connection_is_closed_and_others_are_not_told_apart_by_it(serve):
    with serve(front={"limits": Limits(idle_s=0.2)}) as one, Raw(one.url) as client:
        client.get()
        assert client.responses(1)[0][0] == 200
        assert client.rest() == b""


def test_a_head_beyond_its_size_is_a_431(single):
    with Raw(single.url) as client:
        client.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        line = b"x-more: " + b"a" * 1000 + b"\r\n"
        try:
            for _ in range(2 * HEAD_BYTES // len(line)):
                client.send(line)
        except ConnectionError:
            pass
        assert client.rest().startswith(b"HTTP/1.1 431")
    with Raw(single.url) as client:
        client.get(head="x-more: " + "a" * (HEAD_BYTES - 5000) + "\r\n")
        assert client.responses(1)[0][0] == 200


def test_garbage_is_a_400_in_the_envelope(single):
    with Raw(single.url) as client:
        answer = client.send(b"\x16\x03\x01\x02\x00 not http\r\n\r\n").rest()
    assert answer.startswith(b"HTTP/1.1 400")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert b"x-content-type-options: nosniff" in answer


def test_bodies_have_a_size_together_that_comes_back_when_they_are_answered(serve):
    start = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 70000\r\n\r\n".encode()
    with serve(front={"limits": Limits(bodies_bytes=100_000)}) as one:
        with Raw(one.url) as first, Raw(one.url) as second:
            first.send(start + b" " * 60_000)
            wait_until(lambda: getattr(one.server.server_state, "luce_bodies", 0) == 60_000)
            answer = second.send(start + b" " * 60_000).rest()
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"retry-after" in answer
            first.send(b" " * 10_000)
            assert first.responses(1)[0][0] == 400
            first.post(max_tokens=1)
            assert first.responses(1)[0][0] == 200
        wait_until(lambda: not one.server.server_state.connections)
        assert one.server.server_state.luce_bodies == 0


@pytest.mark.parametrize("body", [b"{" + b" " * 3000, b"x" * 900])
def test_an_error_does_not_keep_the_body_it_is_about(body):
    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    head = [(b"content-length", b"1")]
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": head}, receive)
    with pytest.raises(RequestError) as caught:
        asyncio.run(read_json(request, 2000))
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    assert any("raw" in local for local in frames)
    assert not any(local.get("raw") for local in frames if isinstance(local.get("raw"), bytearray))


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="a Linux option")
def test_hosts_that_vanish_are_noticed_by_the_kernel(single):
    with Raw(single.url) as client:
        client.get()
        assert client.responses(1)[0][0] == 200
        (connection,) = single.server.server_state.connections
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * Limits().write_s


@pytest.mark.parametrize("expect", ["", "Expect: 100-continue\r\n"])
def test_a_huge_body_is_a_413_without_being_read(single, expect):
    size = 100_000_000
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{expect}Content-Length: {size}\r\n\r\n"
    with Raw(single.url) as client:
        answer = client.send(head.encode()).until(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 413")  # and no 100 before it
        assert b"connection: close" in answer
        sent = 0
        with suppress(ConnectionError):
            while sent < size:
                sent += client.socket.send(bytes(1 << 16))
        assert sent < size / 2  # what the kernels on both sides buffer, and little more
    assert size / 2 > LINGER_BYTES


def test_a_wanted_continue_comes_only_for_a_body_that_will_be_read(single):
    raw = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}).encode()
    head = f"Expect: 100-continue\r\nContent-Length: {len(raw)}\r\n"
    with Raw(single.url) as client:
        client.send(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n".encode())
        assert client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.seen = b""
        client.send(raw)
        assert client.responses(1)[0][0] == 200


def test_an_early_answer_is_readable_while_the_client_still_sends(single):
    with Raw(single.url) as client:
        client.send(
            b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50000\r\n\r\n" + b"x" * 20000
        )
        client.until(b"\r\n\r\n")
        client.send(b"x" * 20000)
        assert client.rest().startswith(b"HTTP/1.1 404")
        assert b"<reset>" not in client.seen


def test_a_client_that_reads_nothing_is_cut_off_and_its_request_cancelled(serve):
    with serve(front={"limits": Limits(write_s=0.3)}, context=8192) as one:
        with Raw(one.url, receive_buffer=4096) as client:
            client.post(stream=True, logprobs=True, top_logprobs=20)
            wait_until(lambda: one.records)
            assert [record.done.reason for record in one.records] == ["cancelled"]
        assert httpx.get(f"{one.url}/health", timeout=60).status_code == 200
        wait_until(lambda: not one.server.server_state.connections)


def test_requests_ahead_are_answered_in_order(single, calls):
    with Raw(single.url) as client:
        client.get("/v1/models/a").post(max_tokens=2).get("/v1/models/b").post(max_tokens=1).get()
        statuses = [status for status, _ in client.responses(5)]
    assert statuses == [404, 200, 404, 200, 200]
    with Raw(single.url) as client:
        client.get("/v1/models/a").get().leave("half")
        assert client.rest().count(b"HTTP/1.1 ") == 2


def test_thousands_of_requests_ahead_stay_bytes(single, gate, calls):
    gate.hold("held")
    flood = b"GET /v1/models/a HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20_000
    with Raw(single.url) as client:
        client.post(max_tokens=2)
        assert gate.held.wait(PATIENCE_S)
        client.socket.settimeout(0.2)
        with suppress(TimeoutError):  # it has more than the server takes before it answers
            for _ in range(100):
                client.send(flood)
        (connection,) = single.server.server_state.connections
        assert len(connection.pipeline) == 0
        assert len(connection._ahead) < AHEAD_BYTES + (1 << 20)  # and what the loop reads at a time
        assert httpx.get(f"{single.url}/health", timeout=60).status_code == 200
        client.leave("reset")
        gate.open()


def test_a_connection_too_many_is_a_503(serve):
    with serve(front={"limits": Limits(connections=2)}) as one:
        with Raw(one.url) as first, Raw(one.url) as second:
            for client in (first, second):
                client.get()
                assert client.responses(1)[0][0] == 200
            with Raw(one.url) as third:
                answer = third.rest()
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"retry-after: 1" in answer
            first.get()
            assert first.responses(1)[0][0] == 200
        wait_until(lambda: not one.server.server_state.connections)
        assert httpx.get(f"{one.url}/health", timeout=60).status_code == 200


def test_an_offer_of_http2_changes_nothing(single, calls, caplog):
    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    with Raw(single.url) as client:
        for _ in range(2):
            client.post(max_tokens=1, head=offer)
            assert client.responses(1)[0][0] == 200
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_http_1_0_is_answered_without_chunks(single, stream):
    body = json.dumps(
        {"prompt": "x", "max_tokens": 40, "ignore_eos": True, "seed": 1, "stream": stream}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    with Raw(single.url) as old, Raw(single.url) as new:
        answer = old.send(head.encode() + b"\r\n" + body).rest()  # up to the end of the connection
        new.send(head.replace("HTTP/1.0", "HTTP/1.1").encode() + b"Host: localhost\r\n\r\n" + body)
        new.until(b'"finish_reason":"length"' if stream else b'"usage"')
    fields, _, plain = answer.partition(b"\r\n\r\n")
    assert b" 200 " in fields.splitlines()[0]
    assert b"chunked" not in fields.lower()
    if stream:
        assert b"chunked" in new.seen.lower()
        assert b"\r\n" not in plain
        assert plain.endswith(b"data: [DONE]\n\n")
        events = [json.loads(line[6:]) for line in plain.splitlines() if line.startswith(b"data: {")]
        assert sum(len(event["choices"][0]["text"]) for event in events if event["choices"]) > 0
    else:
        assert json.loads(plain)["usage"]["completion_tokens"] == 40


def test_a_thousand_idle_connections_keep_nobody_waiting(single, calls):
    idle = [socket.create_connection(single.server.servers[0].sockets[0].getsockname()) for _ in range(1000)]
    with Raw(single.url) as client:
        client.post(max_tokens=2)
        assert client.responses(1)[0][0] == 200
    for one in idle:
        one.close()
