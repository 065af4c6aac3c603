"""Everything around the chat route: health, models, keys, unknown routes."""

import socket

import httpx
import pytest

from luce_core.server.settings import ServerSettings


def test_health_is_ok_while_the_engine_lives_and_503_after(served, http):
    assert http.get("/health").json()["status"] == "ok"
    assert http.get("/").status_code == 200
    served.service.channel.close(0.0)
    gone = http.get("/health")
    assert gone.status_code == 503
    assert gone.json()["status"] == "stopped"
    assert gone.headers["retry-after"] == "1"


def test_models_lists_the_model_with_its_context(http):
    body = http.get("/v1/models").json()
    assert body["object"] == "list"
    (card,) = body["data"]
    assert card["id"] == "toy"
    assert card["context_length"] == card["max_model_len"] == 512
    assert http.get("/v1/models/toy").json() == card


@pytest.mark.parametrize("name", ["other", "org/name", "org/name/more"])
def test_a_model_that_is_not_there_is_a_404_naming_the_one_that_is(http, name):
    response = http.get(f"/v1/models/{name}")
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "model_not_found"
    assert name in error["message"]
    assert "'toy'" in error["message"]


def test_unknown_routes_and_methods_answer_in_the_envelope(http):
    missing = http.get("/v1/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "not_found_error"
    wrong = http.get("/v1/chat/completions")
    assert wrong.status_code == 405
    assert "POST" in wrong.headers["allow"]
    assert wrong.json()["error"]["type"] == "invalid_request_error"


@pytest.fixture
def guarded(serve):
    with (
        serve(settings=ServerSettings(api_keys=("first-key", "clé"))) as one,
        httpx.Client(base_url=one.url, timeout=60) as client,
    ):
        yield client


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer first-key-and-more"},
        {"authorization": "Basic first-key"},
        {"x-api-key": "first"},
        {"x-api-key": "x" * 5000},
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/v1/nothing", "/"])
def test_without_a_valid_key_everything_but_health_is_a_401(guarded, headers, path):
    response = guarded.request("POST" if "chat" in path else "GET", path, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    assert guarded.get("/health", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer first-key"},
        {"authorization": "bearer  first-key"},
        {"x-api-key": "first-key"},
        {"x-api-key": "clé".encode()},
    ],
)
def test_any_of_the_keys_opens_in_either_form(guarded, headers):
    assert guarded.get("/v1/models", headers=headers).status_code == 200


def test_the_key_is_checked_before_the_body_is_read(guarded):
    # Half a body, and a connection that stays open: only a server that does not wait for the rest can answer.
    port = guarded.base_url.port
    with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
        raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        assert raw.recv(100).startswith(b"HTTP/1.1 401")


def test_pages_of_an_allowed_origin_may_call_and_read_errors(serve):
    settings = ServerSettings(api_keys=("k",), cors_origins=("http://page.example",))
    with serve(settings=settings) as one, httpx.Client(base_url=one.url, timeout=60) as client:
        asks = {"origin": "http://page.example", "access-control-request-method": "POST"}
        preflight = client.options("/v1/chat/completions", headers=asks)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "http://page.example"
        refused = client.get("/v1/models", headers={"origin": "http://page.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "http://page.example"
        stranger = client.get("/health", headers={"origin": "http://other.example"})
        assert "access-control-allow-origin" not in stranger.headers


def test_without_allowed_origins_no_page_may_call(http):
    response = http.get("/health", headers={"origin": "http://page.example"})
    assert "access-control-allow-origin" not in response.headers
