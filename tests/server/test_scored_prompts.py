"""Prompts whose own tokens are scored, over real sockets with the official client, against the toy's law."""

import math

import httpx
import openai
import pytest

from luce_core.text import Detokenizer

PROMPT = "hello world, and you"


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def complete(client, prompt=PROMPT, **more):
    return client.completions.create(**{"model": "m", "prompt": prompt, "temperature": 0, **more})


@pytest.fixture
def tokenizer(served):
    return served.service.face.tokenizer


def rows(law, ids, first=1):
    """(id, log-probabilities of every token) at each place from `first` on."""
    found = []
    for place in range(first, len(ids)):
        logits = law.logits(ids[:place])
        total = math.log(sum(math.exp(value - 16) for value in logits)) + 16
        found.append((ids[place], [value - total for value in logits]))
    return found


def name(tokenizer, token):
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def best(row, most):
    return sorted(range(len(row)), key=lambda token: (-row[token], token))[:most]


def check(logprobs, tokenizer, law, ids, most):
    """The legacy lists over a whole text of `ids`."""
    assert logprobs.tokens == [name(tokenizer, token) for token in ids]
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(logprobs.text_offset) == len(ids)
    lists = zip(rows(law, ids), logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True)
    for (token, row), own, top in lists:
        assert own == pytest.approx(row[token], abs=1e-4)
        wanted = {name(tokenizer, one): row[one] for one in (*best(row, most), token)}
        assert top == pytest.approx(wanted, abs=1e-4)


# --- legacy completions


@pytest.mark.parametrize("alternatives", [0, 1, 5])
@pytest.mark.parametrize("as_ids", [False, True])
def test_an_echoed_prompt_has_the_laws_logprobs_and_the_answers_after_them(
    client, tokenizer, law, alternatives, as_ids
):
    ids = tokenizer.encode(PROMPT)
    answer = law.greedy(ids, 8, eog=tokenizer.eog)
    made = complete(client, ids if as_ids else PROMPT, echo=True, logprobs=alternatives, max_tokens=8)
    (choice,) = made.choices
    check(choice.logprobs, tokenizer, law, [*ids, *answer], alternatives)
    assert choice.text.startswith(PROMPT)
    assert made.usage.prompt_tokens == len(ids)
    assert made.usage.completion_tokens == len(answer)


@pytest.mark.parametrize("prompt", [PROMPT, "h", "über ∑, naïve 😀!", [0xF0, 0x9F, 0x98], "a <|im_end|> b"])
def test_offsets_point_into_the_echoed_text(client, tokenizer, prompt):
    choice = complete(client, prompt, echo=True, logprobs=0, max_tokens=6).choices[0]
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
    offsets, tokens = choice.logprobs.text_offset, choice.logprobs.tokens
    assert choice.text.startswith(text)
    detokenizer, place = Detokenizer(tokenizer, start_of_text=True), 0
    for offset, token in zip(offsets, ids, strict=False):
        assert offset == place
        place += len(detokenizer.push([token]))
    assert offsets[len(ids)] == len(text)
    hidden = {name(tokenizer, token) for token in tokenizer.special}
    pending = False  # bytes that are no character yet count to the token that ends them
    for offset, token in zip(offsets[len(ids) :], tokens[len(ids) :], strict=True):
        if not pending and not token.startswith("bytes:") and token not in hidden:
            assert choice.text[offset : offset + len(token)] == token
        pending = token.startswith("bytes:")


@pytest.mark.parametrize("as_ids", [False, True])
def test_without_an_answer_only_the_prompt_is_scored(client, served, tokenizer, law, as_ids):
    ids = tokenizer.encode(PROMPT)
    made = complete(client, ids if as_ids else PROMPT, echo=True, logprobs=2, max_tokens=0)
    (choice,) = made.choices
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    check(choice.logprobs, tokenizer, law, ids, 2)
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (len(ids), 0)
    timings = made.usage.timings
    assert timings["prefilled_tokens"] == len(ids)
    assert timings["prefill_ms"] > 0
    assert "decode_ms" not in timings
    assert "agent_turn_cache_hit" not in timings


def test_one_token_alone_has_no_logprob(client):
    choice = complete(client, [72], echo=True, logprobs=3, max_tokens=0).choices[0]
    assert (choice.text, choice.logprobs.tokens, choice.logprobs.token_logprobs) == ("H", ["H"], [None])
    assert (choice.logprobs.top_logprobs, choice.logprobs.text_offset) == ([None], [0])


