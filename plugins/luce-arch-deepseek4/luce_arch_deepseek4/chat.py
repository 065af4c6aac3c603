"""How DeepSeek V4 writes thoughts and calls, and its prompts where a file brings no template."""

from __future__ import annotations

from functools import partial

from attrs import evolve, frozen

from luce_arch_deepseek4.prompt import MARK, prompt
from luce_core.contracts import ChatContext
from luce_core.text.chat_formats import Calls, Malformed, Reading, Source, TagFormat, Thought, name_until
from luce_core.text.chat_formats.json_text import expect
from luce_core.text.chat_formats.schema import from_text

INVOKE = f'<{MARK}invoke name="'
PARAMETER = f'<{MARK}parameter name="'
END_PARAMETER = f"</{MARK}parameter>"
END_INVOKE = f"</{MARK}invoke>"
BLOCKS = ("tool_calls", "function_calls")
"""What the tag around all calls of an answer is called, by release."""
KINDS = ('" string="true">', '" string="false">', '">')


@frozen
class DsmlCalls:
    """A block of `invoke` tags whose parameters say whether they are text or JSON. The block's own tags may
    lack.
    """

    openers: tuple[str, ...] = (*(f"<{MARK}{block}>" for block in BLOCKS), INVOKE)
    at_start: bool = False

    def read(self, opener: str, source: Source, calls: Calls) -> Reading[None]:
        """All calls of a block."""
        if opener != INVOKE:
            yield from expect(source, INVOKE)
        while True:
            name, _ = yield from name_until(source, ('">',))
            calls.begin(name)
            yield from _parameters(source, calls)
            calls.end()
            if opener == INVOKE:
                return
            yield from source.skip()
            tag = yield from source.starts(INVOKE, *(f"</{MARK}{block}>" for block in BLOCKS))
            if tag != INVOKE:
                return


def _parameters(source: Source, calls: Calls) -> Reading[None]:
    while True:
        yield from source.skip()
        tag = yield from source.starts(PARAMETER, END_INVOKE)
        if not tag and source.ended:
            calls.end_of_text()
        elif not tag:
            raise Malformed
        if tag != PARAMETER:
            return
        key, kind = yield from name_until(source, KINDS)
        if kind == KINDS[0] and calls.streams_quoted(key):
            calls.begin_string(key)
            if not (yield from source.until((END_PARAMETER,), calls.text)):
                raise Malformed
            calls.end_string()
        elif kind == KINDS[1]:
            yield from _as_json(source, calls, key)
        else:
            yield from calls.bare(key, source, (END_PARAMETER,))


def _as_json(source: Source, calls: Calls, key: str) -> Reading[None]:
    parts: list[str] = []
    if not (yield from source.until((END_PARAMETER,), parts.append)):
        raise Malformed
    text = "".join(parts).strip()
    try:
        calls.json(key, text)
    except Malformed:  # said to be JSON, and is none
        calls.value(key, from_text(text, calls.types(key)))


FORMAT = TagFormat(
    "deepseek4",
    Thought(trim=""),
    (DsmlCalls(),),
    more_markers=(MARK,),
    efforts={"max": "max", "xhigh": "max", "x-high": "max"},
)


def make_format(context: ChatContext) -> TagFormat:
    """DSML, whatever the template; a file without one gets prompts from here."""
    if context.has_template:
        return FORMAT
    return evolve(FORMAT, renderer=partial(prompt, image=context.image))
