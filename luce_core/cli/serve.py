"""`luce-core serve`."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from luce_core.cli import flags
from luce_core.cli.console import console, say
from luce_core.cli.exposure import check_exposure, server_settings, tls_files
from luce_core.cli.session import Session
from luce_core.errors import EngineError, UsageError

if TYPE_CHECKING:
    import uvicorn

    from luce_core.cli.starting import Planned, Running
    from luce_core.core_options import CoreOptions
    from luce_core.options import Options
    from luce_core.server.connection import Limits

log = logging.getLogger("luce_core.server")

LAST_WORDS_S = 5
"""For writing the ends of answers, after `--drain`."""


def make(session: Session) -> click.Command:
    """The command."""
    text = (
        "Serve a model over HTTP. MODEL is a GGUF file or a name `luce-core pull` lists; without one the "
        "small default model is fetched and served."
    )
    return flags.command("serve", session, serve, text, [flags.model_argument()])


def serve(session: Session, params: dict[str, Any]) -> None:
    """Plan, listen, load, answer, until a signal ends it. A taken port is found before the load."""
    options = session.options(params)
    from luce_core.cli.starting import plan_model
    from luce_core.logs import set_up_logging

    set_up_logging(options.core.log_level)
    check_exposure(options.core)
    planned = plan_model(session, options)
    with listen(options.core.host, options.core.port) as listener:
        scheme = "https" if options.core.tls_cert else "http"
        banner = partial(show_banner, session, planned, f"{scheme}://{_address(listener)}")
        run = _serve_process if options.core.engine_process else _serve_thread
        run(session, options, planned, listener, banner)
    say("Stopped.")


def _serve_thread(
    session: Session, options: Options, planned: Planned, listener: socket.socket, banner: Callable[[], None]
) -> None:
    """The engine on a thread of this process; who connects meanwhile waits."""
    from luce_core.cli.rows import RequestRows
    from luce_core.cli.starting import start

    running = start(session, options, planned, (RequestRows(say),))
    _answer(_server(running, options), running, listener, banner)


def _serve_process(
    session: Session, options: Options, planned: Planned, listener: socket.socket, banner: Callable[[], None]
) -> None:
    """The engine in a process of its own; who connects meanwhile is told how far it is."""
    from luce_core.cli.rows import RequestRows
    from luce_core.cli.starting import loading, start_process

    with ExitStack() as shown:
        progress = shown.enter_context(loading(planned.name))
        front = Front(shown.close, banner)
        running = start_process(
            session,
            options,
            planned,
            (RequestRows(say),),
            on_progress=progress,
            on_ready=front.ready,
            on_failed=front.failed,
        )
        server = _server(running, options)
        front.attach(server)
        _answer(server, running, listener, lambda: None)
    if front.error is not None:
        raise front.error


class Front:
    """What the terminal shows of an engine in another process, told by its supervisor's thread."""

    def __init__(self, loaded: Callable[[], None], banner: Callable[[], None]) -> None:
        self.error: EngineError | None = None
        self._loaded = loaded
        self._banner = banner
        self._answered = False
        self._server: uvicorn.Server | None = None

    def attach(self, server: uvicorn.Server) -> None:
        """The server to end when the engine does not start."""
        self._server = server
        server.should_exit = self.error is not None

    def ready(self) -> None:
        """The banner at first, a line after a restart."""
        self._loaded()
        if self._answered:
            say("The engine answers again.")
        else:
            self._answered = True
            self._banner()

    def failed(self, error: EngineError) -> None:
        """The engine did not start: end the server, and let the command say why."""
        self._loaded()
        self.error = error
        if self._server is not None:
            self._server.should_exit = True


def _answer(
    server: uvicorn.Server, running: Running, listener: socket.socket, banner: Callable[[], None]
) -> None:
    """Serve until a signal ends it."""
    try:
        with _signals(server.handle_exit):  # before the banner: it says that Ctrl-C stops
            banner()
            server.run(sockets=[listener])
    finally:
        running.close(0.0)


@contextmanager
def listen(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket. UsageError names what is in the way."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise UsageError(
            f"Cannot listen on {host}:{port}: {error.strerror or error}. Stop what uses it, or choose "
            "another --port (0 takes any free one)."
        ) from error
    with listener:
        yield listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def show_banner(session: Session, planned: Planned, url: str) -> None:
    """What was composed and where it listens."""
    from luce_core.plan_render import render_plan

    console().print(render_plan(planned.plan, session.registry, verbose=False))
    say(f"Serving {planned.name} at {url}/v1 (OpenAI-compatible); Ctrl-C stops.")


def _server(running: Running, options: Options) -> uvicorn.Server:
    """The HTTP server. Its `handle_exit` ends it; called twice, without waiting for answers."""
    import uvicorn

    from luce_core.server.app import build_app
    from luce_core.server.connection import http_options
    from luce_core.server.tls import server_context

    core = options.core
    config = uvicorn.Config(
        build_app(running.service, server_settings(core)),
        log_level="warning" if core.log_level == "info" else core.log_level,  # our rows say it better
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        **http_options(_limits(core)),
        timeout_graceful_shutdown=round(core.drain) + LAST_WORDS_S,
    )

    class Server(uvicorn.Server):
        """Leaves signals to us: uvicorn raises them again when it is done, which would skip our own end."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            log.info("answering over httptools on %s", type(asyncio.get_running_loop()).__module__)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # Answers end before their connections do: a client hears how, also when `--drain` is over.
            drain = partial(running.close, core.drain)
            threading.Thread(target=drain, name="luce-drain", daemon=True).start()
            await super().shutdown(sockets)

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    files = tls_files(core)
    if files is not None:
        config.load()
        config.ssl = server_context(files)
    return Server(config)


def _limits(core: CoreOptions) -> Limits:
    from luce_core.server.connection import BODIES, Limits
    from luce_core.server.sockets import most_connections

    return Limits(
        connections=core.max_connections or most_connections(),
        bodies_bytes=BODIES * core.body_limit,
        read_s=core.read_timeout,
        idle_s=core.idle_timeout,
        write_s=core.write_timeout,
    )


@contextmanager
def _signals(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
