"""Paths as users write them."""

from __future__ import annotations

from pathlib import Path

from luce_core.errors import UsageError


def expand_home(path: str | Path) -> Path:
    """`path` with its `~` or `~user` replaced. UsageError when nobody has that home."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(f"Path {str(path)!r} begins with a home folder nobody has: {error}") from error
