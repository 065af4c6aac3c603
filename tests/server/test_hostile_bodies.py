"""Bodies nobody should send: every one is answered, with an answer or a 400 that says why, and none harms the
server.
"""

import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from luce_core.server.openapi import document
from luce_core.testing.pipeline import make_pipeline
from luce_core.testing.server import serving
from luce_core.testing.toy import write_toy_model

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
BASES = {
    CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    TEXT: {"prompt": "x", "max_tokens": 1},
    "/tokenize": {"content": "x"},
    "/detokenize": {"tokens": [1]},
}
ANSWERED = {200, 400, 504}
"""504: a deadline may be as short as the request likes."""


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    path = write_toy_model(tmp_path_factory.mktemp("small") / "toy.gguf", salt=7, context=64)
    with (
        serving(make_pipeline(path)) as served,
        httpx.Client(base_url=served.url, timeout=60) as client,
    ):
        yield client
        assert client.get("/health").json()["status"] == "ok"
        served.engine.blocks.check_integrity()
        assert not any(served.engine.blocks.stats().used_blocks.values())


def post(http, path, content):
    response = http.post(path, content=content, headers={"content-type": "application/json"})
    body = response.json()  # never cut off, never anything but JSON
    if response.status_code != 200:
        assert set(body["error"]) == {"message", "type", "param", "code"}, body
    return response


# --- no JSON


@pytest.mark.parametrize("path", BASES)
@pytest.mark.parametrize(
    "raw",
    [
        b"", b" ", b"{", b"{'a': 1}", b"/* c */ {}", b"{}{}", b'{"a":}', b'{"a":01}', b'{"a":1,}',
        b"\x00" * 9, b"\xff\xfe", b"\xef\xbb\xbf{}", '{"content": "x"}'.encode("utf-16"),
        '{"content": "x"}'.encode("utf-32"), b'{"content": "\xed\xa0\x80"}', b'{"content": "\\ud800"}',
        b'{"content": "\\udc00\\ud800"}',
        b'{"content": NaN}', b'{"content": -Infinity}', b'{"a": ' + b"1" * 5000 + b"}",
        b'{"content": "\x00"}', b'{"content": "\t"}',
    ],
)  # fmt: skip
def test_what_is_no_json_is_told_so(http, path, raw):
    response = post(http, path, raw)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "invalid_json"
    assert "not valid JSON" in error["message"]


@pytest.mark.parametrize("path", BASES)
@pytest.mark.parametrize("raw", [b"null", b"[]", b'"x"', b"1", b"true"])
def test_what_is_no_object_is_told_so(http, path, raw):
    response = post(http, path, raw)
    assert response.status_code == 400
    assert "must be a JSON object" in response.json()["error"]["message"]


def test_of_equal_keys_the_last_counts(http):
    assert post(http, "/tokenize", b'{"content": 5, "content": "A"}').json() == {"tokens": [65]}
    assert post(http, "/tokenize", b'{"content": "A", "content": 5}').status_code == 400


@pytest.mark.parametrize("depth", [10, 150, 195, 200, 250, 330, 480, 600, 990, 5000, 100_000])
@pytest.mark.parametrize(("opened", "closed"), [("[", "]"), ('{"a":', "}")])
def test_depth_is_bounded_wherever_it_is(http, depth, opened, closed):
    deep = opened * depth + "1" + closed * depth
    user = {"role": "user", "content": "x"}
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "DEEP"}}]}
    told = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": f'{{"a": {deep}}}'}}]}
    bodies = [
        {"messages": [user], "tools": [{"type": "function", "function": "DEEP"}]},
        {"messages": [user], "chat_template_kwargs": {"a": "DEEP"}},
        {"messages": [{"role": "user", "content": "DEEP"}]},
        {"messages": [{**user, "other": "DEEP"}]},
        {"messages": [user], "response_format": "DEEP"},
        {"messages": [user, call]},
        {"messages": [user, told]},
    ]
    for body in bodies:
        raw = json.dumps({"max_tokens": 1, **body}).replace('"DEEP"', deep)
        assert post(http, CHAT, raw).status_code in ANSWERED
    assert post(http, TEXT, f'{{"prompt": {deep}}}').status_code == 400


# --- JSON with values nobody expects


EXTREMES = [
    None, True, False, 0, -1, 1, 0.5, -0.0, 5e-324, 1e-45, 1e308, -1e308,
    2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30, -(10**30), 10**4000,
    "", "5", "x", "nan", "inf", "\x00", "\ufffe\U0010ffff", "١",
    [], {}, [[]], [None], [{}], [-1], [10**30], [True], [""], ["\x00"], ["a"] * 500, [0] * 500,
    {"": ""}, {"-1": 1}, {"5": 10**30}, {"5": 1e308}, {" 5 ": 1}, {"5_0": 1}, {"١": 1},
    {"type": None}, {"type": []},
]  # fmt: skip
FIELDS = [
    (path, field)
    for path in BASES
    for field in document(False)["components"]["schemas"][
        document(False)["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"][
            "$ref"
        ].rpartition("/")[2]
    ]["properties"]
]
"""Whatever the document names, so that a new field is tried as well."""


