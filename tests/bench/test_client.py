import asyncio
import socket

import pytest

from luce_core.bench.client import Broken, Unreachable, fetch, generate, parse_url
from luce_core.errors import UsageError

from .conftest import DONE, GOOD, STREAM, chunk, event, finish, says, whole


def ask(server, **more):
    target = parse_url(server.url, **more)
    return asyncio.run(generate(target, "/chat/completions", {"n": 1}))


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("http://h:1/", "http://h:1/v1"),
        ("http://h:1/v1/", "http://h:1/v1"),
        ("http://h", "http://h:80/v1"),
        ("https://h/api/v1", "https://h:443/api/v1"),
        ("http://[::1]:8", "http://[::1]:8/v1"),
    ],
)
def test_addresses(text, url):
    assert parse_url(text).url == url


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("localhost:8080", "no address of a web server"),
        ("ftp://h/v1", "no address of a web server"),
        ("http://", "no address of a web server"),
        ("http://h:port", "--url"),
        ("http://h:1/api", "'/api', and the OpenAI API lies under one that ends in '/v1'"),
        ("http://h:1/v1/chat/completions", "ends in '/v1'"),
        ("http://user:key@h/v1", "--api-key"),
        ("http://h/v1?x=1", "must end with its path"),
    ],
)
def test_addresses_that_are_none(text, said):
    with pytest.raises(UsageError) as wrong:
        parse_url(text)
    assert said in str(wrong.value)
    assert "Wanted http://HOST:PORT" in str(wrong.value)


def test_a_good_stream(raw):
    with raw(GOOD) as server:
        found = ask(server, key="secret")
        [head] = server.heads
    assert (found.end, found.tokens) == ("ok", 2)
    assert found.sent_s <= found.chunks_s[0] <= found.chunks_s[1] <= found.ended_s
    assert head.startswith("POST /v1/chat/completions HTTP/1.1\r\n")
    assert "authorization: bearer secret" in head.lower()
    assert f"host: 127.0.0.1:{server.port}" in head.lower()


def test_a_chunked_stream_with_comments_and_usage(raw):
    pieces = [b": hi\n\n", chunk("a"), b": ping\n\n", chunk("b"), finish(), DONE]
    pieces.insert(5, event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}))
    head = STREAM.replace(b"connection: close", b"transfer-encoding: chunked")
    body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    with raw(says(head, body)) as server:
        found = ask(server)
    assert (found.end, found.prompt_tokens, found.usage_tokens) == ("ok", 3, 2)


@pytest.mark.parametrize(
    ("pieces", "end", "said"),
    [
        ([], "cut", "without"),
        ([b"HTTP/1.1 200 OK\r\ncontent-type: te"], "cut", ""),
        ([STREAM], "cut", "after 0 chunks"),
        ([STREAM, chunk("a")], "cut", "after 1 chunks"),
        ([STREAM, chunk("a"), b'data: {"choi'], "garbage", "choi"),
        ([STREAM, chunk("a"), b"data: junk\n\n"], "garbage", "junk"),
        ([STREAM.replace(b"connection: close", b"content-length: 1000"), chunk("a")], "cut", ""),
        ([STREAM.replace(b"connection: close", b"transfer-encoding: chunked"), b"zzz\r\n"], "cut", ""),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], "cut", ""),
        ([b"\x00\xff" * 40], "cut", ""),
        ([whole(429, {"error": {"message": "later"}}, "retry-after: 1")], "rejected", "HTTP 429: later"),
        ([whole(500, {"error": {"message": "oops"}})], "status", "HTTP 500: oops"),
        ([whole(302, {}, "location: /x")], "status", "HTTP 302"),
        ([whole(200, {"choices": []})], "no stream", "application/json"),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", STREAM, chunk("a"), DONE], "ok", ""),
        ([STREAM, event({"error": {"message": "boom"}}), DONE], "error", "boom"),
        ([STREAM, finish(), DONE], "empty", "no text"),
    ],
)
def test_servers_that_misbehave(raw, pieces, end, said):
    with raw(says(*pieces)) as server:
        found = ask(server)
    assert (found.end, said in found.reason) == (end, True), found


def test_a_reset_in_the_middle_is_a_cut_with_what_came(raw):
    def reset(client, body):
        client.sendall(STREAM + chunk("a"))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")

    with raw(reset) as server:
        found = ask(server)
    assert found.end == "cut"
    assert len(found.chunks_s) <= 1  # a reset may overtake what was sent


def test_silence_is_a_timeout(raw):
    def silent(client, body):
        client.sendall(STREAM + chunk("a"))
        client.recv(1)  # until the client has had enough

    with raw(silent) as server:
        found = ask(server, timeout_s=0.2)
    assert (found.end, found.reason) == ("timeout", "no byte for 0.2 s")


def test_nobody_there():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(Unreachable, match="refused"):
        asyncio.run(generate(parse_url(f"http://127.0.0.1:{port}"), "/x", {}))
    with pytest.raises(Unreachable):
        asyncio.run(fetch(parse_url("http://no-such-host.invalid"), "GET", "/models"))


def test_an_answer_in_one_piece(raw):
    with raw(GOOD) as server:
        reply = asyncio.run(fetch(parse_url(server.url), "GET", "/models"))
    assert (reply.status, reply.headers["server"]) == (200, "rawhide")
    assert b'"raw"' in reply.body


def test_an_endless_answer_is_not_kept(raw, monkeypatch):
    monkeypatch.setattr("luce_core.bench.client.BODY_BYTES", 10)
    with raw(GOOD, models=whole(500, {"error": "x" * 5000})) as server:
        reply = asyncio.run(fetch(parse_url(server.url), "GET", "/models"))
    assert len(reply.body) == 10
    assert reply.message


def test_a_broken_answer_is_broken(raw):
    with raw(GOOD, models=b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{") as server, pytest.raises(Broken):
        asyncio.run(fetch(parse_url(server.url), "GET", "/models"))


def test_a_stream_is_read_to_its_end_so_that_the_server_sees_no_client_that_ran_away(raw):
    left = []

    def careful(client, body):
        client.sendall(STREAM.replace(b"connection: close", b"transfer-encoding: chunked"))
        for piece in (chunk("a") + DONE, b": behind the end\n\n"):
            client.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        client.sendall(b"0\r\n\r\n")
        left.append(client.recv(1))  # a reset would raise

    with raw(careful) as server:
        assert ask(server).end == "ok"
    assert left == [b""]


def test_a_stream_that_stays_open_behind_its_end_holds_nobody_up(raw, monkeypatch):
    monkeypatch.setattr("luce_core.bench.client.SETTLE_S", 0.05)

    def lingering(client, body):
        client.sendall(STREAM + chunk("a") + DONE)
        client.recv(1)  # until the client has gone

    with raw(lingering) as server:
        assert ask(server).end == "ok"
