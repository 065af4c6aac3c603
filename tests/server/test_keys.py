"""Keys: several, from a file that may change, in two headers; what they say of a request; before any body."""

import asyncio
import os
import socket

import httpx
import pytest

from luce_core.errors import UsageError
from luce_core.server.auth import ApiKeys, KeyRing
from luce_core.server.settings import ServerSettings


def write(path, *keys, at):
    """Keys in a file whose time is `at`, so that no clock decides whether a change is seen."""
    path.write_text("".join(f"{key}\n" for key in keys), encoding="utf-8")
    os.utime(path, ns=(at, at))


# --- the file


def test_a_changed_file_changes_the_keys_and_given_ones_stay(tmp_path):
    file = tmp_path / "keys"
    write(file, "one", "two", at=1)
    ring = KeyRing(["zero"], file)
    keys = (b"zero", b"one", b"two", b"three")
    assert [bool(ring.tenant([key])) for key in keys] == [True, True, True, False]
    write(file, "two", "three", at=2)
    assert [bool(ring.tenant([key])) for key in keys] == [True, False, True, True]


@pytest.mark.parametrize("content", [None, b"", b"# nobody\n", b"\xff\xfe\n"])
def test_a_file_that_became_useless_changes_nothing_and_is_logged_once(tmp_path, caplog, content):
    file = tmp_path / "keys"
    write(file, "one", at=1)
    ring = KeyRing([], file)
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
        os.utime(file, ns=(2, 2))
    for _ in range(3):
        assert ring.tenant([b"one"])
        assert ring.tenant([b"two"]) is None
    assert caplog.text.count("The keys read before stay in force") == 1
    assert str(file) in caplog.text
    write(file, "two", at=3)
    assert ring.tenant([b"one"]) is None
    assert ring.tenant([b"two"])


def test_at_the_start_a_useless_file_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        KeyRing([], tmp_path / "absent")


def test_a_running_server_takes_new_keys_and_drops_old_ones(serve, tmp_path):
    file = tmp_path / "keys"
    write(file, "old", at=1)
    with (
        serve(settings=ServerSettings(api_key_file=file)) as one,
        httpx.Client(base_url=one.url, timeout=60) as client,
    ):

        def status(key):
            return client.get("/v1/models", headers={"x-api-key": key}).status_code

        assert (status("old"), status("new")) == (200, 401)
        write(file, "new", at=2)
        assert (status("old"), status("new")) == (401, 200)


# --- the headers


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer k", "x-api-key": "wrong"}, 200),
        ({"authorization": "Bearer wrong", "x-api-key": "k"}, 200),
        ({"authorization": "Basic eDp5", "x-api-key": "k"}, 200),
        ({"authorization": "Bearer wrong", "x-api-key": "wrong"}, 401),
        ({"authorization": "Bearer", "x-api-key": ""}, 401),
        ({"authorization": "k"}, 401),
        ({"cookie": "x-api-key=k"}, 401),
    ],
)
def test_either_header_opens(serve, headers, status):
    settings = ServerSettings(api_keys=("k",))
    with serve(settings=settings) as one:
        assert httpx.get(f"{one.url}/v1/models", headers=headers, timeout=60).status_code == status


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "DELETE"])
@pytest.mark.parametrize(
    "path", ["/", "/health/", "//health", "/healthz", "/ready/x", "/openapi.json", "/metrics"]
)
def test_nothing_but_the_two_probes_is_open(method, path):
    async def unreachable(scope, receive, send):
        raise AssertionError(f"{method} {path} got through")

    told = []

    async def send(message):
        told.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": []}
    asyncio.run(ApiKeys(unreachable, KeyRing(["k"]))(scope, None, send))
    assert told[0]["status"] == 401


def test_a_client_that_waits_before_it_sends_its_body_is_refused_at_once(serve):
    """`Expect: 100-continue`: without a key nobody is asked to go on."""
    settings = ServerSettings(api_keys=("k",))
    with serve(settings=settings) as one:
        port = httpx.URL(one.url).port
        with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
            raw.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100000000\r\nExpect: 100-continue\r\n\r\n"
            )
            said = raw.recv(4096)
            assert said.startswith(b"HTTP/1.1 401")
            assert b"100 Continue" not in said


# --- whose key it was


def tenant_of(keys, headers):
    seen = {}

    async def app(scope, receive, send):
        seen.update(scope["state"])

    scope = {"type": "http", "method": "GET", "path": "/health", "headers": headers}
    asyncio.run(ApiKeys(app, keys)(scope, None, None))
    return seen["tenant"]


def test_a_request_knows_whose_key_it_came_with_but_not_the_key():
    ring = KeyRing(["first-key", "second-key"])
    first = tenant_of(ring, [(b"authorization", b"Bearer first-key")])
    assert first == tenant_of(ring, [(b"x-api-key", b"first-key")])
    second = tenant_of(ring, [(b"x-api-key", b"second-key")])
    assert first != second
    assert len(first) == 12
    assert set(first) <= set("0123456789abcdef")
    assert tenant_of(ring, []) == ""  # a probe
    assert tenant_of(KeyRing([]), [(b"x-api-key", b"first-key")]) == ""


def test_the_tag_survives_a_change_of_the_file_and_differs_between_processes(tmp_path):
    file = tmp_path / "keys"
    write(file, "one", at=1)
    ring = KeyRing([], file)
    before = ring.tenant([b"one"])
    write(file, "zero", "one", at=2)
    assert ring.tenant([b"one"]) == before
    assert KeyRing(["one"]).tenant([b"one"]) != before  # salted: tags cannot be looked up
