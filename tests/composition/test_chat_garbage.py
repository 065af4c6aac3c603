"""Every chat format that comes with the project, on text nobody would write: nothing raises, nothing is
lost, and the cut of the stream changes nothing.
"""

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luce_core.contracts import ChatContext
from luce_core.plugins import from_modules
from luce_core.registry import resolve
from luce_core.testing.chat_contract import check_covered, read

PLUGINS = Path(__file__).parents[2] / "plugins"
HOOKS = [f"{path.parent.name}.hooks" for path in sorted(PLUGINS.glob("luce-arch-*/luce_arch_*/chat.py"))]
ABSENT = {name for name in HOOKS if importlib.util.find_spec(name.partition(".")[0]) is None}
TOOLS = {"f": {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}}
TEMPLATES = (
    "",
    "<tool_call><think></think>",
    "<tool_call><function=",
    "<tool_call><arg_key>",
    "<|python_tag|>",
    "<|tool_call>",
)
FRAGMENTS = (
    "<tool_call>", "</tool_call>", "<function=", "f", ">", "</function>", "<parameter=", "s", "n",
    "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</assistant>", "<think>",
    "</think>", "\n", " ", "5", "x", '{"name": "f", "arguments": ', '{"s": "', '"}', "{", "}", "[", "]", ":",
    ",", '"', "\\", "\\u", "ud83d", "true", ";", "<|python_tag|>", "<|tool_call>", "call:f{", '<|"|>',
    "<tool_call|>", "<|channel>", "thought", "<channel|>", "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>",
    '<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>", '<｜DSML｜parameter name="', '" string="true">',
    '" string="false">', "</｜DSML｜parameter>", "🙂",
)  # fmt: skip
SILENT = (
    "<think>", "</think>", "<|channel>thought", "<|channel>", "<channel|>", "</｜DSML｜tool_calls>",
    "</｜DSML｜function_calls>",
)  # fmt: skip


class Nothing:
    def token_id(self, text):
        return None


def formats():
    """Of what is installed: the core is tested alone too."""
    registry = from_modules([importlib.import_module(name) for name in HOOKS if name not in ABSENT])
    found = {}
    for part in registry.parts("chat"):
        factory = resolve(part.value.factory, part.value.name)
        for template in TEMPLATES:
            format = factory(ChatContext(None, Nothing(), template))
            found[format.name, *format.markers] = format
    return list(found.values())


@pytest.mark.skipif(bool(ABSENT), reason="the architecture plugins must be installed")
def test_every_architecture_of_the_project_has_a_format():
    archs = {path.name for path in PLUGINS.glob("luce-arch-*")}
    assert {f"luce-arch-{name.removeprefix('luce_arch_').removesuffix('.hooks')}" for name in HOOKS} == archs
    assert {format.name for format in formats()} >= {
        "qwen3-json",
        "qwen3-xml",
        "qwen35",
        "gemma",
        "deepseek4",
    }


@pytest.mark.parametrize("format", formats(), ids=lambda format: f"{format.name}-{len(format.markers)}")
@settings(max_examples=60)
@given(
    parts=st.lists(st.sampled_from(FRAGMENTS) | st.text("a<|{\n", max_size=3), max_size=24),
    opened=st.booleans(),
    cut=st.booleans(),
)
def test_garbage(format, parts, opened, cut):
    text = "".join(parts)
    tail = "<think>" if opened else ""
    whole = read(format, [text], tools=TOOLS, tail=tail, cut=cut)
    for pieces in (parts, list(text)):
        assert read(format, pieces, tools=TOOLS, tail=tail, cut=cut).events == whole.events
    if not whole.over:
        check_covered(text, whole, SILENT)
