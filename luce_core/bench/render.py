"""Tables and panels as plain values, numbers as text, and Markdown. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen


@frozen
class Table:
    """The first column names the row, the others are numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@frozen
class Series:
    """One line of a picture; low and high where there is a spread."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@frozen
class Panel:
    """One pair of axes."""

    title: str
    x: str
    y: str
    series: tuple[Series, ...]


def number(value: float) -> str:
    """Three figures, all of them where there are more before the point."""
    size = abs(value)
    if size >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def share(value: float | None) -> str:
    """In percent; "-" for nothing."""
    return "-" if value is None else f"{100 * value:.0f}%"


def markdown(table: Table) -> str:
    """The table for a page or a log."""
    lines = [table.columns, ("---", *("---:" for _ in table.columns[1:])), *table.rows]
    return "\n".join(f"| {' | '.join(_escaped(cell) for cell in line)} |" for line in lines)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def bullets(lines: Sequence[str]) -> str:
    """A list for a page or a log."""
    return "\n".join(f"* {line}" for line in lines)
