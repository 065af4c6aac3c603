"""What the HTTP front is told once, at start-up."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

BODY_LIMIT_BYTES = 32 << 20


@frozen
class ServerSettings:
    api_keys: tuple[str, ...] = ()
    """None, and none in a file: everything is open."""
    api_key_file: Path | None = None
    """More keys, one per line; read again when it changes."""
    allowed_hosts: tuple[str, ...] = ()
    """Names under which the server may be called beside localhost and addresses; "*" for any. Looked at only
    where neither a key nor TLS keeps pages of other sites out.
    """
    cors_origins: tuple[str, ...] = ()
    """Web origins whose pages may call; "*" for any."""
    body_limit_bytes: int = BODY_LIMIT_BYTES
    request_timeout_s: float | None = None
    """Longest a request may take; its own `timeout` may be shorter. None = any."""
    strict_model: bool = False
    """Refuse requests that name another model."""
    tls: bool = False
    """The server speaks TLS itself."""
