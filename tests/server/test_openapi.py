"""The served document: every route is in it, and what a real server sends is what it says."""

import copy
import json

import httpx
import jsonschema
import openai
import pytest
from jsonschema import Draft202012Validator
from starlette.routing import Route

import luce_core
from luce_core.server import shapes
from luce_core.server.app import build_app
from luce_core.server.errors import CODES, TYPES
from luce_core.server.openapi import MEANINGS, OPERATIONS, document
from luce_core.server.settings import ServerSettings
from luce_core.server.timings import Timings
from luce_core.text.messages import normalize_messages

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}


@pytest.fixture
def served(standing):
    return standing


@pytest.fixture(scope="module")
def described(standing):
    """The document as a client gets it."""
    return httpx.get(f"{standing.url}/openapi.json", timeout=60).json()


def closed(described):
    """The document with no room for fields it does not name."""
    strict = copy.deepcopy(described)
    for schema in strict["components"]["schemas"].values():
        if "properties" in schema:
            schema["additionalProperties"] = False
    return strict


def check(described, schema, value):
    """`value` has the shape of `schema` and nothing beside it."""
    root = {**closed(described), **schema} if "$ref" in schema else {**schema, **closed(described)}
    jsonschema.validate(value, root, cls=Draft202012Validator)


def check_response(described, method, path, response):
    """What came is what the document says of this status."""
    said = described["paths"][path][method.lower()]["responses"][str(response.status_code)]
    if "$ref" in said:
        said = described["components"]["responses"][said["$ref"].rpartition("/")[2]]
    kind = response.headers["content-type"]
    content = said["content"].get(kind) or said["content"][kind.partition(";")[0]]
    if kind.startswith("application/json"):
        check(described, content["schema"], response.json())
    elif kind.startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        assert events[-1] == "[DONE]"
        done, chunk = content["schema"]["properties"]["data"]["anyOf"]
        assert done == {"const": "[DONE]"}
        for event in events[:-1]:
            if not event.startswith(":"):
                check(described, chunk["contentSchema"], json.loads(event))
    for name, header in said.get("headers", {}).items():
        jsonschema.validate(json.loads(response.headers[name]), header["schema"])


# --- the document itself


def test_it_is_a_valid_document_that_says_what_it_is(described):
    assert described["openapi"] == "3.1.0"
    assert described["info"]["version"] == luce_core.__version__
    for schema in described["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    names = set(described["components"]["schemas"])
    assert set(_references(described)) <= {
        *(f"#/components/schemas/{name}" for name in names),
        *(f"#/components/responses/{name}" for name in described["components"]["responses"]),
    }
    assert len({one["operationId"] for one in _operations(described)}) == len(OPERATIONS)


def _references(value):
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from _references(item)
    elif isinstance(value, list):
        for item in value:
            yield from _references(item)


def _operations(described):
    return [one for path in described["paths"].values() for one in path.values()]


def test_every_route_is_in_it_and_nothing_else(served, described):
    routes = build_app(served.service).routes
    assert all(isinstance(route, Route) for route in routes)
    served_methods = {
        (route.path.replace(":path}", "}"), method)
        for route in routes
        for method in route.methods - {"HEAD"}  # which comes with every GET
    }
    assert served_methods == {
        (path, method.upper()) for path, methods in described["paths"].items() for method in methods
    }


def test_every_operation_says_which_errors_it_may_end_with(described):
    for one in _operations(described):
        statuses = {int(status) for status in one["responses"]} - {200}
        assert {400, 401, 403, 408, 431, 500, 503} <= statuses <= set(MEANINGS)
        assert ("requestBody" in one) == ({411, 413, 415} <= statuses)


def test_every_error_has_a_type_and_a_code():
    assert set(TYPES) == set(CODES) == {*MEANINGS, 405}


def test_timings_are_those_of_every_answer():
    assert set(shapes.Timings.__annotations__) == set(Timings.__annotations__)


def test_keys_are_asked_for_where_the_server_has_some():
    for guarded in (True, False):
        made = document(guarded)
        assert set(made["components"]["securitySchemes"]) == {"bearer", "header"}
        for path, methods in made["paths"].items():
            for one in methods.values():
                assert ("security" in one) == (guarded and path not in ("/health", "/ready"))


def test_it_is_guarded_like_the_rest(serve):
    with serve(settings=ServerSettings(api_keys=("k",))) as one:
        assert httpx.get(f"{one.url}/openapi.json", timeout=60).status_code == 401
        made = httpx.get(f"{one.url}/openapi.json", headers={"x-api-key": "k"}, timeout=60).json()
    assert made["paths"][CHAT]["post"]["security"] == [{"bearer": []}, {"header": []}]


def test_every_field_of_a_request_is_in_it_with_its_bounds(described):
    chat = described["components"]["schemas"]["ChatRequest"]["properties"]
    assert chat["top_p"]["anyOf"][0] == {"type": "number", "minimum": 0.0, "maximum": 1.0}
    assert chat["messages"]["minItems"] == 1
    assert chat["messages"]["items"] == {"$ref": "#/components/schemas/ChatMessage"}
    assert {"prompt"} == set(described["components"]["schemas"]["CompletionRequest"]["required"])


# --- what comes is what it says


GETS = [one.path for one in OPERATIONS if one.method == "GET"]


@pytest.mark.parametrize("path", GETS)
def test_what_is_read(described, http, path):
    response = http.get(path.replace("{model}", "toy"))
    assert response.status_code == 200
    check_response(described, "GET", path, response)


BODIES = {
    "plain": (CHAT, HELLO),
    "logprobs": (CHAT, {**HELLO, "logprobs": True, "top_logprobs": 3}),
    "several": (CHAT, {**HELLO, "n": 3, "temperature": 1}),
    "no text": (CHAT, {**HELLO, "max_tokens": 0}),
    "everything": (
        CHAT,
        {
            **HELLO,
            "seed": 1, "top_k": 5, "min_p": 0.1, "typical_p": 0.9, "top_n_sigma": 2, "dry_multiplier": 0.5,
            "xtc_probability": 0.5, "xtc_threshold": 0.1, "logit_bias": {"65": 1.5}, "stop": ["zz"],
            "stop_token_ids": [3], "frequency_penalty": 0.1, "presence_penalty": 0.1, "min_tokens": 2,
        },
    ),
    "a turn with tools": (
        CHAT,
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
                {"role": "user", "content": "x"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": "7"},
            ],
            "max_tokens": 4,
        },
    ),
    "text": (TEXT, {"prompt": "hello"}),
    "texts": (TEXT, {"prompt": ["a", "b"], "n": 2, "logprobs": 2, "max_tokens": 4}),
    "ids": (TEXT, {"prompt": [65, 66], "echo": True, "max_tokens": 4}),
    "scored": (TEXT, {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0}),
    "prompt logprobs": (TEXT, {"prompt": "abc", "prompt_logprobs": 2, "max_tokens": 2}),
    "chat prompt logprobs": (CHAT, {**HELLO, "prompt_logprobs": 1}),
    "tokens": ("/tokenize", {"content": "the é"}),
    "pieces": ("/tokenize", {"content": "the é", "with_pieces": True}),
    "detokenized": ("/detokenize", {"tokens": [65, 0xC3]}),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_what_is_answered(described, http, name):
    path, body = BODIES[name]
    kind = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    check(described, kind, body)  # the request is one the document allows
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    check_response(described, "POST", path, response)


STREAMED = [
    name for name, (path, body) in BODIES.items() if path in (CHAT, TEXT) and "prompt_logprobs" not in body
]


@pytest.mark.parametrize("name", STREAMED)
def test_what_is_streamed(described, http, name):
    path, body = BODIES[name]
    more = {"stream": True, "stream_options": {"include_usage": True}}
    response = http.post(path, json={**body, **more})
    assert response.headers["content-type"].startswith("text/event-stream")
    check_response(described, "POST", path, response)


@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), (TEXT, {"prompt": "x", "n": 2})])
def test_a_stream_that_fails_says_so_in_its_last_event(serve, described, path, body):
    with serve() as one:
        one.engine.programs.backend.forward = None
        response = httpx.post(f"{one.url}{path}", json={**body, "stream": True}, timeout=60)
    check_response(described, "POST", path, response)
    *_, last, done = [line for line in response.text.splitlines() if line.startswith("data: ")]
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"


