import asyncio
import itertools
import json
import threading

import pytest

from luce_core.bench.client import parse_url
from luce_core.bench.energy import open_meter
from luce_core.bench.load import (
    Gone,
    Ladder,
    Prompt,
    Rung,
    check_some_success,
    cycle_prompts,
    find_server,
    random_prompts,
    read_prompts,
    warm_up,
)
from luce_core.bench.timeline import Answer
from luce_core.errors import EngineError, UsageError

from .conftest import GOOD, STREAM, chunk, says, whole
from .test_energy import FakeNvml

REJECTED = says(whole(429, {"error": {"message": "full"}}))


def prepared(server, model=None):
    async def both():
        found = await find_server(parse_url(server.url), model)
        return await warm_up(found, next(random_prompts(4, 0)), 8)

    return asyncio.run(both())


def climb(server, concurrency, requests, **more):
    ladder = Ladder(server, 8, **more)
    return asyncio.run(ladder.climb(concurrency, requests, random_prompts(4, 0), 4))


# --- before


def test_the_first_model_is_asked_unless_another_is_named(raw):
    with raw(GOOD) as server:
        assert prepared(server).model == "raw"
        assert prepared(server).software == "rawhide"
        assert prepared(server, "other").model == "other"
        assert [body["model"] for body in server.bodies] == ["raw", "raw", "other"]


def test_what_is_asked(raw):
    with raw(GOOD) as server:
        prepared(server)
        [body] = server.bodies
    [message] = body.pop("messages")
    assert message["role"] == "user"
    assert len(message["content"].split()) == 4
    assert body == {
        "model": "raw",
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }


def test_optional_fields_a_server_refuses_are_given_up_and_remembered(raw):
    def strict(*refused):
        def answer(client, body):
            known = not any(name in body for name in refused)
            (GOOD if known else says(whole(400, {"error": {"message": "unknown field"}})))(client, body)

        return answer

    for refused, given_up in (
        ((), ()),
        (("ignore_eos",), ("ignore_eos",)),
        (("ignore_eos", "stream_options"), ("ignore_eos", "stream_options")),
    ):
        with raw(strict(*refused)) as server:
            found = prepared(server)
            rung, gone = climb(found, 1, 2)
            assert found.given_up == given_up
            assert rung.ends == {"ok": 2}
            assert gone is None


@pytest.mark.parametrize(
    ("models", "error", "said"),
    [
        (
            whole(401, {"error": {"message": "No key."}}),
            UsageError,
            "wants a key: No key. Give it with --api-key",
        ),
        (whole(404, {"detail": "Not Found"}), UsageError, "answered 404, wanted a list of models"),
        (whole(200, {"hello": 1}), UsageError, "answered 200, wanted a list of models"),
        (whole(200, {"data": []}), UsageError, "serves no model"),
        (b"SSH-2.0\r\n\r\n", UsageError, "Nobody answers"),
    ],
)
def test_a_server_that_is_none(raw, models, error, said):
    with raw(GOOD, models=models) as server, pytest.raises(error) as wrong:
        prepared(server)
    assert said in str(wrong.value)


def test_a_server_without_a_list_of_models_needs_a_name(raw):
    with raw(GOOD, models=whole(404, {})) as server:
        assert prepared(server, "mine").model == "mine"


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (says(whole(401, {"error": "no"})), UsageError, "--api-key"),
        (says(whole(400, {"error": {"message": "too long"}})), EngineError, "too long"),
        (says(STREAM), EngineError, "cut"),
    ],
)
def test_a_first_request_that_fails_ends_it(raw, answer, error, said):
    with raw(answer) as server, pytest.raises(error, match=said):
        prepared(server)


# --- prompts


def test_random_prompts_are_the_same_for_a_seed_and_never_begin_alike():
    first = list(itertools.islice(random_prompts(12, 1), 50))
    assert first == list(itertools.islice(random_prompts(12, 1), 50))
    assert first != list(itertools.islice(random_prompts(12, 2), 50))
    assert len({prompt.messages[0]["content"] for prompt in first}) == 50
    assert {len(prompt.messages[0]["content"].split()) for prompt in first} == {12}


def test_prompts_of_a_file(tmp_path):
    file = tmp_path / "p.jsonl"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    file.write_text(json.dumps({"prompt": "hé"}) + "\n\n" + json.dumps({"messages": messages}) + "\n")
    found = read_prompts(file)
    assert found == [Prompt(({"role": "user", "content": "hé"},)), Prompt(tuple(messages))]
    again = list(itertools.islice(cycle_prompts(found), 5))
    assert again == [*found, *found, found[0]]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '"x"',
        "{}",
        '{"prompt": ""}',
        '{"prompt": 5}',
        '{"messages": []}',
        '{"messages": ["x"]}',
        '{"prompt": "x", "messages": [{}]}',
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path, line):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "x"}\n' + line + "\n")
    with pytest.raises(UsageError, match="line 2"):
        read_prompts(file)


