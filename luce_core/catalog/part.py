"""The unfinished file of a pull: whole segments behind a journal, so that a pull killed anywhere goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attrs import define

from luce_core.errors import DownloadError


@define
class Part:
    """`model.part` and `journal.json` in the work folder.

    The journal names how many sources are whole in the file and at which byte they end; what lies behind is
    the torn rest of an interrupted pull and is cut off when the part is opened again.
    """

    folder: Path
    limit_bytes: int
    """What the catalogue promises; a source that yields more is refused before it fills the disk."""
    num_segments: int = 0
    num_bytes: int = 0

    @classmethod
    def open(cls, folder: Path, limit_bytes: int) -> Part:
        """Go on where the journal says, or begin. The caller holds the lock of the entry."""
        folder.mkdir(parents=True, exist_ok=True)
        part = cls(folder, limit_bytes)
        segments, num_bytes = part._read_journal()
        if part.path.is_file() and part.path.stat().st_size >= num_bytes:
            part.num_segments, part.num_bytes = segments, num_bytes
            os.truncate(part.path, num_bytes)
        else:
            part.path.write_bytes(b"")
        return part

    @property
    def path(self) -> Path:
        return self.folder / "model.part"

    def append(self, chunks: Iterable[bytes]) -> None:
        """Add one whole source and note it. If it fails midway, the journal still names the state before."""
        end = self.num_bytes
        with self.path.open("rb+") as handle:
            handle.seek(end)
            handle.truncate()
            for chunk in chunks:
                end += len(chunk)
                self._check_limit(end)
                handle.write(chunk)
            handle.flush()
            os.fsync(handle.fileno())
        self._note(end)

    def adopt(self, file: Path) -> None:
        """Take a file over as the first and only source, without copying it."""
        if self.num_segments:
            raise RuntimeError(f"adopt() after {self.num_segments} segments")
        size = file.stat().st_size
        self._check_limit(size)
        file.replace(self.path)
        self._note(size)

    def _check_limit(self, num_bytes: int) -> None:
        if num_bytes > self.limit_bytes:
            raise DownloadError(
                f"Source {self.num_segments + 1} of the model yields too much: got more than "
                f"{num_bytes - 1} bytes, "
                f"wanted {self.limit_bytes}. The source has changed since it was catalogued."
            )

    def _note(self, num_bytes: int) -> None:
        self.num_segments += 1
        self.num_bytes = num_bytes
        fresh = self.folder / "journal.json.new"
        with fresh.open("w") as handle:
            json.dump({"segments": self.num_segments, "bytes": num_bytes}, handle)
            handle.flush()
            os.fsync(handle.fileno())
        fresh.replace(self._journal)

    @property
    def _journal(self) -> Path:
        return self.folder / "journal.json"

    def _read_journal(self) -> tuple[int, int]:
        """(segments, bytes); zeros when there is none or it makes no sense: then the pull begins anew."""
        if not self._journal.is_file():
            return 0, 0
        try:
            noted: Any = json.loads(self._journal.read_text())
        except ValueError:
            return 0, 0
        if not isinstance(noted, dict):
            return 0, 0
        segments, num_bytes = noted.get("segments"), noted.get("bytes")
        if not (isinstance(segments, int) and isinstance(num_bytes, int)) or min(segments, num_bytes) < 0:
            return 0, 0
        return segments, num_bytes
