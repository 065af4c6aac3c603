"""What the HTTP front is told once, at start-up."""

from __future__ import annotations

from attrs import frozen

BODY_LIMIT_BYTES = 32 << 20


@frozen
class ServerSettings:
    api_keys: tuple[str, ...] = ()
    """None: everything is open."""
    cors_origins: tuple[str, ...] = ()
    """Web origins whose pages may call; "*" for any."""
    body_limit_bytes: int = BODY_LIMIT_BYTES
    strict_model: bool = False
    """Refuse requests that name another model."""
