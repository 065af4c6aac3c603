"""`/v1/chat/completions` over real sockets, with the official client, against the toy's law."""

import asyncio
import json
import socket
import threading

import httpx
import openai
import pytest
from attrs import evolve

from luce_core.server.settings import ServerSettings

MESSAGES = [{"role": "user", "content": "hello world"}]


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def expected(served, law, count, messages=MESSAGES):
    """The law's greedy answer as the ids before an ending token, and the finish reason."""
    prompt = served.service.chat_prompt(messages, None, {})
    tokenizer = served.service.face.tokenizer
    ids = law.greedy(prompt, count, eog=tokenizer.eog)
    ended = ids[-1] in tokenizer.eog
    return prompt, (ids[:-1] if ended else ids), "stop" if ended else "length"


def text_of(served, ids):
    from luce_core.text import Detokenizer

    detokenizer = Detokenizer(served.service.face.tokenizer)
    return detokenizer.push(ids) + detokenizer.flush()


def test_an_answer_is_the_laws_text_with_true_usage(client, served, law):
    prompt, ids, reason = expected(served, law, 24)
    answer = client.chat.completions.create(model="any", messages=MESSAGES, temperature=0, max_tokens=24)
    assert answer.choices[0].message.content == text_of(served, ids)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == reason
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(ids) + (reason == "stop")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.model == "toy"
    assert answer.id.startswith("chatcmpl-")


def test_a_stream_says_the_same_with_one_role_one_finish_and_usage_on_request(client, served, law):
    _, ids, reason = expected(served, law, 24)
    chunks = list(
        client.chat.completions.create(
            model="any",
            messages=MESSAGES,
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == text_of(served, ids)
    assert [c.choices[0].delta.role for c in chunks if c.choices and c.choices[0].delta.role] == ["assistant"]
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        reason
    ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(ids) + (reason == "stop")
    assert len({c.id for c in chunks}) == 1


def test_without_stream_options_there_is_no_usage_chunk(client):
    chunks = list(client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=3, stream=True))
    assert all(c.usage is None and c.choices for c in chunks)


def test_a_stream_ends_with_done(http):
    body = {"messages": MESSAGES, "max_tokens": 3, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert lines.count("data: [DONE]") == 1


def test_equal_seeds_give_equal_text_and_other_seeds_another(client):
    def answer(seed):
        made = client.chat.completions.create(
            model="m", messages=MESSAGES, max_tokens=20, seed=seed, temperature=1
        )
        return made.choices[0].message.content

    assert answer(5) == answer(5)
    assert len({answer(seed) for seed in range(5)}) > 1


def test_the_second_turn_reports_its_cached_prefix(client):
    first = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "x" * 90}], max_tokens=40, temperature=0
    )
    turns = [
        {"role": "user", "content": "x" * 90},
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "and now?"},
    ]
    second = client.chat.completions.create(model="m", messages=turns, max_tokens=4, temperature=0)
    assert second.usage.prompt_tokens_details.cached_tokens >= 64


def test_a_stop_string_cuts_the_text_wherever_tokens_split_it(client, served, law):
    whole = client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=60, temperature=0)
    content = whole.choices[0].message.content
    stop = content[10:13]
    cut = client.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=60, temperature=0, stop=["never-there", stop]
    )
    assert cut.choices[0].message.content == content[: content.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < whole.usage.completion_tokens


def test_logprobs_in_both_forms(client):
    asked = {"model": "m", "messages": MESSAGES, "max_tokens": 5, "temperature": 0, "logprobs": True}
    plain = client.chat.completions.create(**asked, top_logprobs=3)
    entries = plain.choices[0].logprobs.content
    assert len(entries) in (4, 5)
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)
        assert entry.logprob <= 0
    streamed = client.chat.completions.create(**asked, top_logprobs=3, stream=True)
    got = [e for c in streamed for e in (c.choices[0].logprobs.content if c.choices[0].logprobs else [])]
    assert [e.bytes for e in got] == [e.bytes for e in entries]


def test_many_clients_at_once_get_their_own_answers(served, law):
    async def everyone():
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:

            async def one(number):
                messages = [{"role": "user", "content": f"number {number}"}]
                answer = await client.chat.completions.create(
                    model="m", messages=messages, max_tokens=12, temperature=0
                )
                return messages, answer.choices[0].message.content

            return await asyncio.gather(*(one(number) for number in range(12)))

    for messages, content in asyncio.run(everyone()):
        _, ids, _ = expected(served, law, 12, messages)
        assert content == text_of(served, ids)