def test_one_generated_token_follows_the_prompt_also_when_it_ends_the_text(client, tokenizer, law):
    """What evaluation harnesses count on: the last entry is the one generated, all before it the prompt's."""
    end = next(iter(tokenizer.eog))
    for bias in ({}, {str(end): 100}):
        made = complete(client, echo=True, logprobs=1, max_tokens=1, logit_bias=bias)
        (choice,) = made.choices
        ids = tokenizer.encode(PROMPT)
        assert len(choice.logprobs.tokens) == len(ids) + 1
        scored = choice.logprobs.token_logprobs[1:-1]
        assert scored == pytest.approx([row[token] for token, row in rows(law, ids)], abs=1e-4)
        if bias:
            assert (choice.finish_reason, choice.text) == ("stop", PROMPT)
            assert choice.logprobs.tokens[-1] == name(tokenizer, end)
            assert choice.logprobs.text_offset[-1] == len(PROMPT)


@pytest.mark.parametrize("prompts", [["hello", "you and the", "a"], [[1, 2, 3], [4, 5], [6]]])
@pytest.mark.parametrize("n", [1, 3])
def test_lists_of_prompts_and_several_answers(client, served, tokenizer, law, prompts, n):
    submitted = spy(served)
    made = complete(client, prompts, n=n, echo=True, logprobs=2, max_tokens=4, temperature=1, seed=5)
    assert [choice.index for choice in made.choices] == list(range(3 * n))
    for choice in made.choices:
        prompt = prompts[choice.index // n]
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        named = {name(tokenizer, token): token for token in range(tokenizer.vocab_size)}
        answer = [named[token] for token in choice.logprobs.tokens[len(ids) :]]
        check(choice.logprobs, tokenizer, law, [*ids, *answer], 2)
        assert len(answer) == 4 or choice.finish_reason == "stop"
    scored = [request.prompt_logprobs for request in submitted]
    assert scored == [2, *[None] * (n - 1)] * 3, "each prompt is scored once, whatever n is"


@pytest.mark.parametrize("chunk", [1, 512])
@pytest.mark.parametrize("max_tokens", [0, 6])
def test_a_stream_says_the_same(serve, chunk, max_tokens):
    asked = {"prompt": [PROMPT, "über ∑", "a"], "echo": True, "logprobs": 2}
    asked |= {"n": 2, "max_tokens": max_tokens, "temperature": 1, "seed": 3}
    with (
        serve(chunk=chunk) as one,
        openai.OpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0) as client,
    ):
        whole = complete(client, **asked)
        chunks = list(complete(client, **asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    for choice in whole.choices:
        mine = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == choice.index]
        assert "".join(part.text for part in mine) == choice.text
        assert [part.finish_reason for part in mine if part.finish_reason] == [choice.finish_reason]
        parts = [part.logprobs for part in mine if part.logprobs]
        for field in ("tokens", "text_offset"):
            assert [x for part in parts for x in getattr(part, field)] == getattr(choice.logprobs, field)
        got = [x for part in parts for x in part.token_logprobs]
        assert got[0] is choice.logprobs.token_logprobs[0] is None
        assert got[1:] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-5)
        tops = [x for part in parts for x in part.top_logprobs]
        assert list(map(bool, tops)) == list(map(bool, choice.logprobs.top_logprobs))


def test_transforms_do_not_touch_the_prompts_logprobs(client, tokenizer, law):
    choice = complete(
        client, echo=True, logprobs=1, max_tokens=1, temperature=0.1, logit_bias={"65": 100}, seed=1
    ).choices[0]
    ids = tokenizer.encode(PROMPT)
    scored = choice.logprobs.token_logprobs[1:-1]
    assert scored == pytest.approx([row[token] for token, row in rows(law, ids)], abs=1e-4)


