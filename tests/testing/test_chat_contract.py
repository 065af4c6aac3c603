"""Each rule of the contract of chat formats catches a format that breaks it; the unbroken one passes them
all.
"""

import json

import pytest
from attrs import evolve

from luce_core.contracts import ChatTurn, ContentDelta, ToolCallEnd, ToolCallStart
from luce_core.testing.chat_contract import TOOLS, ChatFormatContract
from luce_core.testing.contract import kit_tests
from luce_core.text.chat_formats import TagFormat, TaggedJson, Thought

HERMES = TagFormat("hermes", Thought(), (TaggedJson(),))


class Hermes(ChatFormatContract):
    hooks = "luce_core.builtin"
    name = "auto"
    template = "<think></think><tool_call>"
    open_tail = "<think>"

    def write_calls(self, calls):
        written = (json.dumps({"name": name, "arguments": args}) for name, args in calls)
        return "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in written)

    def write_thought(self, thought):
        return f"<think>\n{thought}\n</think>\n\n"


class Around:
    """A parser that does something to what the right one does."""

    over = False

    def __init__(self, turn):
        self.right = HERMES.parser(turn)

    @property
    def thinking(self):
        return self.right.thinking

    def push(self, text):
        return self.changed(self.right.push(text))

    def finish(self, cut=False):
        return self.changed(self.right.finish(cut))

    def changed(self, events):
        return events


class Late(Around):
    """Says everything at the end."""

    text = ""

    def push(self, text):
        self.text += text
        return []

    def finish(self, cut=False):
        return self.right.push(self.text) + self.right.finish(cut)


class Stripping(Around):
    """What it says depends on where the stream is cut."""

    def push(self, text):
        return self.right.push(text.rstrip("\n"))


class Raising(Around):
    def push(self, text):
        events = self.right.push(text)
        for event in events:
            if isinstance(event, ToolCallEnd) and not event.complete:
                raise ValueError(event.raw)
        return events


class Losing(Around):
    """Forgets the text of calls that broke off."""

    def changed(self, events):
        return [
            evolve(event, raw=event.raw[:-1]) if isinstance(event, ToolCallEnd) else event for event in events
        ]


class Trusting(Around):
    """Takes every call for whole."""

    def changed(self, events):
        return [evolve(event, complete=True) if isinstance(event, ToolCallEnd) else event for event in events]


class Eager(Around):
    """Calls what nobody declared."""

    def __init__(self, turn):
        self.right = HERMES.parser(ChatTurn(turn.tail, TOOLS, turn.new_id))


class Renaming(Around):
    def changed(self, events):
        return [evolve(event, name="ping") if isinstance(event, ToolCallStart) else event for event in events]


class Forgetful(Around):
    """Does not look at the end of the prompt."""

    def __init__(self, turn):
        self.right = HERMES.parser(ChatTurn("", turn.tools, turn.new_id))


class Talkative(Around):
    """Says empty pieces."""

    def changed(self, events):
        return [ContentDelta(""), *events]


BROKEN = {
    Late: {"test_a_long_string_streams_before_its_end", "test_a_thought_the_prompt_opened_goes_on"},
    Stripping: {
        "test_any_cut_of_the_stream_gives_the_same_events",
        "test_every_single_cut_gives_the_same_events",
    },
    Raising: {"test_no_text_raises_and_none_is_lost"},
    Losing: {"test_no_text_raises_and_none_is_lost"},
    Trusting: {"test_a_call_cut_short_is_not_whole"},
    Eager: {"test_without_tools_calls_are_text", "test_a_tool_nobody_declared_is_text"},
    Renaming: {"test_what_the_family_writes_reads_back"},
    Forgetful: {"test_a_thought_the_prompt_opened_goes_on"},
    Talkative: {"test_no_text_raises_and_none_is_lost"},
}


def failures(parser):
    """Names of the kit's tests that fail for a format with this parser."""

    class Format:
        name, markers, renders = HERMES.name, HERMES.markers, False

        def parser(self, turn):
            return parser(turn)

    case = Hermes()
    case._format = Format
    failed = set()
    for name in kit_tests(Hermes):
        try:
            getattr(case, name)()
        except (AssertionError, ValueError):
            failed.add(name)
    return failed


def test_the_right_one_passes_them_all():
    assert failures(Around) == set()


@pytest.mark.parametrize("parser", BROKEN, ids=lambda parser: parser.__name__)
def test_a_broken_one_is_caught_where_it_breaks(parser):
    assert failures(parser) >= BROKEN[parser]


def test_every_test_of_the_contract_catches_something():
    assert set().union(*BROKEN.values()) == kit_tests(Hermes)
