"""Where the results of `bench` go: a table, Markdown, JSON, a picture; and the bar meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from attrs import frozen
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from luce_core.cli.console import console, errors, print_json, say, table
from luce_core.errors import LuceError, UsageError

STDOUT = "-"


def read_numbers(
    least: int, ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """The numbers of one option, each once; a callback of click's. None where it was not given."""
    if value is None:
        return None
    words = [word.strip() for word in value.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) >= least for word in words):
        wanted = f"wanted whole numbers of at least {least}, like 1,2,4"
        raise click.BadParameter(f"{value!r}, {wanted}.", ctx, param)
    return tuple(dict.fromkeys(int(word) for word in words))


@frozen
class Outputs:
    """Checked before anything is measured."""

    json_file: str | None
    markdown: bool
    plot: Path | None
    figures: Any
    """What draws; None without a picture."""

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Outputs:
        """UsageError for what could not be written in the end."""
        json_file, plot = params["json_file"], params["plot"]
        if json_file == STDOUT and params["markdown"]:
            raise UsageError("--json - and --markdown both print. Give --json a file.")
        for flag, name in (("--json", json_file), ("--plot", plot)):
            if name not in (None, STDOUT) and not Path(name).absolute().parent.is_dir():
                raise UsageError(f"{flag} {name!r}: the folder {str(Path(name).parent)!r} is not there.")
        figures = None
        if plot is not None:
            from luce_core.bench.plot import need_plot

            figures = need_plot()
        return cls(json_file, params["markdown"], None if plot is None else Path(plot), figures)

    @contextmanager
    def shown(self, words: Any, report: Any, results: Sequence[Any]) -> Iterator[None]:
        """Show the report when the block ends, well or not, if there are results by then.

        words: the module that puts this kind of report into words.
        """
        try:
            yield
        except (LuceError, KeyboardInterrupt):
            if results:
                self.show(words, report)
            raise
        self.show(words, report)

    def show(self, words: Any, report: Any) -> None:
        """All outputs."""
        if self.json_file == STDOUT:
            print_json(words.as_data(report))
        elif self.markdown:
            _print_markdown(words, report)
        else:
            _print_table(words, report)
        if self.json_file not in (None, STDOUT):
            _write(Path(str(self.json_file)), json.dumps(words.as_data(report), indent=1) + "\n")
        if self.plot is not None:
            from luce_core.bench.plot import draw

            draw(self.figures, words.panels(report), words.caption(report), self.plot)


def _print_table(words: Any, report: Any) -> None:
    for line in words.head(report):
        say(line)
    made = words.table(report)
    console().print(table(made.columns, made.rows, right=made.columns[1:]))
    for line in words.foot(report):
        say(line)


def _print_markdown(words: Any, report: Any) -> None:
    from luce_core.bench.render import bullets, markdown

    parts = [bullets(words.head(report)), markdown(words.table(report)), bullets(words.foot(report))]
    say("\n\n".join(part for part in parts if part))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be written: {error.strerror}.") from error


@contextmanager
def steps(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on standard error where somebody watches; call it with what is done next."""
    shown = errors()
    if not shown.is_terminal:
        yield lambda what: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=shown, transient=True) as bar:
        task = bar.add_task("", total=total, completed=-1)
        yield lambda what: bar.update(task, description=what, advance=1)
