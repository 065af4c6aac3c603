"""Drafters with a model, or state, of their own keep the contract of every drafter."""

import pytest

from luce_core.testing.drafter_contract import DrafterContract
from luce_core.testing.plugin import PluginContract
from luce_core.testing.toy import write_toy_model

HOOKS = "luce_core.testing.toy.draft_hooks"


class TestPlugin(PluginContract):
    hooks = HOOKS


@pytest.mark.slow
class TestDraftModel(DrafterContract):
    hooks = HOOKS
    name = "toy-draft"

    def make_options(self, folder):
        return {"toy-draft.model": str(write_toy_model(folder / "draft.gguf"))}


@pytest.mark.slow
class TestHead(DrafterContract):
    hooks = HOOKS
    name = "toy-head"
