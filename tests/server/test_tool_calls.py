"""Thoughts and tool calls over a real server and engine, with the official client. The model says what
the test writes; everything else is as always.
"""

import json

import httpx
import jsonschema
import openai
import pytest
import torch
from jsonschema import Draft202012Validator

from luce_core.contracts import Thinking
from luce_core.server.openapi import document
from luce_core.testing.pipeline import make_pipeline
from luce_core.testing.server import serving
from luce_core.testing.toy import write_toy_model
from luce_core.testing.toy.network import ToyNetwork
from luce_core.testing.toy_vocab import toy_vocabulary
from luce_core.text import Tokenizer

TEMPLATE = """\
{%- for tool in tools or [] -%}<tools>{{ tool | tojson }}</tools>{%- endfor -%}
{%- for message in messages -%}
{{ '<|im_start|>' ~ message.role ~ '\\n' }}
{%- if message.reasoning_content -%}
{{ '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' }}
{%- endif -%}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n<tool_call>\\n' ~ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{{- '\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking -%}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}
{%- if reasoning_effort is defined -%}{{ 'effort ' ~ reasoning_effort }}{%- endif -%}
{%- if mood is defined -%}{{ 'mood ' ~ mood }}{%- endif -%}
{%- endif -%}
"""
ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "why": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": ADD}}]
USER = [{"role": "user", "content": "2 and 2?"}]
THOUGHT = "<think>\nLet me see.\n</think>\n\n"
CALL = '\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "why": "asked \\"so\\""}}\n</tool_call>'
ARGUMENTS = {"a": 2, "why": 'asked "so"'}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


class Scripted:
    """A server whose model says what it is told."""

    def __init__(self, monkeypatch):
        """From here on every toy says what this script says of its place."""
        self.served = None
        self.script = {}
        end = Tokenizer.from_metadata(toy_vocabulary("bpe")).token_id("<|im_end|>")
        trunk = ToyNetwork.trunk

        def told(network, batch, final=None):
            trunk(network, batch, final)  # keeps the state
            return batch.index.float()[:, None].repeat(1, 4)

        def logits(network, final):
            said = [self.script.get(int(place) + 1, end) for place in final[:, 0]]
            return torch.nn.functional.one_hot(torch.tensor(said), network.vocab).float() * 50

        monkeypatch.setattr(ToyNetwork, "trunk", told)
        monkeypatch.setattr(ToyNetwork, "logits", logits)

    @property
    def face(self):
        return self.served.service.face

    def says(self, text, messages=USER, tools=TOOLS, **more):
        """What comes behind this prompt."""
        prompt = self.served.service.chat(messages, tools, **more).ids
        ids = self.face.tokenizer.encode(text, special=True)
        self.script = {len(prompt) + index: token for index, token in enumerate(ids)}
        return ids


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    one = Scripted(monkeypatch)
    pipeline = make_pipeline(write_toy_model(tmp_path / "toy.gguf", context=2048, template=TEMPLATE))
    with serving(pipeline) as one.served:
        yield one


@pytest.fixture
def client(scripted):
    with openai.OpenAI(base_url=f"{scripted.served.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def ask(client, **more):
    asked = {"model": "m", "messages": USER, "tools": TOOLS, "temperature": 0, "max_tokens": 400}
    return client.chat.completions.create(**{**asked, **more})


def post(scripted, **more):
    body = {"messages": USER, "tools": TOOLS, "temperature": 0, "max_tokens": 400, **more}
    return httpx.post(f"{scripted.served.url}/v1/chat/completions", json=body, timeout=60)


def check_shape(name, value):
    """`value` is what the served document says, and has no field it does not name."""
    described = document(False)
    schemas = json.loads(json.dumps(described["components"]["schemas"]))
    for schema in schemas.values():
        if "properties" in schema:
            schema["additionalProperties"] = False
    root = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}}
    jsonschema.validate(value, root, cls=Draft202012Validator)


# --- whole answers


def test_a_thought_some_text_and_a_call(client, scripted):
    ids = scripted.says(THOUGHT + "I add." + CALL)
    answer = ask(client)
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content, choice.message.reasoning_content) == ("I add.", "Let me see.")
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "add",
        ARGUMENTS,
    )
    assert call.id.startswith("call_")
    assert answer.usage.completion_tokens == len(ids) + 1
    thought = scripted.face.tokenizer.encode("<think>\nLet me see.\n</think>", special=True)
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(thought)