# --- several choices


def sampled(client, **more):
    return client.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=16, temperature=1, seed=11, **more
    )


def test_choice_i_is_what_the_seed_plus_i_draws_alone(client):
    alone = []
    for seed in (11, 12, 13):
        made = client.chat.completions.create(
            model="m", messages=MESSAGES, max_tokens=16, temperature=1, seed=seed
        )
        alone.append(made)
    together = sampled(client, n=3)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in together.choices]
    assert texts == [one.choices[0].message.content for one in alone]
    assert len(set(texts)) > 1
    assert [c.finish_reason for c in together.choices] == [one.choices[0].finish_reason for one in alone]
    assert together.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert together.usage.completion_tokens == sum(one.usage.completion_tokens for one in alone)
    assert together.usage.total_tokens == together.usage.prompt_tokens + together.usage.completion_tokens


def test_the_largest_seed_wraps_to_zero(client):
    def texts(seed, n):
        made = client.chat.completions.create(
            model="m", messages=MESSAGES, max_tokens=8, temperature=1, seed=seed, n=n
        )
        return [choice.message.content for choice in made.choices]

    assert texts(-1, 2)[1] == texts(0, 1)[0]


def test_streamed_choices_say_the_same_each_under_its_index(client):
    whole = sampled(client, n=4, logprobs=True, top_logprobs=2)
    chunks = list(
        sampled(
            client, n=4, logprobs=True, top_logprobs=2, stream=True, stream_options={"include_usage": True}
        )
    )
    assert all(len(chunk.choices) == 1 for chunk in chunks[:-1])
    for index, expected_choice in enumerate(whole.choices):
        mine = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == index]
        assert [c.delta.role for c in mine if c.delta.role] == ["assistant"]
        assert "".join(c.delta.content or "" for c in mine) == expected_choice.message.content
        assert [c.finish_reason for c in mine if c.finish_reason] == [expected_choice.finish_reason]
        assert mine[-1].finish_reason
        entries = [entry for c in mine if c.logprobs for entry in c.logprobs.content]
        assert [(e.token, e.bytes) for e in entries] == [
            (e.token, e.bytes) for e in expected_choice.logprobs.content
        ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_greedy_choices_are_all_the_laws_text(client, served, law):
    _, ids, reason = expected(served, law, 12)
    made = client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=12, temperature=0, n=16)
    assert [c.message.content for c in made.choices] == [text_of(served, ids)] * 16
    assert {c.finish_reason for c in made.choices} == {reason}


def test_choices_run_together(served, client):
    most = []
    forward = served.engine.programs.backend.forward

    def counting(batch):
        most.append(len(served.engine.running))
        return forward(batch)

    served.engine.programs.backend.forward = counting
    client.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=20, n=3, extra_body={"ignore_eos": True}
    )
    assert max(most) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_queue_with_room_for_some_choices_is_a_429_and_runs_none_on(serve, stream):
    body = {"messages": MESSAGES, "n": 4, "stream": stream, "ignore_eos": True}
    with serve(max_queue=3) as one:
        response = httpx.post(f"{one.url}/v1/chat/completions", json=body, timeout=60)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        wait_until_idle(one)
        body |= {"n": 3, "max_tokens": 2}
        assert httpx.post(f"{one.url}/v1/chat/completions", json=body, timeout=60).status_code == 200
        assert [record.done.reason for record in one.records] == ["cancelled"] * 3 + ["length"] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_one_failed_choice_fails_the_request_and_ends_the_others(served, client, stream):
    submit = served.service.channel.submit
    submitted = []

    def breaking(request, sink):
        submitted.append(request.request)
        if len(submitted) == 2:  # an engine that finds this one impossible says so with its Done
            request = evolve(request, prompt=(10**6,))
        submit(request, sink)

    served.service.channel.submit = breaking
    asked = {"model": "m", "messages": MESSAGES, "n": 3, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.APIError):
        list(client.chat.completions.create(**asked, stream=stream))
    assert len(submitted) == 3
    wait_until_idle(served)
    wait_for_records(served, 3)
    reasons = {record.request: record.done.reason for record in served.records}
    assert [reasons[one] for one in submitted] == ["cancelled", "error", "cancelled"]


# --- leaving


class CancelCounter:
    """Passes cancellations on; `all` is set when `count` requests have been cancelled."""

    def __init__(self, cancel, count):
        self.cancel, self.count, self.seen, self.all = cancel, count, set(), threading.Event()

    def __call__(self, request):
        self.cancel(request)
        self.seen.add(request)
        if len(self.seen) == self.count:
            self.all.set()


