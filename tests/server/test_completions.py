"""`/v1/completions` over real sockets, with the official client, against the toy's law."""

import json
import math

import httpx
import openai
import pytest
from attrs import evolve

from luce_core.text import Detokenizer, Tokenizer

PROMPT = "hello world"


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def complete(client, prompt=PROMPT, **more):
    return client.completions.create(**{"model": "m", "prompt": prompt, "temperature": 0, **more})


def ids_of(served, text):
    return served.service.face.tokenizer.encode(text)


def lawful(served, law, prompt, count):
    """Text, finish reason and number of tokens of the law's greedy answer to ids."""
    tokenizer = served.service.face.tokenizer
    ids = law.greedy(prompt, count, eog=tokenizer.eog)
    ended = ids[-1] in tokenizer.eog
    detokenizer = Detokenizer(tokenizer)
    text = detokenizer.push(ids[:-1] if ended else ids) + detokenizer.flush()
    return text, "stop" if ended else "length", len(ids)


def test_a_text_is_continued_as_the_law_says(client, served, law):
    prompt = ids_of(served, PROMPT)
    text, reason, count = lawful(served, law, prompt, 24)
    made = complete(client, max_tokens=24)
    (choice,) = made.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, text, reason, None)
    assert made.object == "text_completion"
    assert made.id.startswith("cmpl-")
    assert made.model == "toy"
    usage = made.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), count)
    assert usage.total_tokens == len(prompt) + count


def test_without_max_tokens_sixteen_are_made(client):
    made = complete(client, extra_body={"ignore_eos": True})
    assert made.usage.completion_tokens == 16
    assert made.choices[0].finish_reason == "length"


@pytest.mark.parametrize("prompt", [["hello", "you and the"], [[1, 2, 3], [4, 5]]])
def test_a_list_of_prompts_is_answered_in_order(client, served, law, prompt):
    made = complete(client, prompt, max_tokens=10)
    ids = [ids_of(served, one) if isinstance(one, str) else one for one in prompt]
    answers = [lawful(served, law, one, 10) for one in ids]
    assert [(c.index, c.text, c.finish_reason) for c in made.choices] == [
        (index, text, reason) for index, (text, reason, _) in enumerate(answers)
    ]
    assert made.usage.prompt_tokens == sum(map(len, ids))
    assert made.usage.completion_tokens == sum(count for _, _, count in answers)


def test_a_list_of_ids_is_one_prompt(client, served, law):
    made = complete(client, [72, 73, 74], max_tokens=10)
    assert [c.text for c in made.choices] == [lawful(served, law, [72, 73, 74], 10)[0]]
    assert made.usage.prompt_tokens == 3


def test_n_answers_per_prompt_draw_with_seeds_that_follow_each_other(client):
    def texts(prompt, **more):
        made = complete(client, prompt, temperature=1, max_tokens=8, **more)
        assert [c.index for c in made.choices] == list(range(len(made.choices)))
        return [c.text for c in made.choices]

    both = texts(["hello", "you"], seed=5, n=3)
    alone = [texts(prompt, seed=seed)[0] for prompt in ("hello", "you") for seed in (5, 6, 7)]
    assert both == alone
    assert len(set(both)) > 2


def test_each_prompt_is_counted_once_whatever_n_is(client, served):
    made = complete(client, ["hello", "you and me"], n=3, max_tokens=4, extra_body={"ignore_eos": True})
    assert made.usage.prompt_tokens == len(ids_of(served, "hello")) + len(ids_of(served, "you and me"))
    assert made.usage.completion_tokens == 2 * 3 * 4


