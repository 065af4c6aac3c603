"""API keys: checked before the body is read, compared in constant time, read anew when the file changes."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from luce_core.errors import RequestError, UsageError
from luce_core.server.errors import error_response

log = logging.getLogger("luce_core.server")

OPEN_PATHS = frozenset({"/health", "/ready"})
TENANT_DIGITS = 12


class KeyRing:
    """The keys that open the server: given ones, and those of a file as it is now.

    A file that cannot be read any more, or holds no key, changes nothing: the last good keys stay.
    """

    def __init__(self, keys: Sequence[str], file: Path | None = None) -> None:
        """Raises UsageError when the file cannot be read or holds no key."""
        self._salt = secrets.token_bytes(16)
        self._given = tuple(keys)
        self._file = file
        self._seen = _signature(file) if file else None
        self._digests = self._read()

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant(self, offered: Sequence[bytes]) -> str | None:
        """The anonymous tag of the first valid key among `offered`; None when none is valid.

        The tag is stable within this process and says nothing about the key.
        """
        self._refresh()
        found = None
        for key in offered:
            digest = self._digest(key)
            # Every key is compared, so that timing tells nothing about which one was near.
            equal = [hmac.compare_digest(digest, one) for one in self._digests]
            if any(equal) and found is None:
                found = digest.hex()[:TENANT_DIGITS]
        return found

    def _refresh(self) -> None:
        if self._file is None or (now := _signature(self._file)) == self._seen:
            return
        self._seen = now
        try:
            self._digests = self._read()
        except UsageError as error:
            log.warning("%s The keys read before stay in force.", error)
        else:
            log.info("keys were read again from %s", self._file)

    def _read(self) -> tuple[bytes, ...]:
        keys = (*self._given, *(read_key_file(self._file) if self._file else ()))
        return tuple(self._digest(key.encode()) for key in keys)

    def _digest(self, key: bytes) -> bytes:
        return hashlib.sha256(self._salt + key).digest()


def read_key_file(path: Path) -> tuple[str, ...]:
    """One key per line; blank lines and lines that begin with # are skipped. Raises UsageError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"Key file {str(path)!r} cannot be read: {error}.") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys:
        raise UsageError(f"Key file {str(path)!r} holds no key. Write one per line.")
    return keys


def _signature(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file does; None when it is not there."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


class ApiKeys:
    """ASGI middleware. No keys: everything is open.

    Sets the state `tenant`: the tag of the key a request came with, "" for none.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        tenant = self.keys.tenant(_offered(scope)) if self.keys else None
        if self.keys and tenant is None and scope["path"] not in OPEN_PATHS:
            error = RequestError(
                "No valid API key. Send one as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.", status=401
            )
            await error_response(error)(scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = tenant or ""
        await self.app(scope, receive, send)


def _offered(scope: Scope) -> list[bytes]:
    """The keys a request brings, as the bytes that came."""
    headers = Headers(scope=scope)
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    keys = [bearer.strip()] if scheme.lower() == "bearer" else []
    keys += [headers["x-api-key"]] if "x-api-key" in headers else []
    return [key.encode("latin-1") for key in keys]  # how header bytes were decoded
