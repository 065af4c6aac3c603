"""The folder the models lie in. A file under its final name is whole and verified: nothing else gets one."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from attrs import frozen

from luce_core.contracts.plugin import CatalogEntry
from luce_core.errors import DownloadError, UsageError
from luce_core.paths import expand_home

CHECKSUM_DIGITS = 8
"""Of the file name: a catalogue entry that changes its checksum never meets its old file."""
HASH_CHUNK_BYTES = 4 * 2**20


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """`$LUCE_CACHE`, else `luce-core/models` in the user's cache folder. Creates nothing."""
    if chosen := environ.get("LUCE_CACHE"):
        return expand_home(chosen)
    base = environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    return root / "luce-core" / "models"


@frozen
class Store:
    """Where entries lie: `NAME-CHECKSUM.gguf` when whole, `.pull/NAME-CHECKSUM/` while they arrive."""

    root: Path

    def path(self, entry: CatalogEntry) -> Path:
        return self.root / f"{self._stem(entry)}.gguf"

    def work(self, entry: CatalogEntry) -> Path:
        """The folder of an unfinished pull; only the holder of `lock` touches it."""
        return self.root / ".pull" / self._stem(entry)

    def has(self, entry: CatalogEntry) -> bool:
        return self.path(entry).is_file()

    @contextmanager
    def lock(self, entry: CatalogEntry, waiting: Callable[[], None]) -> Iterator[None]:
        """One pull per entry at a time, over all processes. `waiting` is called once if another has it.

        The kernel drops the lock when its holder dies, so there is no stale lock to clean up.
        """
        folder = self.root / ".pull"
        _make_folder(folder)
        with (folder / f"{self._stem(entry)}.lock").open("a+") as handle:
            _acquire(handle, waiting)
            try:
                yield
            finally:
                fcntl.flock(handle, fcntl.LOCK_UN)

    def publish(self, entry: CatalogEntry, part: Path) -> Path:
        """Give a verified file its final name: written to the disk first, then renamed in one step."""
        with part.open("rb+") as handle:
            os.fsync(handle.fileno())
        final = self.path(entry)
        part.replace(final)
        _sync_folder(self.root)
        shutil.rmtree(self.work(entry), ignore_errors=True)  # the model is whole whatever is left there
        return final

    def remove(self, entry: CatalogEntry) -> int:
        """Delete the model and whatever an unfinished pull left; returns the bytes freed."""
        freed = 0
        with self.lock(entry, lambda: None):
            if self.work(entry).is_dir():
                freed += sum(file.stat().st_size for file in self.work(entry).rglob("*") if file.is_file())
                shutil.rmtree(self.work(entry))
            if self.has(entry):
                freed += self.path(entry).stat().st_size
                self.path(entry).unlink()
        return freed

    def _stem(self, entry: CatalogEntry) -> str:
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", entry.name):
            raise UsageError(
                f"Catalogue entry {entry.name!r} has a name that is no file name. "
                "Use small letters, digits, '.', '_' and '-'."
            )
        return f"{entry.name}-{entry.sha256[:CHECKSUM_DIGITS]}"


def file_sha256(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """Checksum of a whole file, read in chunks; `on_bytes` is told the size of each."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
            on_bytes(len(chunk))
    return digest.hexdigest()


def need_space(folder: Path, num_bytes: int, name: str) -> None:
    """Raises DownloadError when the disk under `folder` has not that much room."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise DownloadError(
            f"Model {name!r} does not fit on the disk: {folder} has {free / 2**20:.0f} MiB free, the pull "
            "needs "
            f"{num_bytes / 2**20:.0f} MiB. Free some room or set LUCE_CACHE to a folder on another disk."
        )


def _acquire(handle: IO[str], waiting: Callable[[], None]) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waiting()
        fcntl.flock(handle, fcntl.LOCK_EX)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DownloadError(
            f"Cannot create the model folder {str(folder)!r}: {error.strerror}. "
            "Set LUCE_CACHE to a folder you may write to."
        ) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
