"""Commands whose flags are the options of the core and of every loaded plugin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from luce_core.cli.session import Session
from luce_core.options import click_option
from luce_core.registry import CORE

if TYPE_CHECKING:
    from luce_core.option_fields import OptionField


class Words(click.types.StringParamType):
    """Text; the shell is told the words it may be."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self.words = words

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(word) for word in self.words if word.startswith(incomplete)]


class ModelName(click.types.StringParamType):
    """A model: the shell offers the catalogue's names and files."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        session = ctx.find_object(Session)
        names = session.catalog.names if session else ()
        offered = [CompletionItem(name) for name in names if name.startswith(incomplete)]
        return [*offered, CompletionItem(incomplete, type="file")]


class OptionCommand(click.Command):
    """A command with all options as flags, shown in the help under the headings of their groups."""

    def __init__(self, session: Session, **attributes: Any) -> None:
        own = list(attributes.pop("params", ()))
        flags = {item.name: _flag(item) for item in session.fields}
        self.groups = {flags[item.name].name: _heading(item) for item in session.fields}
        super().__init__(params=[*own, *flags.values()], **attributes)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The help, group by group in the order of the fields; a plugin's options under its name."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(self.groups.get(param.name, "Command"), []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def model_argument() -> click.Argument:
    """The optional positional MODEL."""
    return click.Argument(["model_argument"], required=False, metavar="[MODEL]", type=ModelName())


def command(
    name: str, session: Session, call: Callable[..., None], help: str, params: list[click.Parameter]
) -> OptionCommand:
    """A command with every option; `call(session, params)` gets what click parsed."""

    @click.pass_context
    def callback(ctx: click.Context, /, **values: Any) -> None:
        call(session, values)

    return OptionCommand(session, name=name, callback=callback, help=help, params=params)


def _flag(item: OptionField) -> click.Option:
    made = click_option(item)
    if item.choices and not item.is_flag:
        made.type = Words(item.choices)
    elif item.base is Path:
        made.type = click.Path()
    elif item.name == "model":
        made.type = ModelName()
    return made


def _heading(item: OptionField) -> str:
    return item.info.group or "Options" if item.plugin == CORE else f"Plugin {item.plugin}"
