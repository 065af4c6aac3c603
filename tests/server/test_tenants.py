"""Whose request it is and how long it may take: from HTTP to the engine, and back as an answer."""

import json

import httpx
import pytest

from luce_core.server.settings import ServerSettings

CHAT = {"messages": [{"role": "user", "content": "hello world"}], "max_tokens": 9, "temperature": 0}
LEGACY = {"prompt": "hello world", "max_tokens": 9, "temperature": 0}
PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": LEGACY}


def listen_in(served):
    """The requests that reach the engine from now on."""
    seen, submit = [], served.engine.submit

    def submitted(request, sink):
        seen.append(request)
        submit(request, sink)

    served.engine.submit = submitted
    return seen


def post(served, path="/v1/chat/completions", headers=None, **more):
    body = {**PATHS[path], "ignore_eos": True, **more}
    return httpx.post(served.url + path, json=body, headers=headers, timeout=60)


# --- tenants


def test_every_key_is_a_tenant_and_its_tag_is_not_the_key(serve):
    with serve(settings=ServerSettings(api_keys=("first-secret", "second-secret"))) as served:
        seen = listen_in(served)
        for key in ("first-secret", "second-secret", "first-secret"):
            assert post(served, headers={"authorization": f"Bearer {key}"}).status_code == 200
        assert post(served, headers={"x-api-key": "second-secret"}, user="first-secret").status_code == 200
    first, second, again, other = (request.tenant for request in seen)
    assert first == again != second == other
    assert all(len(tag) == 12 and "secret" not in tag for tag in (first, second))


def test_without_keys_nobody_is_told_apart(served):
    seen = listen_in(served)
    post(served, user="alice")
    post(served, user="bob", headers={"authorization": "Bearer anything"})
    assert [request.tenant for request in seen] == ["", ""]


def test_all_answers_of_one_request_are_of_its_tenant(serve):
    with serve(settings=ServerSettings(api_keys=("a", "b"))) as served:
        seen = listen_in(served)
        post(served, "/v1/completions", headers={"authorization": "Bearer a"}, n=3, prompt=["x", "y"])
    assert len({request.tenant for request in seen}) == 1
    assert len(seen) == 6


# --- time


@pytest.mark.parametrize(
    ("limit", "asked", "wanted"),
    [(None, None, None), (None, 7.5, 7.5), (5.0, None, 5.0), (5.0, 7.5, 5.0), (5.0, 2, 2)],
)
@pytest.mark.parametrize("path", PATHS)
def test_the_shorter_of_both_limits_counts(serve, path, limit, asked, wanted):
    with serve(settings=ServerSettings(request_timeout_s=limit)) as served:
        seen = listen_in(served)
        assert post(served, path, **({} if asked is None else {"timeout": asked})).status_code == 200
    assert seen[0].deadline_s == wanted


@pytest.mark.parametrize("value", [0, -1, "soon", 1e12, [3]])
def test_a_timeout_that_is_none_is_named(served, value):
    response = post(served, timeout=value)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("timeout")


def impatient(served):
    """Every look at the engine's clock takes an hour."""
    hours = iter(range(10**6))
    served.engine.clock = lambda: 3600.0 * next(hours)


@pytest.mark.parametrize("path", PATHS)
def test_a_request_that_is_late_before_its_first_token_is_a_504(served, path):
    impatient(served)
    response = post(served, path, timeout=60)
    assert response.status_code == 504
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")
    assert "The deadline of 60 s passed in the queue" in error["message"]


@pytest.mark.parametrize("path", PATHS)
def test_in_a_stream_the_same_error_is_an_event(served, path):
    impatient(served)
    response = post(served, path, timeout=60, stream=True)
    assert response.status_code == 200
    data = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    errors = [found["error"] for found in map(json.loads, data[:-1]) if "error" in found]
    assert [error["code"] for error in errors] == ["deadline_exceeded"]
    assert data[-1] == "[DONE]"


def test_an_answer_that_is_late_ends_with_what_it_has(served):
    engine = served.engine
    engine.clock = lambda: 1e6 * any(seq.emitted >= 4 for seq in engine.running.values())
    response = post(served, timeout=60, max_tokens=200)
    assert response.status_code == 200
    body = response.json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 4
    done = served.records[-1].done
    assert done.late
    assert done.aside == ("the deadline of 60 s passed: the answer ends early",)
