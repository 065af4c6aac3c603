"""`/metrics`, `/props`, `/ready`: what a finished request leaves in them, read by Prometheus' own parser."""

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from luce_core.server.settings import ServerSettings

MESSAGES = [{"role": "user", "content": "hello world " * 8}]


def scrape(http):
    response = http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            found[(sample.name, *sorted(sample.labels.items()))] = sample.value
    return found


def ask(http, **more):
    body = {"messages": MESSAGES, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **more}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    return response.json()["usage"]


def test_finished_requests_are_counted(http):
    before = scrape(http)
    assert before[("luce_engine_up",)] == 1
    assert before[("luce_prompt_tokens_total",)] == 0
    usages = [ask(http), ask(http)]
    after = scrape(http)
    assert after[("luce_requests_total", ("api", "chat"), ("reason", "length"))] == 2
    assert after[("luce_prompt_tokens_total",)] == sum(usage["prompt_tokens"] for usage in usages)
    assert after[("luce_completion_tokens_total",)] == 12
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert after[("luce_cached_tokens_total",)] == cached > 0
    for name in ("queue", "time_to_first_token", "prefill", "token"):
        assert after[(f"luce_{name}_seconds_count",)] == 2
        assert after[(f"luce_{name}_seconds_sum",)] >= 0
    assert after[("luce_running_requests",)] == 0
    assert after[("luce_steps_total",)] >= 12
    assert after[("luce_cache_used_blocks",)] == 0
    assert after[("luce_cache_cached_blocks",)] > 0


def test_failed_requests_are_counted_by_reason(served, http):
    def failing(batch):
        raise ValueError("no")

    served.engine.programs.backend.forward = failing
    http.post("/v1/chat/completions", json={"messages": MESSAGES})
    after = scrape(http)
    assert after[("luce_requests_total", ("api", "chat"), ("reason", "error"))] == 1
    assert after[("luce_failed_steps_total",)] == 1


def test_info_names_model_and_version(http):
    import luce_core

    assert scrape(http)[("luce_info", ("model", "toy"), ("version", luce_core.__version__))] == 1


def test_two_servers_in_one_process_count_apart(serve):
    with serve() as one, serve() as other:
        with httpx.Client(base_url=one.url, timeout=60) as http:
            ask(http)
            assert scrape(http)[("luce_completion_tokens_total",)] == 6
        with httpx.Client(base_url=other.url, timeout=60) as http:
            assert scrape(http)[("luce_completion_tokens_total",)] == 0


def test_a_key_guards_metrics_and_props_but_not_ready(serve):
    with serve(settings=ServerSettings(api_keys=("k",))) as one:
        for path, status in (("/metrics", 401), ("/props", 401), ("/ready", 200), ("/health", 200)):
            assert httpx.get(f"{one.url}{path}", timeout=60).status_code == status


@pytest.mark.parametrize("path", ["/", "/health", "/ready"])
def test_head_is_answered_where_clients_probe(http, path):
    response = http.head(path)
    assert response.status_code == 200
    assert response.content == b""


def test_ready_is_503_when_the_engine_is_gone(served, http):
    served.service.channel.close(0.0)
    assert http.get("/ready").status_code == 503
    assert scrape(http)[("luce_engine_up",)] == 0


def test_props_say_what_serves(http):
    body = http.get("/props").json()
    assert body["model_alias"] == "toy"
    assert body["n_ctx"] == 512
    assert "<|im_start|>" in body["chat_template"]
    assert body["default_generation_settings"]["temperature"] == 1.0
    assert isinstance(body["parts"], list)