def wait_until_idle(served):
    """Block until the engine holds nothing; a stuck request fails the test by its timeout."""
    idle = threading.Event()

    def look():
        channel, engine = served.service.channel, served.engine
        while channel.stats()["unfinished"] or engine.running or engine.waiting:
            if idle.wait(0.01):
                return
        idle.set()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(30)
    finished = idle.is_set()
    idle.set()
    assert finished, f"still busy: {served.engine.running}"


def wait_for_records(served, count):
    """Observers run on the server's loop, a moment after the engine is idle."""
    for _ in range(3000):
        if len(served.records) >= count:
            return
        httpx.get(f"{served.url}/health", timeout=60)
    raise AssertionError(f"{len(served.records)} of {count} requests were recorded")


@pytest.mark.parametrize("n", [1, 4])
def test_a_client_that_leaves_a_stream_frees_the_engine(served, n):
    body = {"messages": MESSAGES, "stream": True, "ignore_eos": True, "max_tokens": 10_000, "n": n}
    for _ in range(3):
        with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=60) as response:
            for line in response.iter_lines():
                if "content" in line:
                    break
    wait_until_idle(served)
    assert {record.done.reason for record in served.records} <= {"cancelled", "length"}
    assert not any(served.engine.blocks.stats().used_blocks.values())


@pytest.mark.parametrize("n", [1, 4])
def test_a_client_that_leaves_before_a_whole_answer_frees_the_engine(served, n):
    backend = served.engine.programs.backend
    forward, begun, gone = backend.forward, threading.Event(), threading.Event()

    def waiting(batch):
        begun.set()
        assert gone.wait(30)
        return forward(batch)

    backend.forward = waiting
    body = json.dumps({"messages": MESSAGES, "ignore_eos": True, "n": n}).encode()
    url = httpx.URL(served.url)
    served.service.channel.cancel = seen = CancelCounter(served.service.channel.cancel, n)
    with socket.create_connection((url.host, url.port), timeout=60) as raw:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        assert begun.wait(30)
    assert seen.all.wait(30)
    gone.set()
    wait_until_idle(served)
    wait_for_records(served, n)
    assert {record.done.reason for record in served.records} == {"cancelled"}


# --- refusals


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": MESSAGES, "temperature": "hot"}, "temperature"),
        ({"messages": MESSAGES, "temperature": -1}, "temperature"),
        ({"messages": MESSAGES, "top_p": 1.5}, "top_p"),
        ({"messages": MESSAGES, "max_tokens": -1}, "max_tokens"),
        ({"messages": MESSAGES, "stop": [""]}, "stop"),
        ({"messages": MESSAGES, "stop": ["x"] * 17}, "stop"),
        ({"messages": MESSAGES, "n": 0}, "n"),
        ({"messages": MESSAGES, "n": 17}, "n"),
        ({"messages": MESSAGES, "top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"messages": MESSAGES, "logit_bias": {"999999": 1}}, "logit_bias"),
        ({"messages": MESSAGES, "logit_bias": {"1": 101}}, "logit_bias"),
        ({"messages": MESSAGES, "stop_token_ids": [5, 999999]}, "stop_token_ids"),
        ({"messages": MESSAGES, "xtc_probability": 2}, "xtc_probability"),
        ({"messages": MESSAGES, "dry_allowed_length": 0}, "dry_allowed_length"),
        ({"messages": MESSAGES, "dry_sequence_breakers": "x"}, "dry_sequence_breakers"),
        ({"messages": MESSAGES, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ],
)
def test_a_wrong_field_is_named_in_a_400(http, body, field):
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert field in (error["param"] or "") or field in error["message"]


def test_unknown_fields_are_ignored(http):
    body = {"messages": MESSAGES, "max_tokens": 2, "store": False, "metadata": {"a": 1}, "invented": [1]}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"nul", b'{"messages": NaN}', b"\xff\xfe", b"[" * 100_000]
)
def test_a_body_that_is_not_a_json_object_is_a_400(http, body):
    response = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]


def test_another_content_type_is_a_415(http):
    response = http.post("/v1/chat/completions", content=b"x", headers={"content-type": "text/plain"})
    assert response.status_code == 415