def test_a_stream_says_the_same(client):
    asked = {"prompt": ["hello", "you"], "n": 2, "max_tokens": 12, "temperature": 1, "seed": 3, "echo": True}
    whole = complete(client, **asked)
    chunks = list(complete(client, **asked, stream=True, stream_options={"include_usage": True}))
    assert all(len(chunk.choices) == 1 for chunk in chunks[:-1])
    for choice in whole.choices:
        mine = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == choice.index]
        assert "".join(c.text for c in mine) == choice.text
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
        assert mine[-1].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_without_options_has_no_usage_and_ends_with_done(http):
    body = {"prompt": PROMPT, "max_tokens": 3, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert all("usage" not in chunk and chunk["object"] == "text_completion" for chunk in chunks)


@pytest.mark.parametrize("prompt", [PROMPT, list(PROMPT.encode())])
def test_echo_puts_the_prompt_before_the_answer(client, prompt):
    plain = complete(client, prompt, max_tokens=6).choices[0].text
    assert complete(client, prompt, max_tokens=6, echo=True).choices[0].text == PROMPT + plain
    assert complete(client, prompt, max_tokens=0, echo=True).choices[0].text == PROMPT


def test_a_stop_string_cuts_the_text(client):
    whole = complete(client, max_tokens=60).choices[0].text
    stop = whole[10:13]
    cut = complete(client, max_tokens=60, stop=stop).choices[0]
    assert (cut.text, cut.finish_reason) == (whole[: whole.index(stop)], "stop")


# --- log-probabilities


def law_logprobs(law, prompt, count, eog):
    """Per greedy token, the ending one included: its id and the logarithms of every token's probability."""
    tokens, rows = list(prompt), []
    for token in law.greedy(prompt, count, eog=eog):
        logits = law.logits(tokens)
        total = math.log(sum(math.exp(value - 16) for value in logits)) + 16
        rows.append((token, [value - total for value in logits]))
        tokens.append(token)
    return rows


def name(raw):
    """The legacy API's name of a token's bytes."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@pytest.mark.parametrize("alternatives", [0, 3])
def test_logprobs_are_the_laws_in_the_legacy_form(client, served, law, alternatives):
    tokenizer = served.service.face.tokenizer
    rows = law_logprobs(law, ids_of(served, PROMPT), 24, tokenizer.eog)
    choice = complete(client, max_tokens=24, logprobs=alternatives).choices[0]
    got = choice.logprobs
    assert got.tokens == [name(tokenizer.token_bytes(token)) for token, _ in rows]
    assert got.token_logprobs == pytest.approx([row[token] for token, row in rows], abs=1e-4)
    for (token, row), top in zip(rows, got.top_logprobs, strict=True):
        best = sorted(range(len(row)), key=lambda one: (-row[one], one))[: max(alternatives, 1)]
        assert best[0] == token  # greedy: the chosen one is the likeliest
        expected = {name(tokenizer.token_bytes(one)): row[one] for one in best}
        assert top == pytest.approx(expected, abs=1e-4)


def test_the_chosen_token_is_among_the_alternatives_though_unlikely(client):
    got = complete(client, temperature=50, seed=1, max_tokens=20, logprobs=1).choices[0].logprobs
    pairs = list(zip(got.tokens, got.token_logprobs, got.top_logprobs, strict=True))
    assert all(top[token] == logprob for token, logprob, top in pairs)
    assert any(len(top) == 2 for _, _, top in pairs)


def test_offsets_count_characters_also_where_tokens_split_them(client, served):
    # Only the halves of one character are likely; in whatever order they come, offsets agree with the text.
    bias = {str(0xC3): 100, str(0xA9): 100}
    made = complete(client, max_tokens=40, logprobs=0, temperature=1, seed=4, logit_bias=bias)
    choice = made.choices[0]
    halves = {"bytes:\\xc3": b"\xc3", "bytes:\\xa9": b"\xa9"}
    data = [halves[token] for token in choice.logprobs.tokens]
    assert b"".join(data).decode(errors="replace") == choice.text
    assert "é" in choice.text
    for index, offset in enumerate(choice.logprobs.text_offset):
        before = b"".join(data[:index])
        whole = before.removesuffix(b"\xc3")  # a first half waits for its second
        assert offset == len(whole.decode(errors="replace"))


def test_streamed_logprobs_are_the_same(client):
    asked = {"max_tokens": 20, "logprobs": 2, "n": 2, "temperature": 1, "seed": 9}
    whole = complete(client, **asked)
    chunks = list(complete(client, **asked, stream=True))
    for choice in whole.choices:
        parts = [
            c.choices[0].logprobs
            for c in chunks
            if c.choices[0].index == choice.index and c.choices[0].logprobs
        ]
        for field in ("tokens", "text_offset"):
            assert [x for part in parts for x in getattr(part, field)] == getattr(choice.logprobs, field)
        logprobs = [x for part in parts for x in part.token_logprobs]
        assert logprobs == pytest.approx(choice.logprobs.token_logprobs, abs=1e-5)


# --- what the prompt may spell


def test_special_tokens_typed_in_a_prompt_are_ordinary_text(client, served):
    submitted = spy(served)
    complete(client, "a <|im_end|> b", max_tokens=1)
    (request,) = submitted
    assert not set(request.prompt) & served.service.face.tokenizer.special
    assert bytes(request.prompt[:4]) == b"a <|"


def test_a_beginning_token_is_added_to_texts_only_by_the_files_rule(client, served):
    from luce_core.testing.toy_vocab import toy_vocabulary

    tokenizer = Tokenizer.from_metadata({**toy_vocabulary("spm"), "tokenizer.ggml.add_eos_token": True})
    served.service.face = evolve(served.service.face, tokenizer=tokenizer)
    submitted = spy(served)
    made = complete(client, "hello", max_tokens=1, echo=True)
    complete(client, [[70, 71]], max_tokens=1)
    text, ids = submitted
    assert text.prompt[0] == tokenizer.bos == 1
    assert text.prompt.count(1) == 1
    assert tokenizer.eos not in text.prompt
    assert ids.prompt == (70, 71)
    assert made.choices[0].text.startswith("hello")


def spy(served):
    submitted = []
    submit = served.service.channel.submit

    def listening(request, sink):
        submitted.append(request)
        submit(request, sink)

    served.service.channel.submit = listening
    return submitted


# --- refusals


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [[1], 2]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1], [10**9]]}, "prompt"),
        ({"prompt": ["a"] * 9, "n": 16}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": -1}, "logprobs"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 17}, "n"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "logit_bias": {"999999": 1}}, "logit_bias"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field_is_named_in_a_400(refusing, body, field, stream):
    response = refusing.post("/v1/completions", json={**body, "stream": stream})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field
    assert f"'{field}" in error["message"] or field == "prompt"


@pytest.fixture(scope="module")
def refusing(tmp_path_factory):
    """One server for all refusals: nothing reaches its engine."""
    from luce_core.testing.pipeline import make_pipeline
    from luce_core.testing.server import serving
    from luce_core.testing.toy import write_toy_model

    path = write_toy_model(tmp_path_factory.mktemp("refusing") / "toy.gguf", salt=7)
    with serving(make_pipeline(path)) as one, httpx.Client(base_url=one.url, timeout=60) as client:
        yield client
        assert one.records == []


@pytest.mark.parametrize("stream", [False, True])
def test_one_prompt_beyond_the_context_is_a_400_with_both_numbers(client, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, ["a", "x" * 600], stream=stream)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "prompt"
    words = "maximum context length is 512 tokens. However, your prompt resulted in 600 tokens."
    assert words in str(caught.value)
    assert "messages" not in str(caught.value)


@pytest.mark.parametrize("stream", [False, True])
def test_a_queue_with_room_for_some_prompts_is_a_429(serve, stream):
    body = {"prompt": ["a", "b", "c"], "stream": stream, "max_tokens": 400, "ignore_eos": True}
    with serve(max_queue=2) as one:
        response = httpx.post(f"{one.url}/v1/completions", json=body, timeout=60)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        for _ in range(3000):  # observers run on the server's loop, a moment later
            if len(one.records) == 2:
                break
            httpx.get(f"{one.url}/health", timeout=60)
    assert [record.done.reason for record in one.records] == ["cancelled"] * 2


def test_a_failing_engine_is_an_error_in_both_forms_and_the_server_goes_on(served, client):
    backend = served.engine.programs.backend
    good = backend.forward

    def failing(batch):
        raise ValueError("the device says no")

    backend.forward = failing
    with pytest.raises(openai.InternalServerError, match="the device says no"):
        complete(client, n=2)
    with pytest.raises(openai.APIError, match="the device says no"):
        list(complete(client, n=2, stream=True))
    backend.forward = good
    assert complete(client).usage.completion_tokens > 0


def test_observers_see_which_format_asked(served, client):
    complete(client, max_tokens=2)
    assert [record.api for record in served.records] == ["completions"]


@pytest.mark.parametrize("body", [{"prompt": ["a"] * 4}, {"prompt": "a", "n": 4}], ids=["prompts", "n"])
def test_more_answers_than_the_queue_can_ever_hold_are_a_400_and_no_retry(serve, body):
    with serve(front={"max_answers": 3}) as one:
        refused = httpx.post(f"{one.url}/v1/completions", json={**body, "max_tokens": 1})
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert "4 answers" in message
        assert "--queue-limit" in message
        fine = httpx.post(f"{one.url}/v1/completions", json={"prompt": ["a"] * 3, "max_tokens": 1})
        assert fine.status_code == 200
