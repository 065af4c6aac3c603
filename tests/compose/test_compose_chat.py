"""The chat format of a plan: which part is asked, what it is given, what it may answer."""

import sys
import types

import pytest
from pydantic import BaseModel

from luce_core.compose_chat import compose_chat
from luce_core.contracts import ChatContext, Equivalence, PartSpec
from luce_core.errors import PluginError
from luce_core.gguf import read_header
from luce_core.options import load_options
from luce_core.plan import make_plan
from luce_core.plugins import from_modules
from luce_core.testing.fake_plugins import make_plugin
from luce_core.testing.fresh import run_fresh
from luce_core.testing.toy import hooks as toy
from luce_core.testing.toy import write_toy_model
from luce_core.text import FALLBACK_TEMPLATES, ChatTemplate, Tokenizer
from luce_core.text.chat_formats import PLAIN, TagFormat

MINE = TagFormat("mine")


class MineOptions(BaseModel):
    width: int = 4


@pytest.fixture
def factories(monkeypatch):
    module = types.ModuleType("made_up_chats")
    module.calls = []

    def make(context):
        module.calls.append(context)
        return MINE

    def unsuited(context):
        module.calls.append(context)

    module.make, module.unsuited = make, unsuited
    module.fail = lambda context: 1 / 0
    module.deaf = lambda context: object()
    monkeypatch.setitem(sys.modules, "made_up_chats", module)
    return module


@pytest.fixture
def composed(tmp_path, factories):
    """composed(*factory names, template=..., **options) -> the format."""

    def make(*made, template="", own=True, **options):
        path = write_toy_model(tmp_path / "toy.gguf", template=template)
        parts = [PartSpec("chat", name, f"made_up_chats:{name}", Equivalence.BITS) for name in made]
        plugin = make_plugin("mine", options=MineOptions, luce_register_parts=parts)
        registry = from_modules([toy, plugin])
        named = {"chat": made} if made else {}
        loaded = load_options(registry, {**named, **options}, {}, [])
        plan = make_plan(loaded, read_header(path), registry)
        metadata = dict(read_header(path).metadata)
        if not own:
            del metadata["tokenizer.chat_template"]
        tokenizer = Tokenizer.from_metadata(metadata)
        return compose_chat(plan, registry, tokenizer, ChatTemplate.from_metadata(metadata))

    return make


def test_a_part_is_made_with_its_options_the_vocabulary_and_the_template(composed, factories):
    assert composed("make", template="{{ 'mine' }}", **{"mine.width": 7}) is MINE
    (context,) = factories.calls
    assert isinstance(context, ChatContext)
    assert (context.options, context.template, context.has_template) == (
        MineOptions(width=7),
        "{{ 'mine' }}",
        True,
    )
    assert context.tokenizer.token_id("<think>") is not None
    assert context.image == ""


def test_a_file_without_a_template_is_told(composed, factories):
    composed("make", own=False)
    (context,) = factories.calls
    assert (context.template, context.has_template) == (FALLBACK_TEMPLATES["chatml"], False)


def test_the_first_that_suits_the_file_is_taken(composed, factories):
    assert composed("unsuited", "make", "fail") is MINE
    assert len(factories.calls) == 2


def test_where_none_suits_the_answer_is_text(composed):
    assert composed("unsuited") is PLAIN


def test_what_the_core_finds_by_itself(composed):
    assert composed().name == "auto"
    assert composed(chat=("plain",)) is PLAIN
    assert composed(chat=("none",)) is PLAIN


@pytest.mark.parametrize(
    ("made", "message"), [("fail", "ZeroDivisionError"), ("deaf", "parser and template_kwargs")]
)
def test_a_broken_factory_is_named(composed, made, message):
    with pytest.raises(PluginError, match=f"Chat '{made}' of plugin 'mine'.*{message}"):
        composed(made)


def test_formats_are_made_without_torch():
    assert run_fresh("import luce_core.compose_chat, sys; print('torch' in sys.modules)").strip() == "False"
