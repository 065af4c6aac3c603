"""A package index on loopback with wheels we build, a log of what was fetched, and ways to misbehave."""

import base64
import hashlib
import sys
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from luce_core.catalog import Store
from luce_core.contracts import CatalogEntry

# For spawned children too: multiprocessing hands them this path.
sys.path.insert(0, str(Path(__file__).parent / "children"))


def make_wheel(folder: Path, distribution: str, version: str, members: Mapping[str, bytes]) -> Path:
    """A wheel pip accepts: members, METADATA, WHEEL and a RECORD with true hashes."""
    name = distribution.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    files = dict(members)
    header = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    files[f"{info}/METADATA"] = f"{header}Requires-Dist: never-to-be-fetched\n".encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    rows = [f"{path},sha256={_urlsafe(data)},{len(data)}" for path, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            archive.writestr(path, data)
    return wheel


def _urlsafe(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


class Index:
    """What the server holds and what it was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""
        self.fetched: list[str] = []
        self.cut_at: dict[str, int] = {}
        """File name -> close the connection after that many bytes."""
        self.hang_on: set[str] = set()
        """File names whose download sends half and then waits for `release`."""
        self.asked = threading.Event()
        """Set when a hanging download has begun."""
        self.release = threading.Event()

    def add(self, distribution: str, version: str, members: Mapping[str, bytes]) -> str:
        return make_wheel(self.folder, distribution, version, members).name

    def environment(self) -> dict[str, str]:
        return {
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_INDEX_URL": f"{self.url}/simple",
            "PIP_EXTRA_INDEX_URL": "",
            "PIP_FIND_LINKS": "",
            "PIP_RETRIES": "0",
        }


@contextmanager
def serve_index(folder: Path) -> Iterator[Index]:
    index = Index(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/simple/"):
                wanted = self.path.removeprefix("/simple/").strip("/").replace("-", "_")
                links = [
                    f'<a href="/files/{wheel.name}">{wheel.name}</a>'
                    for wheel in sorted(folder.glob("*.whl"))
                    if wheel.name.split("-")[0] == wanted
                ]
                self.answer(200 if links else 404, "".join(links).encode(), "text/html")
            else:
                self.send_file(self.path.rsplit("/", 1)[-1])

        def send_file(self, name: str) -> None:
            index.fetched.append(name)
            data = (folder / name).read_bytes()
            if name in index.cut_at or name in index.hang_on:
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data[: index.cut_at.get(name, len(data) // 2)])
                self.wfile.flush()
                if name in index.hang_on:
                    index.asked.set()
                    index.release.wait()
                self.close_connection = True
                return
            self.answer(200, data, "application/octet-stream")

        def answer(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    index.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield index
    finally:
        index.release.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index of our own that pip is pointed at."""
    folder = tmp_path / "index"
    folder.mkdir()
    with serve_index(folder) as served:
        for name, value in served.environment().items():
            monkeypatch.setenv(name, value)
        yield served


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "models")


def entry_of(name: str, sources: tuple[str, ...], data: bytes) -> CatalogEntry:
    """An entry that promises exactly `data`."""
    return CatalogEntry(
        name=name,
        sources=sources,
        sha256=hashlib.sha256(data).hexdigest(),
        num_bytes=len(data),
        license="none",
        summary="a test model",
    )


@pytest.fixture
def make_entry():
    return entry_of
