"""`luce-core config show`."""

from __future__ import annotations

from typing import Any

import click

from luce_core.cli import flags
from luce_core.cli.console import console, print_json, say, table
from luce_core.cli.session import Session


def make(session: Session) -> click.Command:
    """The command."""
    group = click.Group("config", help="Show the effective options and who set them.")
    params: list[click.Parameter] = [
        click.Option(["--changed"], is_flag=True, help="Only options that are not at their default."),
        click.Option(["--json", "as_json"], is_flag=True, help="Print JSON."),
        flags.model_argument(),
    ]
    text = "Show every option, its value and who set it. Takes the flags of `serve`; keys are masked."
    group.add_command(flags.command("show", session, show, text, params))
    return group


def show(session: Session, params: dict[str, Any]) -> None:
    """Print the options the same flags would give `serve`."""
    rows = session.options(params).masked()
    if params["changed"]:
        rows = [row for row in rows if row.source != "default"]
    if params["as_json"]:
        print_json(
            [{"name": row.name, "value": row.value, "source": row.source, "by": row.by} for row in rows]
        )
        return
    console().print(table(["option", "value", "set by"], [(row.name, row.value, row.by) for row in rows]))
    say(f"Config files read: {', '.join(str(path) for path in session.files) or 'none'}.")
