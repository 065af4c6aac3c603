"""What every answer says to browsers, and the names the server answers to."""

import socket
import ssl

import httpx
import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from luce_core.server.headers import AllowedHosts
from luce_core.server.settings import ServerSettings
from luce_core.server.tls import TlsFiles

ALWAYS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


REQUESTS = {
    "health": ("GET", "/health", {}, 200),
    "metrics": ("GET", "/metrics", {}, 200),
    "head": ("HEAD", "/health", {}, 200),
    "answer": ("POST", "/v1/chat/completions", {"json": CHAT}, 200),
    "stream": ("POST", "/v1/chat/completions", {"json": {**CHAT, "stream": True}}, 200),
    "unknown route": ("GET", "/nothing", {}, 404),
    "slash too many": ("GET", "/health/", {}, 404),
    "method": ("DELETE", "/health", {}, 405),
    "options": ("OPTIONS", "/v1/chat/completions", {}, 405),
    "not json": (
        "POST",
        "/tokenize",
        {"content": b"{", "headers": {"content-type": "application/json"}},
        400,
    ),
    "wrong field": ("POST", "/tokenize", {"json": {"content": 5}}, 400),
    "wrong host": ("GET", "/health", {"headers": {"host": "evil.example"}}, 403),
}


@pytest.fixture
def served(standing):
    return standing


@pytest.mark.parametrize("name", REQUESTS)
def test_every_answer_carries_them(http, name):
    method, path, more, status = REQUESTS[name]
    response = http.request(method, path, **more)
    assert response.status_code == status, response.text
    assert {key: response.headers.get(key) for key in ALWAYS} == ALWAYS
    assert response.headers["cache-control"] == ("no-cache" if name == "stream" else "no-store")
    assert "server" not in response.headers
    assert "strict-transport-security" not in response.headers


def test_also_an_answer_without_a_key_and_one_to_a_preflight(serve):
    settings = ServerSettings(api_keys=("k",), cors_origins=("http://page.example",))
    with serve(settings=settings) as one, httpx.Client(base_url=one.url, timeout=60) as client:
        page = {"origin": "http://page.example"}
        for response, status in (
            (client.get("/v1/models", headers=page), 401),
            (client.options("/v1/models", headers={**page, "access-control-request-method": "GET"}), 200),
        ):
            assert response.status_code == status
            assert {key: response.headers.get(key) for key in ALWAYS} == ALWAYS
            assert response.headers["access-control-allow-origin"] == "http://page.example"


def test_a_failure_nobody_expected_is_a_500_in_the_envelope_with_all_headers(serve, monkeypatch, caplog):
    def fail(self):
        raise ZeroDivisionError("in a handler")

    settings = ServerSettings(cors_origins=("http://page.example",))
    with serve(settings=settings) as one, httpx.Client(base_url=one.url, timeout=60) as client:
        monkeypatch.setattr(type(one.service.metrics), "render", fail)
        response = client.get("/metrics", headers={"origin": "http://page.example"})
    assert response.status_code == 500
    assert response.json()["error"] == {
        "message": "Internal error: ZeroDivisionError. The log has the details.",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    assert {key: response.headers.get(key) for key in ALWAYS} == ALWAYS
    assert response.headers["access-control-allow-origin"] == "http://page.example"
    assert "GET /metrics failed" in caplog.text


def test_what_is_no_http_gets_them_too(served):
    port = httpx.URL(served.url).port
    with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
        raw.sendall(b"nonsense\r\n\r\n")
        said = b"".join(iter(lambda: raw.recv(4096), b"")).decode().lower()
    assert said.startswith("http/1.1 400")
    assert "x-content-type-options: nosniff" in said
    assert '"code": "invalid_value"' in said


# --- names


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8080",
        "LocalHost.:1",
        "llm.localhost:1",
        "127.0.0.1:80",
        "10.0.0.7",
        "[::1]:8080",
    ],
)
def test_localhost_and_addresses_name_any_server(http, host):
    assert http.get("/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8080",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "notlocalhost",
        "x",
    ],
)
@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_a_page_that_points_its_own_name_here_reaches_nothing(http, host, path):
    response = http.get(path, headers={"host": host})
    assert response.status_code == 403
    error = response.json()["error"]
    assert error["code"] == "host_not_allowed"
    assert repr(host) in error["message"]
    assert "--allowed-host" in error["message"]


