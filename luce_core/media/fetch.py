"""Fetching images over http(s), from hosts the user allowed and nowhere else.

A name is resolved once and the connection goes to the address that was checked, so that an answer of the
name server cannot change in between. Redirects are checked like first requests. No proxy, no cookies, no
credentials.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from attrs import frozen

from luce_core.errors import RequestError

OPTION = "--allow-image-urls"
MOST_BYTES = 32 * 2**20
TIMEOUT_S = 15.0
"""For everything: resolving, redirects, the last byte."""
MOST_REDIRECTS = 3
PORTS = {"http": 80, "https": 443}
REDIRECTS = frozenset({301, 302, 303, 307, 308})
CHUNK_BYTES = 65536
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

Resolve = Callable[[str, int], Sequence[str]]
"""(host, port) -> addresses."""


@frozen
class Rule:
    """One value of the option: "example.com", "*.example.com", "*", "10.0.0.5:8080", "[::1]:8080"."""

    host: str
    port: int | None
    """None: the usual one of the scheme."""

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Raises ValueError for what is no host."""
        try:
            parts = urlsplit(f"//{text}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ValueError(f"{text!r} is no host ({error})") from None
        bare = (host or "").removeprefix("*.")
        if not host or parts.path or parts.query or parts.username or ("*" in bare and host != "*"):
            raise ValueError(
                f"{text!r} is no host; wanted one such as example.com, *.example.com or [::1]:80"
            )
        return cls(host.lower(), port)

    @property
    def exact(self) -> bool:
        """It names one host, which may then be on a private network."""
        return "*" not in self.host

    def allows(self, host: str, port: int, scheme: str) -> bool:
        """Whether this host and port are meant."""
        if port != (PORTS[scheme] if self.port is None else self.port):
            return False
        if self.host.startswith("*."):
            return host.endswith(self.host[1:])
        return self.host in ("*", host)


class Fetcher:
    """Fetches what its rules allow. Thread-safe; blocks."""

    def __init__(
        self,
        rules: Sequence[Rule],
        *,
        most_bytes: int = MOST_BYTES,
        timeout_s: float = TIMEOUT_S,
        resolve: Resolve | None = None,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        """resolve, trust: for tests; by default those of the system."""
        self.rules = tuple(rules)
        self.most_bytes = most_bytes
        self.timeout_s = timeout_s
        self._resolve = resolve or _addresses
        self._trust = trust

    def fetch(self, url: str) -> bytes:
        """The bytes behind a URL. Raises RequestError without saying whose image it is: the caller does."""
        until = time.monotonic() + self.timeout_s
        for _ in range(1 + MOST_REDIRECTS):
            parts = _parts(url)
            target = self._get(parts, until)
            if isinstance(target, bytes):
                return target
            url = urljoin(url, target)
        raise RequestError(f"its host redirects more than {MOST_REDIRECTS} times")

    def _get(self, parts: SplitResult, until: float) -> bytes | str:
        """The content, or where it is to be found instead."""
        host, port = (parts.hostname or "").lower(), parts.port or PORTS[parts.scheme]
        address = self._address(host, port, parts.scheme)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        try:
            with _connected(address, port, host, until, self._tls(parts.scheme)) as link:
                link.request("GET", path, headers={"Accept": "image/*", "Accept-Encoding": "identity"})
                answer = link.getresponse()
                if answer.status in REDIRECTS and answer.getheader("location"):
                    return str(answer.getheader("location"))
                if answer.status != 200:
                    raise RequestError(f"{host!r} answered {answer.status}; wanted 200")
                return self._content(answer, host, until)
        except (OSError, http.client.HTTPException, ValueError) as error:
            late = time.monotonic() >= until
            why = f"it took longer than {self.timeout_s:g} s" if late else str(error) or type(error).__name__
            raise RequestError(f"it could not be fetched from {host!r}: {why}") from None

    def _content(self, answer: http.client.HTTPResponse, host: str, until: float) -> bytes:
        coding = answer.getheader("content-encoding", "identity")
        if coding.lower() != "identity":
            raise RequestError(f"{host!r} sent it encoded as {coding!r}; wanted it as it is")
        content = bytearray()
        while chunk := answer.read1(CHUNK_BYTES):
            content += chunk
            if len(content) > self.most_bytes:
                raise RequestError(f"it is larger than {self.most_bytes} bytes")
            if time.monotonic() >= until:
                raise TimeoutError
        if time.monotonic() >= until:  # cut off, which looks like an end
            raise TimeoutError
        if answer.length:
            raise RequestError(f"{host!r} ended it {answer.length} bytes early")
        return bytes(content)

    def _tls(self, scheme: str) -> ssl.SSLContext | None:
        return (self._trust or ssl.create_default_context()) if scheme == "https" else None

    def _address(self, host: str, port: int, scheme: str) -> str:
        """An address of the host that may be connected to."""
        rules = [rule for rule in self.rules if rule.allows(host, port, scheme)]
        shown = f"{host}:{port}"
        if not rules:
            allowed = ", ".join(r.host if r.port is None else f"{r.host}:{r.port}" for r in self.rules)
            raise RequestError(
                f"this server may not fetch from {shown!r} ({OPTION} allows {allowed or 'no host'}). "
                "Send the image itself, as a data URL"
            )
        private = any(rule.exact for rule in rules)
        try:
            found = self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise RequestError(f"host {host!r} is not known: {error}") from None
        usable = [address for address in found if private or is_public(address)]
        if not usable:
            raise RequestError(
                f"host {host!r} is on a private network, which only {OPTION} {shown} would allow"
            )
        return usable[0]


def _parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in PORTS and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        parts, usable = SplitResult("", "", "", "", ""), False
    if not usable or parts.username is not None or any(ord(char) <= 32 or ord(char) > 126 for char in url):
        raise RequestError(f"{url[:80]!r} is no http(s) URL of a host without a user name")
    return parts


def is_public(address: str) -> bool:
    """Whether an address is of the public internet, those that carry another inside by both."""
    found = ipaddress.ip_address(address)
    inner: list[ipaddress.IPv4Address | None] = []
    if isinstance(found, ipaddress.IPv6Address):
        inner += [found.ipv4_mapped, found.sixtofour, *(found.teredo or ())]
        if found in NAT64:
            inner.append(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF))
    within = [one for one in inner if one is not None]
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        return is_public(str(found.ipv4_mapped))
    return found.is_global and not found.is_multicast and all(is_public(str(one)) for one in within)


def _addresses(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(item[4][0]).partition("%")[0] for item in found]


@contextmanager
def _connected(
    address: str, port: int, host: str, until: float, tls: ssl.SSLContext | None
) -> Iterator[http.client.HTTPConnection]:
    """A connection to `address` that speaks to `host`, cut off at `until` whatever the other side does."""
    left = max(0.001, until - time.monotonic())
    raw: Any = socket.create_connection((address, port), timeout=left)
    if tls is not None:
        raw = tls.wrap_socket(raw, server_hostname=host, do_handshake_on_connect=False)
    cut = threading.Timer(max(0.0, until - time.monotonic()), _cut, (raw,))
    cut.daemon = True
    cut.start()
    try:
        if tls is not None:
            raw.do_handshake()
        usual = port == PORTS["http" if tls is None else "https"]
        shown = f"[{host}]" if ":" in host else host
        link = http.client.HTTPConnection(shown if usual else f"{shown}:{port}")
        link.sock = raw
        link.auto_open = 0
        yield link
    finally:
        cut.cancel()
        raw.close()


def _cut(raw: socket.socket) -> None:
    try:
        socket.socket.shutdown(raw, socket.SHUT_RDWR)  # of a TLS socket too: the wire, no parting words
    except OSError:  # it ended by itself just now
        return