def test_several_calls_and_no_text(client, scripted):
    scripted.says(CALL + CALL)
    (choice,) = ask(client).choices
    assert choice.message.content is None
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert "reasoning_content" not in choice.message.model_extra


def test_without_calls_the_fields_are_absent(scripted):
    scripted.says("Four.")
    (choice,) = post(scripted).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Four.", "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_a_broken_call_is_text_as_it_came(client, scripted):
    broken = CALL.replace('2, "why"', '2 "why"')
    scripted.says("I add." + broken + " Sorry.")
    (choice,) = ask(client).choices
    assert choice.message.content == "I add." + broken + " Sorry."
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")


def test_a_call_cut_by_the_length_is_text(client, scripted):
    ids = scripted.says("I add." + CALL)
    answer = ask(client, max_tokens=len(ids) - 16)
    (choice,) = answer.choices
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "length")
    assert ("I add." + CALL).startswith(choice.message.content)


def test_answers_have_the_shape_the_document_says(scripted):
    scripted.says(THOUGHT + "I add." + CALL)
    check_shape("ChatAnswer", post(scripted).json())
    check_shape("ChatAnswer", post(scripted, n=2, logprobs=True, top_logprobs=1).json())
    for line in post(scripted, **STREAMED, logprobs=True).text.splitlines():
        if line.startswith("data: {"):
            check_shape("ChatChunk", json.loads(line.removeprefix("data: ")))


# --- streams


def test_a_stream_says_the_same_piece_by_piece(client, scripted):
    scripted.says(THOUGHT + "I add." + CALL + CALL)
    chunks = list(ask(client, **STREAMED))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Let me see."
    assert "".join(delta.content or "" for delta in deltas) == "I add."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    for index in (0, 1):
        first, *rest = [call for call in calls if call.index == index]
        assert (first.type, first.function.name, first.function.arguments) == ("function", "add", "")
        assert first.id.startswith("call_")
        assert all((call.id, call.type, call.function.name) == (None, None, None) for call in rest)
        assert json.loads("".join(call.function.arguments for call in rest)) == ARGUMENTS
        assert len(rest) > 2, "arguments come in one piece"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == ["tool_calls"]
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens > 0


def test_the_clients_own_accumulation_of_a_stream_agrees(client, scripted):
    scripted.says("I add." + CALL)
    asked = {"model": "m", "messages": USER, "tools": TOOLS, "temperature": 0, "max_tokens": 400}
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        (choice,) = stream.get_final_completion().choices
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == ARGUMENTS
    assert (choice.message.content, choice.finish_reason) == ("I add.", "tool_calls")


def test_every_token_of_a_stream_has_its_logprob_once(client, scripted):
    ids = scripted.says(THOUGHT + "I add." + CALL)
    chunks = list(ask(client, stream=True, logprobs=True))
    found = [
        entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content
    ]
    pieces = [list(scripted.face.tokenizer.token_bytes(token)) for token in ids]
    assert [entry.bytes for entry in found] == pieces


# --- what requests may say


