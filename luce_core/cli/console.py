"""What the terminal shows: tables, sentences, and a progress bar where there is someone to watch it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from luce_core.catalog.pull import Progress, Stage

PIPE_COLUMNS = 200
"""Width when nobody watches and COLUMNS is not set: wide enough that no cell of our tables wraps."""


def console(stream: TextIO | None = None) -> Console:
    """A console on `stream` (standard output by default), made anew: tests and pipes swap streams."""
    target = sys.stdout if stream is None else stream
    width = None if target.isatty() else shutil.get_terminal_size((PIPE_COLUMNS, 24)).columns
    return Console(file=target, highlight=False, width=width, soft_wrap=False, emoji=False)


def errors() -> Console:
    """The console of standard error."""
    return console(sys.stderr)


def say(text: str) -> None:
    """A line on standard output; text is shown as it is, brackets and all."""
    console().print(text, markup=False, soft_wrap=True)


def warn(text: str) -> None:
    """A line on standard error."""
    errors().print(text, markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Machine-readable output: nothing but JSON on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Iterable[str] = ()) -> Table:
    """A plain table. `right` names the columns of numbers. Cells are texts or rich renderables."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    numbers = frozenset(right)
    for name in columns:
        made.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*(_cell(cell) for cell in row))
    return made


def _cell(cell: Any) -> Any:
    from rich.text import Text

    return Text(cell) if isinstance(cell, str) else cell


@contextmanager
def pull_progress(name: str) -> Iterator[Progress]:
    """The bar of a pull on a terminal; a line per stage where output is a pipe or a log."""
    shown = errors()
    if not shown.is_terminal:
        yield _stage_lines(name)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Bar(*columns, console=shown, transient=True)
    task = bar.add_task(name, total=None, start=False)

    def report(stage: Stage, done: int, total: int) -> None:
        bar.start()  # only now: a model that is here shows no bar
        if stage == "waiting":
            bar.update(task, description=f"{name}: another luce-core is pulling it, waiting")
            return
        bar.start_task(task)
        bar.update(task, description=f"{name}: {stage}", completed=done, total=total)

    try:
        yield report
    finally:
        bar.stop()


@contextmanager
def byte_progress(name: str) -> Iterator[Callable[[int, int], None]]:
    """The bar of something that is (bytes done, bytes in all); nothing where nobody watches."""
    shown = errors()
    if not shown.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, TimeRemainingColumn(), console=shown, transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _stage_lines(name: str) -> Progress:
    said: set[str] = set()

    def report(stage: Stage, done: int, total: int) -> None:
        if stage not in said:
            said.add(stage)
            what = "waiting for another luce-core that pulls it" if stage == "waiting" else stage
            warn(f"{name}: {what} ({total / 2**20:.0f} MiB)")

    return report


def megabytes(num_bytes: int) -> str:
    """A size for a table of models."""
    return f"{num_bytes / 2**20:.0f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.1f} GiB"