def test_a_preflight_under_a_strange_name_is_refused_as_well(serve):
    settings = ServerSettings(cors_origins=("*",))
    with serve(settings=settings) as one, httpx.Client(base_url=one.url, timeout=60) as client:
        asks = {
            "origin": "http://evil.example",
            "access-control-request-method": "POST",
            "host": "evil.example",
        }
        assert client.options("/v1/models", headers=asks).status_code == 403


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        (ServerSettings(allowed_hosts=("box.example",)), 200),
        (ServerSettings(allowed_hosts=("BOX.example.",)), 200),
        (ServerSettings(allowed_hosts=("*",)), 200),
        (ServerSettings(allowed_hosts=("other.example", "example")), 403),
        (ServerSettings(api_keys=("k",)), 200),  # which no page knows
    ],
)
def test_names_can_be_allowed_and_a_key_makes_them_needless(serve, settings, status):
    with serve(settings=settings) as one, httpx.Client(base_url=one.url, timeout=60) as client:
        headers = {"host": "box.example:8080", "x-api-key": "k"}
        assert client.get("/v1/models", headers=headers).status_code == status


def test_no_name_is_needed_where_http_has_none(served):
    port = httpx.URL(served.url).port
    with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
        raw.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 200")


def test_every_one_of_several_hosts_must_name_the_server(served):
    port = httpx.URL(served.url).port
    with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert raw.recv(4096).startswith((b"HTTP/1.1 403", b"HTTP/1.1 400"))


@given(st.text(st.characters(max_codepoint=0xFF)))
def test_whatever_a_host_says_is_judged(host):
    allowed = AllowedHosts(None, ["box"]).allows(host)
    name = host.strip().lower()
    if not any(mark in name for mark in ":[]"):
        names_it = name.rstrip(".") in ("box", "localhost") or name.rstrip(".").endswith(".localhost")
        assert allowed == (names_it or _is_ipv4(name.rstrip(".")))


def _is_ipv4(text):
    parts = text.split(".")
    digits = all(part and set(part) <= set("0123456789") and str(int(part)) == part for part in parts)
    return len(parts) == 4 and digits and all(int(part) < 256 for part in parts)


# --- pages of other sites


def test_a_page_cannot_send_a_body_without_asking_first(http):
    """What a page may send elsewhere without a preflight: three types of forms, or none at all."""
    body = b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None):
        headers = {"origin": "http://evil.example"} | ({"content-type": kind} if kind else {})
        response = http.post("/v1/chat/completions", content=body, headers=headers)
        assert response.status_code == 415, kind
        assert response.json()["error"]["code"] == "unsupported_content_type"
    assert http.post("/v1/chat/completions", content=body).status_code == 200  # a program, not a page


# --- TLS


@pytest.fixture
def secured(serve, tmp_path):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("127.0.0.1", "localhost").private_key_and_cert_chain_pem.write_to_path(
        tmp_path / "c.pem"
    )
    front = {"tls": TlsFiles(tmp_path / "c.pem")}
    with serve(settings=ServerSettings(tls=True), front=front) as one:
        yield one, authority


def test_under_tls_browsers_are_told_to_stay_with_it_but_not_for_localhost(secured):
    served, authority = secured
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with httpx.Client(base_url=served.url, verify=context, timeout=60) as client:
        answer = client.get("/health")
        assert answer.headers["strict-transport-security"] == "max-age=31536000"
        assert client.get("/nothing").headers["strict-transport-security"] == "max-age=31536000"
        for name in ("localhost:1", "a.localhost"):
            assert "strict-transport-security" not in client.get("/health", headers={"host": name}).headers
        named = client.get("/v1/models", headers={"host": "box.example"})
        assert named.status_code == 200  # a page under another name has no certificate for it