def test_one_call_at_a_time_ends_the_answer_with_the_first(client, scripted):
    ids = scripted.says(CALL * 8)
    answer = ask(client, parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage.completion_tokens < len(ids) / 4


def test_no_tools_means_no_calls(client, scripted):
    for fields in ({"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        scripted.says("I add." + CALL, tools=None)
        (choice,) = ask(client, **fields).choices
        assert (choice.message.content, choice.finish_reason) == ("I add." + CALL, "stop")


def test_a_choice_of_none_leaves_the_tools_out_of_the_prompt(client, scripted):
    scripted.says("Yes.", tools=None)
    bare = ask(client, tools=[]).usage.prompt_tokens
    assert ask(client, tool_choice="none").usage.prompt_tokens == bare
    assert ask(client, tool_choice="auto").usage.prompt_tokens > bare


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        "any",
        {"type": "function", "function": {"name": "add"}},
        {"type": "allowed_tools"},
        5,
        ["auto"],
    ],
)
def test_a_call_cannot_be_demanded_yet(scripted, choice):
    response = post(scripted, tool_choice=choice)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "tool_choice"
    assert "not supported yet" in error["message"]


@pytest.mark.parametrize(
    ("tools", "where"),
    [
        ([{}], "tools[0].function"),
        ([TOOLS[0], {"type": "function", "function": {"parameters": {}}}], "tools[1].function.name"),
        ([{"function": {"name": ""}}], "tools[0].function.name"),
        ([{"function": {"name": "f", "parameters": []}}], "tools[0].function.parameters"),
    ],
)
def test_a_wrong_tool_is_named(scripted, tools, where):
    response = post(scripted, tools=tools)
    assert (response.status_code, response.json()["error"]["param"]) == (400, where)


def test_tools_of_other_types_are_left_out(client, scripted):
    scripted.says(CALL)
    answer = ask(client, tools=[{"type": "web_search"}, *TOOLS])
    assert answer.choices[0].message.tool_calls[0].function.name == "add"


def test_a_template_that_shows_no_tools_is_told_of_once(tmp_path, monkeypatch, caplog):
    one = Scripted(monkeypatch)
    template = "{{ messages[0].content }}"
    with serving(make_pipeline(write_toy_model(tmp_path / "toy.gguf", template=template))) as one.served:
        assert post(one, tools=[], max_tokens=1).status_code == 200
        assert caplog.messages == []
        for _ in range(2):
            assert post(one, max_tokens=1).status_code == 200
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "does not show" in caplog.text


def test_stop_strings_are_looked_for_in_content_alone(client, scripted):
    scripted.says("<think>\nstop\n</think>\n\nI add." + CALL.replace("asked", "stop") + " Now stop here.")
    (choice,) = ask(client, stop="stop").choices
    assert choice.message.reasoning_content == "stop"
    assert json.loads(choice.message.tool_calls[0].function.arguments)["why"] == 'stop "so"'
    assert (choice.message.content, choice.finish_reason) == ("I add. Now ", "stop")


@pytest.mark.parametrize(
    ("fields", "tail"),
    [
        ({}, "assistant\n"),
        ({"enable_thinking": False}, "<think>\n\n</think>\n\n"),
        ({"reasoning_effort": "none"}, "<think>\n\n</think>\n\n"),
        ({"reasoning_effort": "high"}, "effort high"),
        ({"reasoning_effort": "high", "enable_thinking": False}, "</think>\n\neffort high"),
        ({"chat_template_kwargs": {"mood": "good"}}, "mood good"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "</think>\n\n"),
    ],
)
def test_thinking_switches_reach_the_template(scripted, fields, tail):
    service = scripted.served.service
    wish = Thinking(fields.get("enable_thinking"), fields.get("reasoning_effort"))
    prompt = service.chat(USER, TOOLS, fields.get("chat_template_kwargs"), wish)
    assert scripted.face.tokenizer.decode(prompt.ids).endswith(tail)
    assert prompt.turn.tail.endswith(tail)
    response = post(scripted, max_tokens=1, **fields)
    assert (response.status_code, response.json()["usage"]["prompt_tokens"]) == (200, len(prompt.ids))


def test_an_unknown_effort_lists_those_there_are(scripted):
    response = post(scripted, reasoning_effort="extreme")
    assert response.status_code == 400
    assert "'xhigh'" in response.json()["error"]["message"]


# --- the next turn


def test_what_was_answered_comes_back_token_by_token(client, scripted):
    scripted.says(THOUGHT + "I add." + CALL + CALL)
    first = ask(client)
    message = first.choices[0].message
    turns = [
        *USER,
        message.model_dump(exclude_none=True),
        *({"role": "tool", "tool_call_id": call.id, "content": "4"} for call in message.tool_calls),
    ]
    scripted.says("Four.", turns)
    second = ask(client, messages=turns)
    assert second.choices[0].message.content == "Four."
    assert second.usage.timings["agent_turn_cache_hit"] is True
    used = first.usage.prompt_tokens + first.usage.completion_tokens - 1
    assert second.usage.prompt_tokens_details.cached_tokens >= used - 1
