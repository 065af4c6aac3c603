"""`hf:` sources with the real huggingface_hub client against a server of our own."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from luce_core.catalog import pull
from luce_core.errors import DownloadError

DATA = bytes(range(256)) * 3000
COMMIT = "0123456789abcdef0123456789abcdef01234567"
PATH = f"/owner/repo/resolve/{COMMIT}/sub/m.gguf"


class Hub(ThreadingHTTPServer):
    daemon_threads = True
    cut_after = 0
    """Close the next `cuts` downloads: the first after that many bytes, those that resume at once."""
    cuts = 0

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.ranges = []
        """The Range header of every download, None for none."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.respond(b"", send=False)

    def do_GET(self):
        self.server.ranges.append(self.headers.get("Range"))
        self.respond(DATA, send=True)

    def respond(self, data, send):
        if self.path != PATH:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(DATA) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(DATA) - 1}/{len(DATA)}")
        self.send_header("ETag", f'"{hashlib.sha256(DATA).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if send:
            body = DATA[start:]
            if self.server.cuts:
                self.server.cuts -= 1
                self.close_connection = True
                body = body[: self.server.cut_after] if start == 0 else b""
            self.wfile.write(body)

    def log_message(self, format, *args):
        pass


def point_client(monkeypatch, endpoint):
    """What HF_ENDPOINT does, after the library was imported; and no waiting between its retries."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)


@pytest.fixture
def hub(monkeypatch):
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    point_client(monkeypatch, f"http://127.0.0.1:{server.server_address[1]}")
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def entry(make_entry):
    return make_entry("hubbed", (f"hf:owner/repo@{COMMIT}#sub/m.gguf",), DATA)


def test_a_file_of_a_repository(hub, store, entry):
    seen = []
    path = pull(entry, store, lambda *progress: seen.append(progress))
    assert path == store.path(entry)
    assert path.read_bytes() == DATA
    assert sorted(file.name for file in store.root.rglob("*") if file.is_file()) == sorted(
        [path.name, f"{path.stem}.lock"]
    )
    assert seen[-1] == ("verifying", len(DATA), len(DATA))


def test_other_content_under_the_same_revision_is_refused(hub, store, make_entry):
    changed = make_entry("hubbed", (f"hf:owner/repo@{COMMIT}#sub/m.gguf",), DATA[:-1] + b"?")
    with pytest.raises(DownloadError, match="did not verify"):
        pull(changed, store)
    assert not store.has(changed)


def test_a_missing_file_is_one_sentence_that_names_the_source(hub, store, make_entry):
    gone = make_entry("gone", (f"hf:owner/repo@{COMMIT}#no.gguf",), DATA)
    with pytest.raises(DownloadError, match=rf"@{COMMIT}#no.gguf' could not be fetched") as caught:
        pull(gone, store)
    assert "\n" not in str(caught.value)


def test_an_unreachable_hub_is_one_sentence(hub, store, entry, monkeypatch):
    point_client(monkeypatch, "http://127.0.0.1:9")  # the discard port: nobody listens
    with pytest.raises(DownloadError, match=r"could not be fetched.*the network"):
        pull(entry, store)


def test_a_cut_download_goes_on_where_it_was_also_in_the_next_pull(hub, store, entry, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.cuts = 1000
    hub.cut_after = 50_000
    with pytest.raises(DownloadError, match="could not be fetched"):
        pull(entry, store)
    assert not store.has(entry)
    hub.cuts = 0
    hub.ranges.clear()
    assert pull(entry, store).read_bytes() == DATA
    assert len(hub.ranges) == 1
    assert int(hub.ranges[0].removeprefix("bytes=").split("-")[0]) >= 50_000
