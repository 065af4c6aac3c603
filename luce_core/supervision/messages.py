"""What the server's process and the engine's say to each other: frozen values, pickled over a socket pair.

The plan crosses, not the environment: everything the engine is built from is in `Boot`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import frozen

from luce_core.contracts import BackendPlan, EngineEvent, GenerationRequest
from luce_core.registry import Registry

# --- to the engine


@frozen
class Boot:
    """The first message, and all a start needs."""

    plan: BackendPlan
    make_registry: Callable[[], Registry]
    """Called in the engine's process: a registry holds imported plugins and cannot cross by itself."""
    beat_s: float = 0.25
    log_level: str = "info"


@frozen
class Submit:
    request: GenerationRequest


@frozen
class Cancel:
    request: str


@frozen
class Close:
    """Cancel what runs, tell the plugins, end the process."""


Command = Submit | Cancel | Close

# --- from the engine


@frozen
class Loading:
    done: int
    total: int
    """Bytes of weights."""


@frozen
class Ready:
    """Requests are answered from now on."""


@frozen
class Events:
    """In the order the engine made them; several requests' may be mixed."""

    events: tuple[EngineEvent, ...]


@frozen
class Beat:
    """Sent every `beat_s` by a thread of its own: a step that hangs does not stop it."""

    turns: int
    """Turns of the engine's loop that are over."""
    busy: bool
    """Requests are unfinished. Only a busy engine whose turns do not end is stuck."""
    stats: Mapping[str, float]


@frozen
class Failed:
    """The engine could not be started, or has stopped; the process ends. message: what the user reads."""

    message: str


Report = Loading | Ready | Events | Beat | Failed
