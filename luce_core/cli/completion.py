"""`luce-core completion SHELL`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from luce_core.cli.session import Session

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_LUCE_CORE_COMPLETE"
"""What the scripts set to ask for completions; click derives the same from the program's name."""


def make(session: Session) -> click.Command:
    """The command."""

    @click.command("completion", help="Print the completion script of a shell, for its start-up file:\n\n"
                   'bash: eval "$(luce-core completion bash)"')
    @click.argument("shell", type=click.Choice(SHELLS))
    def completion(shell: str) -> None:
        from luce_core.cli.main import root

        made = get_completion_class(shell)
        assert made is not None, shell
        click.echo(made(root(), {}, "luce-core", VARIABLE).source())

    return completion
