"""Calls in tags whose arguments are bare text: function and parameter (Qwen3.5, Coder), keys and values
(Laguna, Ling, GLM).
"""

from __future__ import annotations

from attrs import frozen

from luce_core.text.chat_formats.calls import Calls, Malformed, name_until
from luce_core.text.chat_formats.json_text import expect
from luce_core.text.chat_formats.source import Reading, Source

WRAPPER = "<tool_call>"
END = "</tool_call>"
PARAMETER = "<parameter="
_VALUE_ENDS = ("</parameter>", "\n</parameter>", "\r\n</parameter>", "\n<parameter=", "\n</function>")


@frozen
class FunctionTags:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

    One line break on each side of a value belongs to the tags. The outer tags may lack, and so may a closing
    tag where the next tag on a line of its own says the same.
    """

    at_start: bool = False

    @property
    def openers(self) -> tuple[str, ...]:
        return (WRAPPER, "<function=")

    def read(self, opener: str, source: Source, calls: Calls) -> Reading[None]:
        """One call."""
        wrapped = opener == WRAPPER
        if wrapped:
            yield from expect(source, "<function=")
        name, _ = yield from name_until(source, (">",))
        calls.begin(name.strip("\"'"))
        tag = ""
        while True:
            if not tag:
                yield from source.skip()
                tag = yield from source.starts(PARAMETER, "</function>", END)
            if not tag and source.ended:
                calls.end_of_text()
            elif not tag or (tag == END and not wrapped):
                raise Malformed
            if tag != PARAMETER:
                break
            tag = yield from _parameter(source, calls)
        if wrapped and tag == "</function>":
            yield from source.skip()
            if not (yield from source.starts(END)) and source.ended:
                calls.end_of_text()
        calls.end()


def _parameter(source: Source, calls: Calls) -> Reading[str]:
    """Read a parameter behind its opening tag -> the tag behind it, where its own closing tag lacks."""
    key, _ = yield from name_until(source, (">",))
    yield from source.starts("\r\n", "\n")
    closer = yield from calls.bare(key.strip("\"'"), source, _VALUE_ENDS)
    return "" if closer.endswith("</parameter>") else closer.strip()


@frozen
class KeyValueTags:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`, and space anywhere."""

    at_start: bool = False

    @property
    def openers(self) -> tuple[str, ...]:
        return (WRAPPER,)

    def read(self, opener: str, source: Source, calls: Calls) -> Reading[None]:
        """One call."""
        yield from source.skip()
        name, tag = yield from name_until(source, ("<arg_key>", END, "\n"))
        calls.begin(name)
        while True:
            if tag not in ("<arg_key>", END):
                yield from source.skip()
                tag = yield from source.starts("<arg_key>", END)
            if not tag and source.ended:
                calls.end_of_text()
            elif not tag:
                raise Malformed
            if tag != "<arg_key>":
                break
            key, _ = yield from name_until(source, ("</arg_key>",))
            yield from expect(source, "<arg_value>")
            yield from calls.bare(key, source, ("</arg_value>",))
            tag = ""
        calls.end()
