import socket
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import trustme

from luce_core.errors import RequestError
from luce_core.media.fetch import Fetcher, Rule, is_public

LOOPBACK = "127.0.0.1"


class Site(ThreadingHTTPServer):
    """Answers by path; remembers who asked for what."""

    daemon_threads = True

    def __init__(self, tls=None):
        super().__init__((LOOPBACK, 0), Handler)
        self.asked = []
        self.pages = {}
        self.released = threading.Event()
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    @property
    def port(self):
        return self.server_address[1]

    def handle_error(self, request, client_address):
        """Who leaves early is no news."""

    def stop(self):
        self.released.set()
        self.shutdown()
        self.server_close()
        self.thread.join()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        site = self.server
        site.asked.append((self.headers["host"], self.path))
        status, headers, body = site.pages.get(self.path, (404, {}, b""))
        if status == "hang":
            site.released.wait(30)
            return
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        if headers.get("content-length", "") is None or headers.get("content-length") == "9999":
            self.close_connection = True

    def log_message(self, *args):
        """Quiet."""


@pytest.fixture
def site():
    found = Site()
    yield found
    found.stop()


def fetcher(*rules, resolve=None, **more):
    """Every name is this machine."""
    return Fetcher([Rule.parse(rule) for rule in rules], resolve=resolve or (lambda h, p: [LOOPBACK]), **more)


def fails(fetch, url, said):
    with pytest.raises(RequestError, match=said):
        fetch.fetch(url)


def test_an_allowed_host_is_asked_by_its_name(site):
    site.pages["/a.png?x=1"] = (200, {}, b"pixels")
    where = f"pictures.test:{site.port}"
    assert fetcher(where).fetch(f"http://{where}/a.png?x=1") == b"pixels"
    assert site.asked == [(where, "/a.png?x=1")]


def test_others_are_not_asked_at_all(site):
    for rule in ("other.test", f"other.test:{site.port}", "pictures.test", f"*.pictures.test:{site.port}"):
        fails(fetcher(rule), f"http://pictures.test:{site.port}/", "--allow-image-urls")
    fails(fetcher(), f"http://pictures.test:{site.port}/", "allows no host")
    assert site.asked == []


@pytest.mark.parametrize(
    ("rule", "url", "allowed"),
    [
        ("a.test", "http://a.test/", True),
        ("a.test", "https://A.TEST/", True),
        ("A.test", "http://a.test:80/", True),
        ("a.test", "http://a.test:81/", False),
        ("a.test:81", "http://a.test:81/", True),
        ("a.test:81", "http://a.test/", False),
        ("*.a.test", "http://b.a.test/", True),
        ("*.a.test", "http://c.b.a.test/", True),
        ("*.a.test", "http://a.test/", False),
        ("*.a.test", "http://ba.test/", False),
        ("*.a.test", "http://b.a.test.evil.test/", False),
        ("*", "https://x.test/", True),
        ("*:8080", "http://x.test:8080/", True),
        ("[::1]:80", "http://[::1]/", True),
        ("10.0.0.1", "http://10.0.0.1/", True),
    ],
)
def test_rules(rule, url, allowed):
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    assert Rule.parse(rule).allows(parts.hostname, port, parts.scheme) is allowed


@pytest.mark.parametrize(
    "text", ["", "http://a.test", "a.test/path", "a*.test", "*.*.test", "user@a.test", "a.test:99999", "[::1"]
)
def test_what_is_no_rule(text):
    with pytest.raises(ValueError, match="is no host"):
        Rule.parse(text)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "0.0.0.0",
        "100.64.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1",
        "fc00::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "ff02::1",
        "2001:db8::1",
    ],
)
def test_private_addresses(address, site):
    assert not is_public(address)
    wild = fetcher("*", f"*.test:{site.port}", resolve=lambda host, port: [address])
    fails(wild, f"http://a.test:{site.port}/", "private network")


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses(address):
    assert is_public(address)


def test_a_private_host_must_be_listed_by_name(site):
    site.pages["/"] = (200, {}, b"x")
    url = f"http://intra.test:{site.port}/"
    fails(fetcher(f"*.test:{site.port}"), url, "private network")
    assert site.asked == []
    assert fetcher(f"*.test:{site.port}", f"intra.test:{site.port}").fetch(url) == b"x"


def test_the_address_that_was_checked_is_the_one_that_is_asked(site):
    """A name server that answers otherwise the second time changes nothing: there is no second time."""
    answers = iter([[LOOPBACK], ["203.0.113.1"]])
    site.pages["/"] = (200, {}, b"x")
    where = f"a.test:{site.port}"
    assert fetcher(where, resolve=lambda h, p: next(answers)).fetch(f"http://{where}/") == b"x"