WRONG = {
    "not json": (CHAT, {"content": b"{", "headers": {"content-type": "application/json"}}, 400),
    "wrong field": (CHAT, {"json": {"messages": 5}}, 400),
    "too long": (TEXT, {"json": {"prompt": "x" * 600}}, 400),
    "no body": ("/tokenize", {}, 400),
    "wrong type": ("/tokenize", {"content": b"x", "headers": {"content-type": "text/plain"}}, 415),
    "wrong host": ("/tokenize", {"json": {"content": ""}, "headers": {"host": "evil.example"}}, 403),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong(described, http, name):
    path, more, status = WRONG[name]
    response = http.post(path, **more)
    assert response.status_code == status
    check_response(described, "POST", path, response)


def test_a_model_that_is_not_there(described, http):
    response = http.get("/v1/models/other/one")
    assert response.status_code == 404
    check_response(described, "GET", "/v1/models/{model}", response)


def test_a_server_that_is_full_or_gone(described, serve):
    with serve(max_queue=0) as one, httpx.Client(base_url=one.url, timeout=60) as client:
        full = client.post(CHAT, json=HELLO)
        assert full.status_code == 429
        check_response(described, "POST", CHAT, full)
        one.channel.close(0.0)
        gone = client.post(CHAT, json=HELLO)
        assert gone.status_code == 503
        check_response(described, "POST", CHAT, gone)
        for path in ("/health", "/ready", "/"):
            unwell = client.get(path)
            assert unwell.status_code == 503
            check_response(described, "GET", path, unwell)


# --- what it allows is taken


def test_messages_it_describes_are_those_that_are_read(described):
    """Every role, every kind of part, with and without what may be left out."""
    roles = described["components"]["schemas"]["ChatMessage"]["properties"]["role"]["enum"]
    contents = [None, "", "text", [], ["a"], [{"text": "a"}, {"type": "refusal", "refusal": "b"}]]
    contents += [[{"type": kind, "text": "a"}] for kind in ("text", "input_text", "output_text")]
    schema = {"$ref": "#/components/schemas/ChatMessage"}
    for role in roles:
        for content in contents:
            message = {"role": role, "content": content}
            check(described, schema, message)
            assert normalize_messages([message])
    for wrong in (
        {},
        {"role": "robot"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [{"type": "x"}]},
    ):
        with pytest.raises(jsonschema.ValidationError):
            check(described, schema, wrong)


def test_the_official_clients_types_agree_with_it(described):
    """Fields the official client knows as required are all there."""
    for ours, theirs in (
        ("ChatAnswer", openai.types.chat.ChatCompletion),
        ("ChatChunk", openai.types.chat.ChatCompletionChunk),
        ("TextAnswer", openai.types.Completion),
    ):
        required = {name for name, field in theirs.model_fields.items() if field.is_required()}
        assert required <= set(described["components"]["schemas"][ours]["required"])