@pytest.mark.parametrize("content", [None, b"", b"\n", b"\xff\xfe"])
def test_a_file_without_prompts(tmp_path, content):
    file = tmp_path / "p.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match="--prompts"):
        read_prompts(file)


# --- climbing


def test_so_many_at_a_time_and_no_more(raw):
    """Three requests are held until all three are there; a fourth would have to wait for one of them."""
    barrier, most, now, lock = threading.Barrier(3), [0], [0], threading.Lock()

    def together(client, body):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        barrier.wait(30)
        with lock:
            now[0] -= 1
        GOOD(client, body)

    with raw(GOOD, together) as server:
        rung, gone = climb(prepared(server), 3, 9)
    assert (rung.ends, gone, most[0]) == ({"ok": 9}, None, 3)
    assert rung.tokens == 18
    assert rung.total_tokens_s == pytest.approx(18 / rung.seconds)


def test_rejects_and_errors_are_counted_apart(raw):
    answers = [GOOD, REJECTED, says(whole(500, {"error": "x"})), says(STREAM, chunk("a")), GOOD]
    with raw(GOOD, *answers) as server:
        rung, gone = climb(prepared(server), 1, 5)
    assert gone is None
    assert rung.ends == {"ok": 2, "rejected": 1, "status": 1, "cut": 1}
    assert rung.tokens == 4  # what did not end well does not count
    assert set(rung.reasons) == {
        "status: HTTP 500: x",
        "cut: the stream ended after 1 chunks, without a finish",
    }


def test_a_server_that_dies_in_the_middle_ends_the_rung_with_what_came(raw):
    with raw(GOOD) as server:

        def last(client, body):
            server.die()
            client.sendall(STREAM + chunk("a"))

        server.answers = [GOOD, GOOD, GOOD, last]
        rung, gone = climb(prepared(server), 1, 50)
    assert isinstance(gone, Gone)
    assert "connection refused" in str(gone)
    assert f"{server.port}/v1 is gone" in str(gone)
    assert rung.ends == {"ok": 2, "cut": 1}


def test_a_server_that_dies_with_the_last_request_is_found_dead(raw):
    with raw(GOOD) as server:

        def last(client, body):
            server.die()
            client.sendall(STREAM + chunk("a"))

        server.answers = [GOOD, GOOD, last]
        rung, gone = climb(prepared(server), 1, 2)
    assert isinstance(gone, Gone)
    assert rung.ends == {"ok": 1, "cut": 1}


def test_a_tick_for_every_request(raw):
    ticks = []
    with raw(GOOD, REJECTED, GOOD) as server:
        climb(prepared(server), 2, 4, tick=lambda answer: ticks.append(answer.end))
    assert sorted(ticks) == ["ok", "ok", "ok", "rejected"]


def test_energy_of_a_rung(raw):
    nvml = FakeNvml(watts=(100.0,))
    meter = open_meter(lambda: nvml, clock=lambda: nvml.now)

    def working(client, body):
        nvml.pass_time(1.0)
        GOOD(client, body)

    with raw(working) as server:
        rung, _ = climb(prepared(server), 1, 5, meter=meter)
    assert rung.energy.gross_j == pytest.approx(500.0)


# --- figures


def timed(sent, *chunks, usage=None, prompt=None):
    return Answer("ok", "", sent, chunks[-1], chunks, prompt, usage)


def test_figures_of_a_rung():
    answers = (
        timed(0.0, 1.0, 1.5, 2.5, usage=3, prompt=10),
        timed(0.0, 3.0, 3.25),
        Answer("rejected", "HTTP 429: x"),
        Answer("cut", "x", 0.0, 9.0, (8.0,)),
    )
    rung = Rung(2, 4, answers, 10.0)
    assert rung.ttft_s.p50 == pytest.approx(2.0)
    assert rung.gap_s.p50 == pytest.approx(0.5)
    assert rung.gap_s.p99 == pytest.approx(0.99)
    assert rung.request_tokens_s.p50 == pytest.approx((2 / 1.5 + 1 / 0.25) / 2)
    assert (rung.tokens, rung.total_tokens_s) == (5, 0.5)
    assert rung.ends == {"ok": 2, "rejected": 1, "cut": 1}


def test_a_rung_without_answers():
    rung = Rung(1, None, (), 0.0)
    assert (rung.ttft_s, rung.gap_s, rung.request_tokens_s, rung.tokens, rung.total_tokens_s) == (
        None,
        None,
        None,
        0,
        0.0,
    )


def test_when_nothing_ended_well_it_is_an_error_with_the_commonest_reason():
    good = Rung(1, 1, (timed(0.0, 1.0),), 1.0)
    bad = Rung(
        1, 1, (Answer("rejected", "HTTP 429: full"), Answer("rejected", "HTTP 429: full"), Answer("cut")), 1.0
    )
    check_some_success([bad, good])
    with pytest.raises(
        EngineError, match=r"No request of 3 ended well\. Most often: rejected: HTTP 429: full"
    ):
        check_some_success([bad])
    with pytest.raises(EngineError, match="No request was answered"):
        check_some_success([])
