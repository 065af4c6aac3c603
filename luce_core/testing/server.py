"""A real HTTP server over a test's pipeline: real sockets, so that real clients can be tried."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from attrs import frozen

from luce_core.contracts import ChatContext, ChatFormat, GenerationChannel, RequestRecord, SamplingParams
from luce_core.engine.engine import LuceEngine
from luce_core.engine.local import LocalChannel
from luce_core.media import ImageReader
from luce_core.pipeline import Pipeline
from luce_core.server.app import build_app
from luce_core.server.connection import Limits, http_options
from luce_core.server.service import HEARTBEAT_S, GenerationService, ModelFace
from luce_core.server.settings import ServerSettings
from luce_core.server.tls import TlsFiles, server_context
from luce_core.text import ChatTemplate
from luce_core.text.chat_formats import auto


@frozen
class Served:
    """A running server."""

    url: str
    """http://127.0.0.1:PORT, or https where `tls` was given"""
    service: GenerationService
    channel: GenerationChannel
    records: list[RequestRecord]
    server: uvicorn.Server

    @property
    def engine(self) -> LuceEngine:
        """The engine in this process."""
        if not isinstance(self.channel, LocalChannel):
            raise AssertionError(f"{self.channel!r} has no engine in this process")
        return self.channel.engine


def on_a_thread(pipeline: Pipeline, max_queue: int) -> GenerationChannel:
    """The channel `serving` makes unless it is given another maker."""
    return LocalChannel(LuceEngine(pipeline), max_queue=max_queue)


@contextmanager
def serving(
    pipeline: Pipeline,
    *,
    model: str = "toy",
    settings: ServerSettings | None = None,
    max_queue: int = 64,
    defaults: SamplingParams | None = None,
    wrap: Callable[[Any], Any] | None = None,
    channel: Callable[[Pipeline, int], GenerationChannel] = on_a_thread,
    limits: Limits | None = None,
    heartbeat_s: float | None = HEARTBEAT_S,
    max_answers: int | None = None,
    tls: TlsFiles | None = None,
    chat: ChatFormat | None = None,
    images: ImageReader | None = None,
    **config: Any,
) -> Iterator[Served]:
    """Serve `pipeline` on a free port of the loopback until the block ends.

    wrap: middleware of the test. channel: from the pipeline and the queue's length. chat: None = what the
    file shows. config: for uvicorn.
    """
    made = channel(pipeline, max_queue)
    tokenizer = pipeline.target.tokenizer
    template = ChatTemplate.from_metadata(_metadata(pipeline))
    context = ChatContext(None, tokenizer, template.all_source, not template.fallback)
    face = ModelFace(
        id=model,
        context=pipeline.plan.number("context"),
        tokenizer=tokenizer,
        template=template,
        chat=auto(context) if chat is None else chat,
        images=images,
        created=1_700_000_000,
        defaults=defaults or SamplingParams(),
    )
    records: list[RequestRecord] = []
    service = GenerationService(made, face, (records.append,), heartbeat_s, max_answers)
    app: Any = build_app(service, settings)
    options = {"port": 0, "log_level": "error", "lifespan": "off", "server_header": False, **config}
    options |= http_options(limits or Limits())
    configured = uvicorn.Config(wrap(app) if wrap else app, **options)
    if tls is not None:
        configured.load()
        configured.ssl = server_context(tls)
    server = _Server(configured)
    thread = threading.Thread(target=server.run, name="luce-test-server")
    thread.start()
    if not server.ready.wait(30):
        raise AssertionError("the test server did not start within 30 s")
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        scheme = "http" if tls is None else "https"
        yield Served(f"{scheme}://127.0.0.1:{port}", service, made, records, server)
    finally:
        server.should_exit = True
        thread.join()
        made.close(0.0)


def _metadata(pipeline: Pipeline) -> Any:
    from luce_core.gguf import read_header

    return read_header(pipeline.plan.models[0].path).metadata


class _Server(uvicorn.Server):
    """Says when it listens, and leaves signals alone: it runs beside a test."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