def test_redirects_within_and_out_of_what_is_allowed(site):
    where, port = f"a.test:{site.port}", site.port
    site.pages["/"] = (302, {"location": f"http://b.test:{port}/next"}, b"")
    site.pages["/next"] = (301, {"location": "/last"}, b"")
    site.pages["/last"] = (200, {}, b"x")
    assert fetcher(where, f"b.test:{port}").fetch(f"http://{where}/") == b"x"
    assert [host for host, _ in site.asked] == [where, f"b.test:{port}", f"b.test:{port}"]
    fails(fetcher(where), f"http://{where}/", "may not fetch from 'b.test")
    site.pages["/"] = (307, {"location": "file:///etc/passwd"}, b"")
    fails(fetcher(where), f"http://{where}/", "no http")
    site.pages["/"] = (302, {"location": "/"}, b"")
    fails(fetcher(where), f"http://{where}/", "redirects more than 3 times")


def test_a_redirect_to_a_private_host(site):
    where = f"a.test:{site.port}"
    site.pages["/"] = (302, {"location": f"http://b.test:{site.port}/"}, b"")
    wild = fetcher(where, f"*.test:{site.port}")
    fails(wild, f"http://{where}/", "private network")


def test_size_and_status_and_coding(site):
    where = f"a.test:{site.port}"
    few = fetcher(where, most_bytes=100)
    site.pages["/large"] = (200, {}, b"x" * 101)
    site.pages["/exact"] = (200, {}, b"x" * 100)
    site.pages["/endless"] = (200, {"content-length": None}, b"x" * 1000)
    site.pages["/short"] = (200, {"content-length": "9999"}, b"x")
    site.pages["/zip"] = (200, {"content-encoding": "gzip"}, b"x")
    assert len(few.fetch(f"http://{where}/exact")) == 100
    for path, said in (
        ("/large", "larger than 100"),
        ("/endless", "larger than 100"),
        ("/absent", "answered 404"),
        ("/zip", "'gzip'"),
        ("/short", "early|could not be fetched"),
    ):
        fails(few, f"http://{where}{path}", said)


def test_a_host_that_says_nothing_is_left_in_time(site):
    site.pages["/"] = ("hang", {}, b"")
    where = f"a.test:{site.port}"
    fails(fetcher(where, timeout_s=0.2), f"http://{where}/", "longer than 0.2 s")


@pytest.mark.parametrize("place", ["head", "body", "over tls", "before tls"])
def test_a_host_that_drips_is_left_in_time(place):
    """A byte now and then keeps every single read alive, not the whole."""
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("a.test").configure_cert(server)
    authority.configure_trust(client)
    listener = socket.create_server((LOOPBACK, 0))
    stop = threading.Event()

    def drip():
        link, _ = listener.accept()
        try:
            if place == "before tls":
                stop.wait(30)
            elif place == "over tls":
                link = server.wrap_socket(link, server_side=True)
            link.sendall(b"HTTP/1.1 200 OK\r\n")
            link.sendall(b"content-length: 100000\r\n\r\n" if place == "body" else b"a: b\r\n")
            while not stop.wait(0.02):
                link.sendall(b"x: x\r\n")
        except OSError:
            return
        finally:
            link.close()

    thread = threading.Thread(target=drip)
    thread.start()
    where = f"a.test:{listener.getsockname()[1]}"
    scheme = "https" if "tls" in place else "http"
    try:
        fails(fetcher(where, timeout_s=0.3, trust=client), f"{scheme}://{where}/", "longer than 0.3 s")
    finally:
        stop.set()
        thread.join()
        listener.close()


@pytest.mark.parametrize(
    "url",
    [
        "http://user@a.test/",
        "http://user:pw@a.test/",
        "http:///x",
        "http://a.test:0/",
        "http://a.test:99999/",
        "http://a.test/\r\nX: y",
        "http://a.test/a b",
        "http://ä.test/",
        "http://[::1/",
        "gopher://a.test/",
    ],
)
def test_urls_that_are_not_asked(url):
    fails(fetcher("a.test", "*"), url, "no http")


def test_hosts_that_are_not_there():
    closed = socket.create_server((LOOPBACK, 0))
    port = closed.getsockname()[1]
    closed.close()
    fails(fetcher(f"a.test:{port}"), f"http://a.test:{port}/", "could not be fetched from 'a.test'")

    def unknown(host, port):
        raise socket.gaierror("no such name")

    fails(fetcher("a.test", resolve=unknown), "http://a.test/", "is not known")


def test_tls_is_verified_by_name():
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("a.test").configure_cert(server)
    authority.configure_trust(client)
    site = Site(server)
    site.pages["/"] = (200, {}, b"secret")
    try:
        rules = (f"a.test:{site.port}", f"b.test:{site.port}")
        assert fetcher(*rules, trust=client).fetch(f"https://a.test:{site.port}/") == b"secret"
        fails(fetcher(*rules, trust=client), f"https://b.test:{site.port}/", "certificate")
        fails(fetcher(*rules), f"https://a.test:{site.port}/", "certificate")
    finally:
        site.stop()
