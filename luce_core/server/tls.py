"""TLS: certificates read from PEM files, complained about in words, and read again when they are renewed."""

from __future__ import annotations

import logging
import re
import ssl
from datetime import UTC, datetime
from pathlib import Path

from attrs import define, field, frozen

from luce_core.errors import UsageError

log = logging.getLogger("luce_core.server")

CERTIFICATE = "-----BEGIN CERTIFICATE-----"
PRIVATE_KEY = re.compile(r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----")
LEAF = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)


@frozen
class TlsFiles:
    """Where the server's certificate lies, and what it asks of clients."""

    cert: Path
    """PEM: the certificate, then those that lead to its authority."""
    key: Path | None = None
    """PEM; None: in the file of the certificate."""
    password_file: Path | None = None
    """First line: the password of an encrypted key."""
    client_ca: Path | None = None
    """PEM: authorities of client certificates, which are then required; None: anybody may connect."""

    def all(self) -> tuple[Path, ...]:
        """The files there are."""
        found = (self.cert, self.key, self.password_file, self.client_ca)
        return tuple(path for path in found if path is not None)


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """What a server socket needs. Renewed files are used from the next handshake on; files that do not fit
    together change nothing and are logged.

    Raises UsageError naming the file that is wrong.
    """
    renewal = Renewal(files)
    context = renewal.context
    warn_of_dates(files.cert)

    def choose(connection: ssl.SSLObject, name: str | None, asked: ssl.SSLContext) -> None:
        connection.context = renewal.current()

    context.sni_callback = choose  # called in every handshake, whether or not the client names a server
    return context


@define
class Renewal:
    """The context of the files as they are now."""

    files: TlsFiles
    context: ssl.SSLContext = field(init=False)
    _seen: tuple[object, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._seen = self._signature()  # before the files are read: a change meanwhile is seen later
        self.context = load_context(self.files)

    def current(self) -> ssl.SSLContext:
        """The newest good one."""
        now = self._signature()
        if now != self._seen:
            self._seen = now
            try:
                self.context = load_context(self.files)
            except UsageError as error:
                log.warning("%s The certificate read before stays in use.", error)
            else:
                log.info("the certificate was read again from %s", self.files.cert)
                warn_of_dates(self.files.cert)
        return self.context

    def _signature(self) -> tuple[object, ...]:
        return tuple(_state(path) for path in self.files.all())


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def load_context(files: TlsFiles) -> ssl.SSLContext:
    """The files as they are now. Raises UsageError naming the one that is wrong."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    _load_certificate(context, files)
    if files.client_ca is not None:
        _load_authorities(context, files.client_ca)
    return context


def _load_certificate(context: ssl.SSLContext, files: TlsFiles) -> None:
    text = _read(files.cert, "--tls-cert")
    if CERTIFICATE not in text:
        raise UsageError(
            f"--tls-cert {str(files.cert)!r} holds no certificate. Wanted PEM: {CERTIFICATE} ..."
        )
    key = files.key or files.cert
    flag = "--tls-key" if files.key else "--tls-cert"
    key_text = _read(key, flag)
    if not PRIVATE_KEY.search(key_text):
        more = "" if files.key else " Say where it is with --tls-key."
        raise UsageError(f"{flag} {str(key)!r} holds no private key. Wanted PEM.{more}")
    encrypted = "ENCRYPTED" in key_text
    if encrypted and files.password_file is None:
        raise UsageError(f"{flag} {str(key)!r} is encrypted. Give its password with --tls-key-password-file.")
    password = _password(files.password_file) if files.password_file else ""
    try:
        context.load_cert_chain(files.cert, key, password)
    except ssl.SSLError as error:
        raise UsageError(_complaint(error, files.cert, key, flag, encrypted)) from error


def _complaint(error: ssl.SSLError, cert: Path, key: Path, flag: str, encrypted: bool) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return (
            f"{flag} {str(key)!r} is not the key of the certificate in {str(cert)!r}. Give the pair of both."
        )
    if encrypted:
        return f"{flag} {str(key)!r} cannot be opened with the password in --tls-key-password-file: {error}."
    if error.reason in ("EE_KEY_TOO_SMALL", "CA_KEY_TOO_SMALL", "CA_MD_TOO_WEAK"):
        return f"--tls-cert {str(cert)!r} is too weak for TLS today ({error.reason}). Make a new one."
    return f"--tls-cert {str(cert)!r} and its key {str(key)!r} cannot be used: {error}. Wanted PEM files."


def _password(path: Path) -> str:
    lines = _read(path, "--tls-key-password-file").splitlines()
    if not lines or not lines[0]:
        raise UsageError(
            f"--tls-key-password-file {str(path)!r} is empty. Write the password on its first line."
        )
    return lines[0]


def _load_authorities(context: ssl.SSLContext, path: Path) -> None:
    if CERTIFICATE not in _read(path, "--tls-client-ca"):
        raise UsageError(f"--tls-client-ca {str(path)!r} holds no certificate. Wanted PEM: {CERTIFICATE} ...")
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise UsageError(f"--tls-client-ca {str(path)!r} cannot be used: {error}. Wanted PEM.") from error
    context.verify_mode = ssl.CERT_REQUIRED
    # Nobody resumes a session that an authority no longer in the file had opened.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0


def _read(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{flag} {str(path)!r} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError:
        raise UsageError(
            f"{flag} {str(path)!r} is not PEM, which is text; it may be DER: convert it with "
            "`openssl x509 -inform der` or `openssl pkey -inform der`."
        ) from None


def warn_of_dates(path: Path) -> None:
    """Log when the first certificate of a file that could be loaded is not valid now."""
    leaf = LEAF.search(_read(path, "--tls-cert"))
    if leaf is None:
        return  # replaced since: the next handshake looks at it
    begins, ends = validity(ssl.PEM_cert_to_DER_cert(leaf[0]))
    now = datetime.now(UTC)
    if now > ends:
        log.warning("The certificate in %r expired on %s; clients will refuse it.", str(path), ends.date())
    elif now < begins:
        log.warning("The certificate in %r is not valid before %s.", str(path), begins.isoformat(" "))


# --- the one thing the ssl module does not tell about a certificate of our own


def validity(der: bytes) -> tuple[datetime, datetime]:
    """From when and until when a certificate counts (X.509, RFC 5280 section 4.1)."""
    certificate = _element(der, 0)[1]
    fields = _elements(_element(certificate, 0)[1])
    if fields[0][0] == 0xA0:  # the version, which old certificates leave out
        fields = fields[1:]
    begins, ends = _elements(fields[3][1])  # after serial number, algorithm and issuer
    return _time(*begins), _time(*ends)


def _elements(data: bytes) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    at = 0
    while at < len(data):
        tag, content, at = _element(data, at)
        found.append((tag, content))
    return found


def _element(data: bytes, at: int) -> tuple[int, bytes, int]:
    """(tag, content, where the next begins) of the DER element at `at`."""
    tag, size, at = data[at], data[at + 1], at + 2
    if size & 0x80:
        digits = size & 0x7F
        size, at = int.from_bytes(data[at : at + digits], "big"), at + digits
    return tag, data[at : at + size], at + size


def _time(tag: int, content: bytes) -> datetime:
    text = content.decode("ascii").removesuffix("Z")
    if tag == 0x17:  # UTCTime has two digits for the year
        text = ("19" if int(text[:2]) >= 50 else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%S").replace(tzinfo=UTC)