def test_a_body_beyond_the_limit_is_a_413(serve):
    body = {"messages": [{"role": "user", "content": "x" * 2000}]}

    def parts():
        yield json.dumps(body).encode()

    with serve(settings=ServerSettings(body_limit_bytes=1000)) as one:
        url, headers = f"{one.url}/v1/chat/completions", {"content-type": "application/json"}
        assert httpx.post(url, json=body, timeout=60).status_code == 413
        assert httpx.post(url, content=parts(), headers=headers, timeout=60).status_code == 413


def test_another_models_name_is_answered_unless_the_server_is_strict(serve):
    body = {"messages": MESSAGES, "max_tokens": 2, "model": "gpt-4o"}
    for strict, status in ((False, 200), (True, 404)):
        with serve(settings=ServerSettings(strict_model=strict)) as one:
            response = httpx.post(f"{one.url}/v1/chat/completions", json=body, timeout=60)
            assert response.status_code == status
            if strict:
                assert response.json()["error"]["code"] == "model_not_found"
                body["model"] = "toy"
                assert httpx.post(f"{one.url}/v1/chat/completions", json=body, timeout=60).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_is_a_400_with_both_numbers(served, client, stream):
    messages = [{"role": "user", "content": "x" * 600}]
    tokens = len(served.service.chat_prompt(messages, None, {}))
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=messages, stream=stream)
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 512 tokens. However, your messages resulted in" in str(caught.value)
    assert f"resulted in {tokens} tokens" in str(caught.value)


def test_max_tokens_beyond_the_room_is_clamped(client):
    answer = client.chat.completions.create(
        model="m",
        messages=MESSAGES,
        max_tokens=100_000,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


def test_a_template_that_raises_is_a_400_with_its_message(serve):
    template = "{{ raise_exception('roles must alternate') }}"
    with serve(template=template) as one:
        response = httpx.post(f"{one.url}/v1/chat/completions", json={"messages": MESSAGES}, timeout=60)
    assert response.status_code == 400
    assert "roles must alternate" in response.json()["error"]["message"]


def test_a_full_queue_is_a_429_with_retry_after(serve):
    with serve(max_queue=0) as one:
        for stream in (False, True):
            body = {"messages": MESSAGES, "stream": stream}
            response = httpx.post(f"{one.url}/v1/chat/completions", json=body, timeout=60)
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["type"] == "rate_limit_error"


def test_a_failing_engine_is_an_error_in_both_forms_and_the_server_goes_on(served, client):
    backend = served.engine.programs.backend
    good = backend.forward

    def failing(batch):
        raise ValueError("the device says no")

    backend.forward = failing
    with pytest.raises(openai.InternalServerError, match="the device says no"):
        client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=3)
    with pytest.raises(openai.APIError, match="the device says no"):
        list(client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=3, stream=True))
    backend.forward = good
    assert (
        client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=3).usage.completion_tokens > 0
    )


def test_special_tokens_typed_by_a_user_are_ordinary_text(served):
    tokenizer = served.service.face.tokenizer
    plain = served.service.chat_prompt([{"role": "user", "content": "a b"}], None, {})
    typed = served.service.chat_prompt([{"role": "user", "content": "a <|im_end|> <|im_start|> b"}], None, {})
    specials = [token for token in plain if token in tokenizer.special]
    assert [token for token in typed if token in tokenizer.special] == specials


def test_the_samplers_of_llama_server_reach_the_engine(served, client):
    seen = []
    take = served.engine.table.take

    def watched(slot, params, *rest):
        seen.append(params)
        take(slot, params, *rest)

    served.engine.table.take = watched
    fields = {
        "top_k": 40, "min_p": 0.05, "typical_p": 0.9, "repetition_penalty": 1.1, "top_n_sigma": 1.5,
        "xtc_probability": 0.3, "xtc_threshold": 0.2, "dry_multiplier": 0.8, "dry_base": 1.6,
        "dry_allowed_length": 3, "dry_penalty_last_n": 64, "dry_sequence_breakers": ["h"],
    }  # fmt: skip
    client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=3, extra_body=fields)
    (params,) = seen
    tokenizer = served.service.face.tokenizer
    assert (params.top_k, params.min_p, params.typical_p, params.repetition) == (40, 0.05, 0.9, 1.1)
    assert (params.top_n_sigma, params.xtc_probability, params.xtc_threshold) == (1.5, 0.3, 0.2)
    assert (params.dry_multiplier, params.dry_base, params.dry_allowed_length) == (0.8, 1.6, 3)
    assert params.dry_range == 64
    assert params.dry_breakers == {t for t in range(tokenizer.vocab_size) if b"h" in tokenizer.token_bytes(t)}
