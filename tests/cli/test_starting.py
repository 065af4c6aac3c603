import pytest

from luce_core.cli.starting import template_metadata
from luce_core.errors import UsageError
from luce_core.testing.toy_vocab import toy_vocabulary
from luce_core.text import ChatTemplate

VARIANTS = {"tokenizer.chat_template.tool_use": "the file's", "tokenizer.chat_templates": ["tool_use"]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def rendered(template, **more):
    return "".join(
        part.text for part in template.render([{"role": "user", "content": "x"}], kwargs={}, **more)
    )


def test_a_users_template_is_used_with_and_without_tools(tmp_path):
    chosen = tmp_path / "mine.jinja"
    chosen.write_text("mine")
    metadata = {**toy_vocabulary("bpe"), **VARIANTS}
    template = ChatTemplate.from_metadata(template_metadata(metadata, chosen))
    assert rendered(template) == rendered(template, tools=TOOLS) == "mine"


def test_without_a_choice_the_files_own_templates_stay():
    metadata = {**toy_vocabulary("bpe"), **VARIANTS}
    assert template_metadata(metadata, None) == metadata


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_template_that_cannot_be_read_is_named(tmp_path, content):
    chosen = tmp_path / "mine.jinja"
    if content is not None:
        chosen.write_bytes(content)
    with pytest.raises(UsageError, match=r"mine\.jinja"):
        template_metadata({}, chosen)
