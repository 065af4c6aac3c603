"""The chat format of a plan: made where it works, in the server's process, without torch or a model."""

from __future__ import annotations

from functools import partial

from luce_core.contracts import BackendPlan, ChatContext, ChatFormat
from luce_core.errors import PluginError
from luce_core.plan_media import media_processor
from luce_core.plan_models import plugin_options
from luce_core.registry import Registry, guarded, resolve
from luce_core.text import ChatTemplate, Tokenizer
from luce_core.text.chat_formats import PLAIN

METHODS = ("parser", "template_kwargs", "render")


def compose_chat(
    plan: BackendPlan, registry: Registry, tokenizer: Tokenizer, template: ChatTemplate
) -> ChatFormat:
    """The first of the plan's chat parts that says it suits the file; plain text if none does.

    Raises PluginError when a factory fails or returns the wrong thing.
    """
    processor = media_processor(plan, registry)
    image = processor.placeholder if processor else ""
    for name in plan.parts["chat"]:
        found = registry.part("chat", name)
        subject = f"Chat {name!r} of {registry.title(found.plugin)}"
        factory = resolve(found.value.factory, subject)
        options = plugin_options(registry, plan.values, found.plugin)
        context = ChatContext(options, tokenizer, template.all_source, not template.fallback, image)
        made = guarded(f"{subject}: its factory {found.value.factory!r}", partial(factory, context))
        if made is None:
            continue
        lacking = [method for method in METHODS if not callable(getattr(made, method, None))]
        if lacking:
            raise PluginError(
                f"{subject}: its factory returned {made!r}, wanted an object with {' and '.join(lacking)}, "
                "or None where it does not suit the file."
            )
        format: ChatFormat = made
        return format
    return PLAIN
