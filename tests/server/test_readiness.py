"""What clients are told while the engine loads, restarts or is gone."""

import pytest
from starlette.testclient import TestClient

from luce_core.contracts import ChannelHealth
from luce_core.errors import UnavailableError
from luce_core.server.app import build_app
from luce_core.server.service import GenerationService, ModelFace
from luce_core.testing.toy_vocab import toy_vocabulary
from luce_core.text import ChatTemplate, Tokenizer

LOADING = ChannelHealth("loading", progress=0.43)
RESTARTING = ChannelHealth("restarting", "The engine stopped: reason.", restarts=4, retry_in_s=7.2)
STOPPED = ChannelHealth("stopped", "The engine stopped: ZeroDivisionError: x")
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


class Waiting:
    """A channel whose engine does not answer yet."""

    def __init__(self, health, error):
        self._health = health
        self.error = error

    def submit(self, request, sink):
        raise self.error

    def cancel(self, request):
        pass

    def stats(self):
        return {"running": 0.0, "waiting": 2.0, "alive": 0.0}

    def health(self):
        return self._health

    def close(self, drain_s):
        pass


@pytest.fixture
def client():
    def make(health=LOADING, error=None):
        metadata = toy_vocabulary("bpe")
        face = ModelFace(
            "toy", 512, Tokenizer.from_metadata(metadata), ChatTemplate.from_metadata(metadata), created=0
        )
        service = GenerationService(Waiting(health, error), face)
        return TestClient(build_app(service), base_url="http://127.0.0.1")

    return make


@pytest.mark.parametrize("path", ["/health", "/ready", "/"])
def test_loading_is_a_503_with_its_progress(client, path):
    answer = client().get(path)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json() == {
        "status": "loading", "progress": 0.43, "running": 0, "waiting": 2, "restarts": 0
    }


def test_a_restart_says_why_how_often_and_when_the_next_start_is(client):
    answer = client(RESTARTING).get("/health")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "8"
    body = answer.json()
    assert body["status"] == "restarting"
    assert body["detail"] == RESTARTING.detail
    assert body["restarts"] == 4
    assert body["retry_in_s"] == 7.2


def test_a_stopped_engine_says_why(client):
    body = client(STOPPED).get("/health").json()
    assert body["status"] == "stopped"
    assert "ZeroDivisionError" in body["detail"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hello"})]
)
def test_a_request_meanwhile_is_a_503_before_any_stream_opens(client, path, body, stream):
    answer = client(error=UnavailableError("loading model: 43 %", retry_after_s=3)).post(
        path, json={**body, "stream": stream}
    )
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "3"
    assert answer.json()["error"]["message"] == "loading model: 43 %"


def test_what_needs_no_engine_answers_all_the_same(client):
    one = client()
    assert one.get("/v1/models").json()["data"][0]["id"] == "toy"
    assert one.post("/tokenize", json={"content": "hello"}).status_code == 200
    assert "luce_engine_up 0.0" in one.get("/metrics").text
