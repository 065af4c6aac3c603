"""Models by name: where they come from, where they lie, and how a half-fetched one is never served."""

from luce_core.catalog.entries import DEFAULT_MODEL, ENTRIES
from luce_core.catalog.pull import Progress, pull, silent
from luce_core.catalog.resolve import Catalog, resolve_model
from luce_core.catalog.sources import FileSource, HubSource, PypiSource, Source, parse_source
from luce_core.catalog.store import Store, cache_folder

__all__ = [
    "DEFAULT_MODEL",
    "ENTRIES",
    "Catalog",
    "FileSource",
    "HubSource",
    "Progress",
    "PypiSource",
    "Source",
    "Store",
    "cache_folder",
    "parse_source",
    "pull",
    "resolve_model",
    "silent",
]
