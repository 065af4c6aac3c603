"""From what the user typed to a file: a path, or a name of the catalogue."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path

from attrs import frozen

from luce_core.catalog.pull import Progress, pull, silent
from luce_core.catalog.store import Store
from luce_core.contracts.plugin import CatalogEntry
from luce_core.errors import UsageError
from luce_core.paths import expand_home

LISTED_AT_MOST = 10


@frozen
class Catalog:
    """All entries the core and the installed plugins declare, by name."""

    entries: tuple[CatalogEntry, ...]

    @classmethod
    def of(cls, entries: Iterable[CatalogEntry]) -> Catalog:
        """Raises UsageError when two entries that differ share a name."""
        by_name: dict[str, CatalogEntry] = {}
        for entry in entries:
            other = by_name.setdefault(entry.name, entry)
            if other != entry:
                raise UsageError(
                    f"Two plugins declare a model {entry.name!r}, from {other.sources[0]!r} and from "
                    f"{entry.sources[0]!r}. Uninstall or block one of the plugins."
                )
        return cls(tuple(by_name.values()))

    def __iter__(self) -> Iterator[CatalogEntry]:
        return iter(self.entries)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self.entries)

    def find(self, name: str) -> CatalogEntry | None:
        return next((entry for entry in self.entries if entry.name == name), None)

    def get(self, name: str) -> CatalogEntry:
        """Raises UsageError with the closest name, or all of them when they are few."""
        entry = self.find(name)
        if entry is None:
            raise UsageError(f"There is no model {name!r} in the catalogue. {_hint(name, self.names)}")
        return entry


def resolve_model(model: str, catalog: Catalog, store: Store, progress: Progress = silent) -> Path:
    """The GGUF file `model` means; a catalogue name that is not here yet is pulled.

    A file of that name wins over the catalogue: what the user can see in the folder is what they mean.
    """
    path = expand_home(model)
    if path.is_file():
        return path
    if path.is_dir():
        inside = sorted(file.name for file in path.glob("*.gguf"))
        found = f"It holds {', '.join(inside[:LISTED_AT_MOST])}." if inside else "It holds no .gguf file."
        raise UsageError(f"Model {model!r} is a folder; wanted a GGUF file. {found}")
    entry = catalog.find(model)
    if entry is not None:
        return pull(entry, store, progress)
    if "/" in model or path.suffix == ".gguf":
        raise UsageError(
            f"Model file {model!r} does not exist. Check the path; the current folder is {str(Path.cwd())!r}."
        )
    raise UsageError(
        f"Model {model!r} is neither a file nor a name of the catalogue. {_hint(model, catalog.names)}"
    )


def _hint(name: str, names: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, names, 1)
    if close:
        return f"Did you mean {close[0]!r}?"
    if len(names) <= LISTED_AT_MOST:
        return f"The catalogue has: {', '.join(names)}." if names else "The catalogue is empty."
    return "'luce-core pull' lists what there is."
