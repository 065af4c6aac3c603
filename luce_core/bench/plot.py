"""Panels as a picture, with matplotlib from the extra `luce-core[plot]`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from luce_core.bench.render import Panel
from luce_core.errors import UsageError

PANEL_INCHES = (5.6, 4.0)


def load_matplotlib() -> Any:
    """The module with `Figure`. ImportError without the extra."""
    import matplotlib.figure

    return matplotlib.figure


def need_plot(load: Callable[[], Any] = load_matplotlib) -> Any:
    """What `draw` needs. UsageError before anything is measured for a picture nobody can draw."""
    try:
        return load()
    except ImportError as error:
        raise UsageError(f"--plot needs matplotlib ({error}). pip install 'luce-core[plot]'.") from error


def draw(figures: Any, panels: Sequence[Panel], caption: str, path: Path) -> None:
    """One row of panels and what it was measured on. UsageError when the file cannot be written."""
    width, height = PANEL_INCHES
    figure = figures.Figure(figsize=(width * len(panels), height + 0.4), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for series in panel.series:
            spread = None
            if series.low:
                low = [y - item for y, item in zip(series.y, series.low, strict=True)]
                high = [item - y for y, item in zip(series.y, series.high, strict=True)]
                spread = [low, high]
            axes.errorbar(series.x, series.y, yerr=spread, marker="o", capsize=3, label=series.name)
        axes.set_title(panel.title)
        axes.set_xlabel(panel.x)
        axes.set_ylabel(panel.y)
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.supxlabel(caption, fontsize="x-small")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # ValueError: an ending matplotlib has no writer for
        raise UsageError(f"--plot {str(path)!r} cannot be written: {error}.") from error