def test_a_cached_prompt_is_scored_all_the_same(client, tokenizer, law):
    ids = tokenizer.encode(PROMPT * 6)
    complete(client, PROMPT * 6, max_tokens=2)
    made = complete(client, PROMPT * 6, max_tokens=0, echo=True, logprobs=1)
    check(made.choices[0].logprobs, tokenizer, law, ids, 1)
    assert made.usage.prompt_tokens_details.cached_tokens == 0
    again = complete(client, PROMPT * 6, max_tokens=2)
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_echo_without_logprobs_scores_nothing(client, served):
    submitted = spy(served)
    complete(client, echo=True, max_tokens=2)
    complete(client, logprobs=2, max_tokens=2)
    assert [request.prompt_logprobs for request in submitted] == [None, None]


def spy(served):
    submitted = []
    submit = served.service.channel.submit

    def listening(request, sink):
        submitted.append(request)
        submit(request, sink)

    served.service.channel.submit = listening
    return submitted


# --- vLLM's field


def check_scores(scores, tokenizer, law, ids, most):
    assert scores[0] is None
    for (token, row), entry in zip(rows(law, ids), scores[1:], strict=True):
        ranked = best(row, len(row))
        wanted = {str(one) for one in (token, *ranked[:most])}
        assert entry.keys() == wanted
        for key, value in entry.items():
            assert value["logprob"] == pytest.approx(row[int(key)], abs=1e-4)
            assert row[ranked[value["rank"] - 1]] == row[int(key)]
            assert value["decoded_token"] == tokenizer.token_text(int(key))
    first = next(iter(scores[1]))
    assert first == str(ids[1]), "the prompt's own token comes first"


@pytest.mark.parametrize("most", [0, 3])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_prompt_logprobs_of_completions_are_each_choices(client, tokenizer, law, most, max_tokens):
    body = {"prompt_logprobs": most}
    made = complete(client, ["hello you", "a"], n=2, max_tokens=max_tokens, extra_body=body)
    for choice in made.choices:
        ids = tokenizer.encode("hello you" if choice.index < 2 else "a")
        if len(ids) > 1:
            check_scores(choice.prompt_logprobs, tokenizer, law, ids, most)
        else:
            assert choice.prompt_logprobs == [None]
        assert choice.logprobs is None
        assert not choice.text.startswith("hello")


def test_prompt_logprobs_beside_an_echo_with_fewer_alternatives(client, tokenizer, law):
    ids = tokenizer.encode("hello you")
    made = complete(
        client, "hello you", echo=True, logprobs=1, max_tokens=0, extra_body={"prompt_logprobs": 4}
    )
    check(made.choices[0].logprobs, tokenizer, law, ids, 1)
    check_scores(made.choices[0].prompt_logprobs, tokenizer, law, ids, 4)


@pytest.mark.parametrize("n", [1, 2])
def test_prompt_logprobs_of_a_chat_are_the_whole_answers(client, served, tokenizer, law, n):
    messages = [{"role": "user", "content": "hello"}]
    made = client.chat.completions.create(
        model="m", messages=messages, max_tokens=3, n=n, extra_body={"prompt_logprobs": 2}
    )
    ids = list(served.service.chat_prompt(messages, None, {}))
    check_scores(made.prompt_logprobs, tokenizer, law, ids, 2)
    assert len(made.choices) == n


def test_answers_to_those_who_did_not_ask_have_no_such_field(http):
    chat = http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    )
    text = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert "prompt_logprobs" not in chat.json()
    assert "prompt_logprobs" not in text.json()["choices"][0]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize(
    "wrong",
    [{"prompt_logprobs": -1}, {"prompt_logprobs": 21}, {"prompt_logprobs": 1, "stream": True}],
    ids=str,
)
def test_a_wrong_wish_is_a_400_that_names_the_field(http, path, wrong):
    prompt = {"messages": [{"role": "user", "content": "a"}]} if path.startswith("chat") else {"prompt": "a"}
    response = http.post(f"/v1/{path}", json={**prompt, **wrong})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt_logprobs"


# --- leaving


def test_a_client_that_leaves_while_its_prompt_is_scored_frees_the_engine(serve):
    with serve(chunk=1, context=4096) as one:
        body = {"prompt": "x" * 3000, "echo": True, "logprobs": 1, "stream": True, "max_tokens": 4}
        with httpx.stream("POST", f"{one.url}/v1/completions", json=body, timeout=60) as response:
            next(line for line in response.iter_lines() if line.startswith("data: "))
        for _ in range(3000):
            if one.records:
                break
            httpx.get(f"{one.url}/health", timeout=60)
        assert [record.done.reason for record in one.records] == ["cancelled"]
