"""Who may reach the server: addresses, keys, certificates, names."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

from luce_core.cli.console import warn
from luce_core.core_options import CoreOptions
from luce_core.errors import UsageError

if TYPE_CHECKING:
    from luce_core.server.settings import ServerSettings
    from luce_core.server.tls import TlsFiles


def check_exposure(core: CoreOptions) -> None:
    """Beyond this machine only with a key or client certificates, unless the user insists, and then with a
    warning. Raises UsageError, also for keys and certificates that cannot be used.
    """
    from luce_core.server.tls import load_context

    files = tls_files(core)
    if files is not None:
        load_context(files)
    if api_keys(core) or core.tls_client_ca or is_loopback(core.host):
        return
    alone = " TLS alone keeps nobody out." if files else ""
    if not core.insecure:
        raise UsageError(
            f"--host {core.host} lets other machines in, and no key guards the server.{alone} Set "
            "--api-key (or LUCE_API_KEY) or --api-key-file, ask for client certificates with "
            "--tls-client-ca, stay on 127.0.0.1, or say --insecure if the network is trusted."
        )
    warn(
        f"Warning: everyone who reaches {core.host}:{core.port} can use this server: it asks for no key and "
        f"no client certificate (--insecure).{alone}"
    )


def api_keys(core: CoreOptions) -> tuple[str, ...]:
    """The keys of the options and of their file. UsageError when the file cannot be read or holds none, or
    a key is empty.
    """
    from luce_core.server.auth import read_key_file

    if any(not key.strip() for key in core.api_key):
        raise UsageError("An API key is empty (--api-key or LUCE_API_KEY). Give one, or leave it unset.")
    return (*core.api_key, *(read_key_file(core.api_key_file) if core.api_key_file else ()))


def tls_files(core: CoreOptions) -> TlsFiles | None:
    """The files of the options; None without TLS. UsageError for one that makes no sense alone."""
    from luce_core.server.tls import TlsFiles

    if core.tls_cert is not None:
        return TlsFiles(core.tls_cert, core.tls_key, core.tls_key_password_file, core.tls_client_ca)
    for flag, given in (
        ("--tls-key", core.tls_key),
        ("--tls-key-password-file", core.tls_key_password_file),
        ("--tls-client-ca", core.tls_client_ca),
    ):
        if given is not None:
            raise UsageError(f"{flag} is set and --tls-cert is not. Give the server's certificate too.")
    return None


def server_settings(core: CoreOptions) -> ServerSettings:
    """What the HTTP front is told."""
    from luce_core.server.settings import ServerSettings

    return ServerSettings(
        api_keys=core.api_key,
        api_key_file=core.api_key_file,
        allowed_hosts=host_names(core),
        cors_origins=core.cors_origin,
        body_limit_bytes=core.body_limit,
        request_timeout_s=core.request_timeout or None,
        strict_model=core.strict_model,
        tls=core.tls_cert is not None,
    )


def host_names(core: CoreOptions) -> tuple[str, ...]:
    """Names that mean this server: those the user gave, and where other machines come in, its own."""
    return (*core.allowed_host, core.host, *(() if is_loopback(core.host) else (socket.gethostname(),)))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
