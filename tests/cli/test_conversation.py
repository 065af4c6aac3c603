import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce_core.cli.conversation import Conversation
from luce_core.contracts import SamplingParams


@pytest.fixture
def talk():
    made = Conversation(SamplingParams())
    made.say("one")
    made.answered("first")
    made.say("two")
    made.answered("second", "thought")
    return made


def contents(talk):
    return [message["content"] for message in talk.asked()]


def test_messages_alternate_and_keep_their_reasoning(talk):
    assert [message["role"] for message in talk.messages] == ["user", "assistant", "user", "assistant"]
    assert contents(talk) == ["one", "first", "two", "second"]
    assert talk.messages[-1]["reasoning_content"] == "thought"


def test_a_message_is_kept_as_typed_and_a_blank_line_is_nothing():
    talk = Conversation(SamplingParams())
    assert talk.say("  several\nlines ").answer
    assert talk.messages[-1]["content"] == "  several\nlines "
    assert not talk.say(" \n ").answer
    assert len(talk.messages) == 1


def test_a_leading_space_makes_a_message_of_what_looks_like_a_command():
    talk = Conversation(SamplingParams())
    assert talk.say(" /usr/bin/env").answer


def test_system_prompt(talk):
    assert talk.say("/system").text == "System prompt: none"
    talk.say("/system Be brief.")
    assert talk.asked()[0] == {"role": "system", "content": "Be brief."}
    talk.say("/clear")
    assert contents(talk) == ["Be brief."]
    talk.say("/system none")
    assert talk.asked() == []


def test_regen_drops_the_answer_and_asks_again(talk):
    assert talk.say("/regen").answer
    assert contents(talk) == ["one", "first", "two"]
    assert talk.say("/regen").answer  # an answer that never came
    assert contents(talk) == ["one", "first", "two"]


def test_undo_takes_question_and_answer(talk):
    talk.say("/undo")
    assert contents(talk) == ["one", "first"]
    talk.say("/undo")
    assert contents(talk) == []
    assert talk.say("/undo").text == "There is nothing to take back."
    assert not talk.say("/regen").answer


def test_an_unanswered_question_can_be_taken_back(talk):
    talk.say("three")
    talk.take_back()
    talk.take_back()  # an answer is never taken for a question
    assert contents(talk) == ["one", "first", "two", "second"]


def test_settings_change_what_the_next_answer_samples_with(talk):
    assert "temperature 0.2" in talk.say("/set temperature 0.2").text
    talk.say("/set top-k 5")
    talk.say("/set seed 7")
    talk.say("/set max-tokens 9")
    assert (talk.params.temperature, talk.params.top_k, talk.seed, talk.max_tokens) == (0.2, 5, 7, 9)
    shown = talk.say("/set").text
    assert "seed 7" in shown
    assert "max-tokens 9" in shown


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set temperature hot", "temperature cannot be 'hot': wanted a number."),
        ("/set temperature -1", "wanted 0 to 100"),
        ("/set top-p 2", "wanted 0 to 1"),
        ("/set top-k 1.5", "wanted a whole number"),
        ("/set max-tokens 0", "wanted 1 to"),
        ("/set tempo 1", "There is no setting 'tempo'. There are: temperature"),
        ("/hepl", "There is no command '/hepl'; /help lists them."),
        ("/save", "/save FILE"),
    ],
)
def test_what_is_wrong_is_said_and_changes_nothing(talk, line, said):
    before = (talk.params, list(talk.messages), talk.max_tokens)
    reply = talk.say(line)
    assert said in reply.text
    assert not reply.answer
    assert (talk.params, talk.messages, talk.max_tokens) == before


def test_help_lists_every_command_that_exists(talk):
    shown = talk.say("/help").text
    for name in Conversation.COMMANDS:
        assert name in shown
        assert "There is no command" not in talk.say(name.split()[0]).text


def test_save_writes_what_would_be_asked(talk, tmp_path):
    talk.say("/system Be brief.")
    talk.say(f"/save {tmp_path / 'talk.json'}")
    assert json.loads((tmp_path / "talk.json").read_text()) == talk.asked()
    assert "cannot be written" in talk.say(f"/save {tmp_path / 'no' / 'such.json'}").text


@pytest.mark.parametrize("line", ["/exit", "/quit"])
def test_leaving(talk, line):
    assert talk.say(line).leave


LINES = ["hello", "/regen", "/undo", "/clear", "/system x", " ", "/set seed 1"]


@given(st.lists(st.sampled_from(LINES), max_size=20))
def test_any_sequence_leaves_a_conversation_a_template_can_render(lines):
    talk = Conversation(SamplingParams())
    for line in lines:
        if talk.say(line).answer:
            talk.answered("ok")
    roles = [message["role"] for message in talk.messages]
    assert roles == ["user", "assistant"] * (len(roles) // 2)
