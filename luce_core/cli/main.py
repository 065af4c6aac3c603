"""`luce-core`: finds the command, runs it, and turns every error into one sentence and an exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from attrs import frozen

import luce_core
from luce_core.cli.console import warn
from luce_core.cli.session import Session
from luce_core.errors import LuceError, PluginError
from luce_core.registry import resolve

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells report it: 128 + SIGINT."""
BUG = 70
"""Exit status for an error nobody foresaw (EX_SOFTWARE)."""


@frozen
class Builtin:
    """A command of the core: its module has `make(session) -> click.Command`."""

    module: str
    summary: str


COMMANDS: Mapping[str, Builtin] = {
    "serve": Builtin("serve", "Serve a model over HTTP (OpenAI-compatible)."),
    "run": Builtin("run", "Chat with a model in the terminal."),
    "bench": Builtin("bench", "Measure a model or a server, and say what on."),
    "pull": Builtin("pull", "Fetch a model of the catalogue, or list them."),
    "synth": Builtin("synth", "Write a model of random weights in a published size, to measure with."),
    "plan": Builtin("plan", "Show what would run where, and what it takes, without loading anything."),
    "inspect": Builtin("inspect", "Show what is in a GGUF file and which plugin serves it."),
    "devices": Builtin("devices", "List the devices the installed plugins see."),
    "plugins": Builtin("plugins", "List the installed plugins and what they provide."),
    "doctor": Builtin("doctor", "Say what is wrong with this machine's set-up, and the fix."),
    "config": Builtin("config", "Show the effective options and who set them."),
    "completion": Builtin("completion", "Print the completion script of a shell."),
}


class Root(click.Group):
    """All commands: the core's, then those of plugins, each imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        added = _session(ctx).registry.names("command")
        return [*COMMANDS, *(name for name in added if name not in COMMANDS)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        session = _session(ctx)
        if cmd_name in COMMANDS:
            make: Callable[[Session], click.Command] = import_module(
                f"luce_core.cli.{COMMANDS[cmd_name].module}"
            ).make
            return make(session)
        if not session.registry.declared.get(f"command.{cmd_name}"):
            return None
        supplied = session.registry.command(cmd_name)
        made = resolve(supplied.value.factory, f"command {cmd_name!r}")()
        if not isinstance(made, click.Command):
            raise PluginError(
                f"Command {cmd_name!r} of {session.registry.title(supplied.plugin)} is {made!r}, wanted a "
                "click.Command. Report it to its authors."
            )
        return made

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Names and summaries, without importing a single command."""
        registry = _session(ctx).registry
        rows = [(name, COMMANDS[name].summary) for name in COMMANDS]
        added = [name for name in self.list_commands(ctx) if name not in COMMANDS]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
        if added:
            with formatter.section("Commands of plugins"):
                formatter.write_dl([(name, registry.command(name).value.summary) for name in added])


def _session(ctx: click.Context) -> Session:
    session = ctx.find_object(Session)
    assert session is not None, "luce-core was started without a session"
    return session


def root() -> Root:
    """The command `luce-core`."""
    made = Root(
        "luce-core",
        help="A local LLM inference server made of plugins.\n\n"
        "Start with `luce-core serve` or `luce-core run`; both fetch a small model when none is named.",
        epilog="--debug, anywhere on the line, shows the traceback of an error.",
    )
    return click.version_option(luce_core.__version__, prog_name="luce-core")(made)


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point of the script: runs and exits."""
    sys.exit(run(sys.argv[1:] if argv is None else argv, os.environ, Path.cwd()))


def run(argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> int:
    """The exit status of one command line. The boundary where errors become sentences."""
    arguments, debug = _take_debug(argv)
    session = Session(tuple(arguments), env, cwd)
    try:
        status: Any = root().main(arguments, prog_name="luce-core", standalone_mode=False, obj=session)
        return status if isinstance(status, int) else 0
    except click.exceptions.Exit as over:
        return over.exit_code
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return 0
    except click.ClickException as error:
        warn(_usage_sentence(error, session))
        return error.exit_code
    except LuceError as error:
        if debug:
            raise
        warn(str(error))
        return error.exit_status
    except Exception as error:  # the last boundary: a bug is one sentence too, unless --debug
        if debug:
            raise
        warn(
            f"luce-core failed in a way nobody foresaw: {type(error).__name__}: {error}\n"
            "Run the same command with --debug for the traceback, and report it."
        )
        return BUG


def _take_debug(argv: Sequence[str]) -> tuple[list[str], bool]:
    """Arguments without `--debug`, which may stand anywhere before `--`."""
    end = list(argv).index("--") if "--" in argv else len(argv)
    kept = [word for place, word in enumerate(argv) if word != "--debug" or place >= end]
    return kept, len(kept) < len(argv)


def _usage_sentence(error: click.ClickException, session: Session) -> str:
    from luce_core.options import explain_flag

    if isinstance(error, click.NoSuchOption):
        return explain_flag(error.option_name, session.registry)
    message = error.format_message()
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{message} See '{error.ctx.command_path} --help'."
    return message


def _silence_stdout() -> None:
    """The reader of our output is gone (`luce-core plugins | head`): flushing at exit must not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
