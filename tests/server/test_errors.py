"""Every error in OpenAI's form: the table in docs/serving.md, line by line, from a real server."""

import ast
import json
import re
import socket
from pathlib import Path

import httpx
import openai
import pytest

import luce_core
from luce_core.errors import CapacityError, LuceError, RequestError, UnavailableError
from luce_core.server.connection import Limits
from luce_core.server.errors import CODES, TYPES, envelope, error_response
from luce_core.server.openapi import OPERATIONS
from luce_core.server.settings import ServerSettings

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def rows(heading):
    """The cells of a table, without code marks."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def documented():
    """(status, code) -> type, from the page; and the statuses with a star."""
    found, starred = {}, set()
    for first, kind, code, _ in rows("Errors")[1:]:
        if first:
            status, kind_now = int(first.rstrip("*")), kind
            starred |= {status} if first.endswith("*") else set()
        found[status, code] = kind_now
    return found, starred


TABLE, RETRIED = documented()


def refused(http, **request):
    """(status, error) of a request that fails, its form checked."""
    return judged(http.request(**request))


def judged(response):
    error = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert TABLE[response.status_code, error["code"]] == error["type"]
    assert ("retry-after" in response.headers) == (response.status_code in RETRIED)
    assert response.headers["x-content-type-options"] == "nosniff"
    return response.status_code, error


# --- the page says what the code says


def test_the_table_has_every_status_with_its_type_and_usual_code():
    assert {status for status, _ in TABLE} == set(TYPES) == set(CODES)
    for status, code in CODES.items():
        assert TABLE[status, code] == TYPES[status]
    assert {429, 503} == RETRIED


def test_every_code_in_the_sources_is_in_the_table():
    """`code="..."` of any call in the rooms that answer requests, and what `CODES` holds."""
    root = Path(luce_core.__file__).parent
    used = set(CODES.values())
    for path in [root / "errors.py", *root.glob("server/*.py"), *root.glob("text/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "code" and isinstance(node.value, ast.Constant):
                used.add(node.value.value)
    used -= {None}
    written = {code for _, code in TABLE}
    assert used <= written
    assert written - used == {"missing_required_parameter", "invalid_type"}  # made of pydantic's kinds


def test_every_endpoint_is_listed():
    listed = {tuple(cells[0].split()) for cells in rows("Endpoints")[1:]}
    assert listed == {(one.method, one.path) for one in OPERATIONS}


# --- and what happens is what it says


@pytest.fixture
def served(standing):
    return standing


@pytest.mark.parametrize(
    ("request_", "status", "code", "param"),
    [
        ({"url": "/tokenize", "content": b"{"}, 400, "invalid_json", None),
        ({"url": "/tokenize", "content": b"[]"}, 400, "invalid_json", None),
        ({"url": "/tokenize", "json": {}}, 400, "missing_required_parameter", "content"),
        ({"url": "/tokenize", "json": {"content": 5}}, 400, "invalid_type", "content"),
        ({"url": CHAT, "json": {**HELLO, "top_k": "many"}}, 400, "invalid_type", "top_k"),
        ({"url": CHAT, "json": {**HELLO, "top_p": 2}}, 400, "invalid_value", "top_p"),
        ({"url": CHAT, "json": {**HELLO, "logit_bias": {"-1": 1}}}, 400, "invalid_value", "logit_bias"),
        (
            {"url": CHAT, "json": {**HELLO, "response_format": {"type": "x"}}},
            400, "invalid_value", "response_format",
        ),
        (
            {"url": CHAT, "json": {"messages": [{"role": "user", "content": "x" * 600}]}},
            400, "context_length_exceeded", "messages",
        ),
        (
            {"url": CHAT, "json": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}},
            400, "image_unsupported", "messages[0].content[0].type",
        ),
        (
            {"method": "GET", "url": "/health", "headers": {"host": "evil.example"}},
            403, "host_not_allowed", None,
        ),
        ({"method": "GET", "url": "/v1/nothing"}, 404, "unknown_url", None),
        ({"method": "GET", "url": "/v1/models/other"}, 404, "model_not_found", "model"),
        ({"method": "GET", "url": CHAT}, 405, "method_not_supported", None),
        (
            {"url": "/tokenize", "content": b"x", "headers": {"content-type": "text/plain"}},
            415, "unsupported_content_type", None,
        ),
        ({"url": CHAT, "json": {**HELLO, "timeout": 1e-9}}, 504, "deadline_exceeded", None),
    ],
)  # fmt: skip
def test_what_a_request_can_do_wrong(http, request_, status, code, param):
    found, error = refused(http, **{"method": "POST", **request_})
    assert (found, error["code"], error["param"]) == (status, code, param)


def test_a_wrong_method_is_told_the_right_ones(http):
    response = http.get(CHAT)
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("settings", "request_", "status", "code"),
    [
        (ServerSettings(api_keys=("k",)), {"json": HELLO}, 401, "invalid_api_key"),
        (ServerSettings(body_limit_bytes=50), {"json": HELLO}, 413, "body_too_large"),
        (ServerSettings(strict_model=True), {"json": HELLO}, 404, "model_not_found"),
    ],
)
def test_what_a_server_can_be_told_to_refuse(serve, settings, request_, status, code):
    with serve(settings=settings) as one, httpx.Client(base_url=one.url, timeout=60) as client:
        found, error = refused(client, method="POST", url=CHAT, **request_)
    assert (found, error["code"]) == (status, code)


@pytest.mark.parametrize(
    ("template", "code"),
    [
        ("{{ raise_exception('no') }}", "chat_template_error"),
        ("{% for i in range(10**9) %}x{% endfor %}", ""),
    ],
)
def test_what_a_template_can_refuse(serve, template, code):
    with serve(template=template) as one, httpx.Client(base_url=one.url, timeout=60) as client:
        found, error = refused(client, method="POST", url=CHAT, json=HELLO)
    assert (found, error["code"]) == (400, code or error["code"])
    assert error["code"].startswith("chat_template")


def test_a_full_queue_a_failing_engine_and_a_gone_one(serve):
    with serve(max_queue=0) as one, httpx.Client(base_url=one.url, timeout=60) as client:
        assert refused(client, method="POST", url=CHAT, json=HELLO)[1]["code"] == "queue_full"
    with serve() as one, httpx.Client(base_url=one.url, timeout=60) as client:
        one.engine.programs.backend.forward = None
        assert refused(client, method="POST", url=CHAT, json=HELLO)[1]["code"] == "engine_error"
        one.channel.close(0.0)
        assert refused(client, method="POST", url=CHAT, json=HELLO)[1]["code"] == "unavailable"


def said(served, *parts):
    """(status, error) of raw bytes: what no client library sends."""
    where = httpx.URL(served.url)
    with socket.create_connection((where.host, where.port), timeout=60) as raw:
        for part in parts:
            raw.sendall(part)
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    headers = dict(re.split(r": *", line, maxsplit=1) for line in lines[1:])
    return judged(httpx.Response(int(lines[0].split()[1]), headers=headers, content=body))


HEAD = (
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
)


def test_what_no_library_sends(standing, serve):
    assert said(standing, b"nonsense\r\n\r\n")[0] == 400
    assert said(standing, HEAD + b"\r\n")[1]["code"] == "length_required"
    assert said(standing, HEAD + b"X: " + b"x" * 200_000 + b"\r\n\r\n")[1]["code"] == "headers_too_large"
    with serve(front={"limits": Limits(read_s=0.2)}) as one:
        assert said(one, HEAD + b"Content-Length: 9\r\n\r\n{")[1]["code"] == "request_timeout"
        assert said(one, HEAD)[1]["code"] == "request_timeout"


# --- the form itself


@pytest.mark.parametrize("status", [*TYPES, 418, 599])
def test_any_status_has_the_form(status):
    response = error_response(RequestError("no", status=status))
    error = json.loads(response.body)["error"]
    assert all(isinstance(error[name], str) and error[name] for name in ("message", "type", "code"))
    assert ("retry-after" in response.headers) == (status in RETRIED)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (CapacityError("x"), 429, "queue_full"),
        (UnavailableError("x", retry_after_s=7), 503, "unavailable"),
        (LuceError("x"), 500, "engine_error"),
        (ZeroDivisionError("secret"), 500, "internal_error"),
    ],
)
def test_any_error_has_the_form(error, status, code):
    response = error_response(error)
    assert response.status_code == status
    assert json.loads(response.body)["error"]["code"] == code
    assert b"secret" not in response.body
    if status == 503:
        assert response.headers["retry-after"] == "7"


def test_what_is_quoted_is_cut():
    assert len(json.dumps(envelope("x" * 10_000_000, 400))) < 5000


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, openai.BadRequestError), (401, openai.AuthenticationError), (403, openai.PermissionDeniedError),
        (404, openai.NotFoundError), (429, openai.RateLimitError), (500, openai.InternalServerError),
    ],
)  # fmt: skip
def test_the_official_client_raises_its_own_error_for_it(status, kind):
    """Its transport replaced by what `error_response` makes."""
    made = error_response(RequestError("why", status=status, param="p"))

    def answer(request):
        return httpx.Response(made.status_code, headers=dict(made.headers), content=made.body)

    transport = httpx.MockTransport(answer)
    with (
        httpx.Client(transport=transport) as http,
        openai.OpenAI(base_url="http://x/v1", api_key="k", max_retries=0, http_client=http) as client,
        pytest.raises(kind, match="why") as caught,
    ):
        client.models.list()
    assert caught.value.param == "p"
    assert caught.value.code == CODES[status]
    assert caught.value.type == TYPES[status]