@pytest.mark.parametrize(("path", "field"), FIELDS)
def test_any_value_in_any_field_is_answered(http, path, field):
    for value in EXTREMES:
        raw = json.dumps({**BASES[path], field: value})
        if field == "stream" and value in (True, 1):
            continue
        response = post(http, path, raw)
        assert response.status_code in ANSWERED, (value, response.text)


SAMPLING = {
    "temperature": [0, 5e-324, 1e-40, 100],
    "top_p": [0, 5e-324, 1],
    "min_p": [0, 5e-324, 1],
    "typical_p": [0, 5e-324, 1],
    "top_k": [-1, 0, 1, 2**31 - 1],
    "top_n_sigma": [0, 5e-324, 100],
    "repetition_penalty": [5e-324, 1e-40, 10],
    "frequency_penalty": [-2, 2],
    "presence_penalty": [-2, 2],
    "xtc_probability": [0, 1],
    "xtc_threshold": [0, 5e-324, 1],
    "dry_multiplier": [0, 5e-324, 100],
    "dry_base": [1, 100],
    "dry_allowed_length": [1, 2**31 - 1],
    "dry_penalty_last_n": [-1, 0, 1, 2**31 - 1],
    "min_tokens": [0, 3, 2**31 - 1],
    "seed": [0, -1, 2**64, 10**40],
    "logprobs": [True, False],
    "top_logprobs": [0, 20],
    "logit_bias": [{}, {str(token): -100 for token in range(262)}, {str(token): 100 for token in range(262)}],
    "stop_token_ids": [[], list(range(262)), [1] * 1000],
    "priority": [-(2**31) + 1, 2**31 - 1],
}
MIXED = st.fixed_dictionaries({}, optional={name: st.sampled_from(some) for name, some in SAMPLING.items()})


@given(MIXED)
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
def test_bounds_of_sampling_go_together(http, chosen):
    body = {**BASES[CHAT], **chosen, "max_tokens": 4}
    if body.get("top_logprobs") is not None:
        body["logprobs"] = True
    response = post(http, CHAT, json.dumps(body))
    assert response.status_code == 200, response.text
    for entry in (response.json()["choices"][0]["logprobs"] or {"content": []})["content"]:
        assert all(-9999 <= one["logprob"] <= 0 for one in [entry, *entry["top_logprobs"]])


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)
WHOLE = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": "x", "name": "n"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "r",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "7"},
    ],
    "tools": [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    ],
    "stream_options": {"include_usage": True},
    "response_format": {"type": "text"},
    "chat_template_kwargs": {"a": 1},
    "max_tokens": 1,
}


def places(value, at=()):
    """The path of every value inside."""
    if at:
        yield at
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*at, key))


@given(st.sampled_from(list(places(WHOLE))), VALUES)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_one_value_anywhere_in_a_conversation_replaced_is_answered(http, place, value):
    body = json.loads(json.dumps(WHOLE))
    inside = body
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    assert post(http, CHAT, json.dumps(body)).status_code in ANSWERED


# --- text


@pytest.mark.parametrize(
    "text",
    [
        "\x00",
        "\ud7ff\ue000",
        "\ufffe\uffff",
        "\U0010ffff",
        "\r\n",
        "\x1b[2J",
        "\u202e",
        "{{ 7 * 7 }}",
        "{% raw %}",
    ],
)
def test_any_character_is_text(http, text):
    ids = post(http, "/tokenize", json.dumps({"content": text, "parse_special": True})).json()["tokens"]
    assert bytes(ids) == text.encode()
    assert post(http, "/detokenize", json.dumps({"tokens": ids})).json() == {"content": text}
    echoed = post(http, TEXT, json.dumps({"prompt": text, "echo": True, "max_tokens": 0, "logprobs": 1}))
    assert echoed.json()["choices"][0]["text"] == text
    for more in ({"stop": text}, {"model": text}, {"dry_multiplier": 1, "dry_sequence_breakers": [text]}):
        assert post(http, CHAT, json.dumps({**BASES[CHAT], **more})).status_code == 200
    spoken = {"messages": [{"role": "user", "content": text, "name": text}], "max_tokens": 1}
    assert post(http, CHAT, json.dumps(spoken)).status_code == 200


def test_a_message_that_quotes_megabytes_is_cut(http):
    body = {**BASES[CHAT], "messages": [{"role": "r" * 2_000_000, "content": "x"}]}
    response = post(http, CHAT, json.dumps(body))
    assert response.status_code == 400
    assert len(response.content) < 10_000
    body = {**BASES[CHAT], "logit_bias": {"k" * 2_000_000: 1}}
    response = post(http, CHAT, json.dumps(body))
    assert response.status_code == 400
    assert len(response.content) < 10_000
