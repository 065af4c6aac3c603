"""From options to a running engine: what `serve`, `run` and `plan` share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, frozen

from luce_core.catalog import DEFAULT_MODEL
from luce_core.cli.console import errors, warn
from luce_core.cli.session import Session
from luce_core.contracts import (
    BackendPlan,
    ChatFormat,
    DeviceInfo,
    GenerationChannel,
    RequestRecord,
    SamplingParams,
    Thinking,
)
from luce_core.errors import EngineError, UsageError
from luce_core.options import Options
from luce_core.pipeline import Observers
from luce_core.plan import block_formats, make_plan, suppliers
from luce_core.plan_media import media_processor
from luce_core.registry import Registry, Supplied

if TYPE_CHECKING:
    from luce_core.core_options import CoreOptions
    from luce_core.engine.engine import LuceEngine
    from luce_core.gguf import GgufHeader
    from luce_core.media.fetch import Rule
    from luce_core.media.reader import ImageReader
    from luce_core.pipeline import Pipeline
    from luce_core.server.service import GenerationService, ModelFace
    from luce_core.text import Tokenizer

Observer = Callable[[RequestRecord], None]


@frozen
class Planned:
    """A model that was found and a plan that fits; nothing is loaded yet."""

    path: Path
    name: str
    """What clients call the model."""
    header: GgufHeader
    plan: BackendPlan


@define(eq=False)
class Running:
    """A model that answers, or will when it is loaded."""

    channel: GenerationChannel
    service: GenerationService
    stopping: Callable[[], None]
    """Tells the plugins of this process that the engine ends."""
    _told: bool = False

    def close(self, drain_s: float) -> None:
        """Let running answers go on for `drain_s` seconds, then end everything. Blocks. Another call, from
        another thread while the first one waits, may give them less.
        """
        if not self._told:
            self._told = True
            self.stopping()
        self.channel.close(drain_s)


def plan_model(
    session: Session, options: Options, devices: Sequence[DeviceInfo] | None = None
) -> Planned:
    """Find the model (pulling it if it is a name) and plan it. Raises PlanError with every problem.

    devices: in place of those that are there.
    """
    from luce_core.gguf import read_header

    image_hosts(options.core)  # a typing error should cost nobody a load
    path = session.model_path(options)
    header = read_header(path, block_formats(session.registry))
    named = options.core.model or DEFAULT_MODEL
    name = options.core.alias or (named if named in session.catalog.names else path.stem)
    return Planned(path, name, header, make_plan(options, header, session.registry, devices))


def load(planned: Planned, registry: Registry) -> tuple[Pipeline, LuceEngine]:
    """Load the model and warm up; no request runs yet. Whoever steps the engine tells the observers."""
    with loading(planned.name) as progress:
        from luce_core.compose import compose
        from luce_core.engine.engine import LuceEngine
        from luce_core.engine.warming import warm

        pipeline = compose(planned.plan, registry, progress=progress)
        engine = LuceEngine(pipeline)
        if planned.plan.values["engine.warmup"]:
            warm(engine, progress)
        return pipeline, engine


def start(
    session: Session, options: Options, planned: Planned, observers: Sequence[Observer] = ()
) -> Running:
    """Load the model here and start the engine's thread. `observers` see every finished request."""
    pipeline, engine = load(planned, session.registry)
    from luce_core.engine.local import LocalChannel

    channel = LocalChannel(engine, max_queue=_max_unfinished(options))
    pipeline.observers.engine_started(pipeline)
    service = _service(session, options, planned, channel, observers)
    return Running(channel, service, lambda: pipeline.observers.engine_stopping(pipeline))


def start_process(
    session: Session,
    options: Options,
    planned: Planned,
    observers: Sequence[Observer] = (),
    *,
    on_progress: Callable[[int, int], None] | None,
    on_ready: Callable[[], None],
    on_failed: Callable[[EngineError], None],
) -> Running:
    """Start a process that loads the model; requests are refused until it has. The callbacks are those of
    `SupervisedChannel`.
    """
    from luce_core.supervision.messages import Boot
    from luce_core.supervision.supervised import SupervisedChannel

    channel = SupervisedChannel(
        Boot(planned.plan, session.make_registry, log_level=options.core.log_level),
        max_queue=_max_unfinished(options),
        step_timeout_s=options.core.step_timeout,
        on_progress=on_progress or (lambda done, total: None),
        on_ready=on_ready,
        on_failed=on_failed,
    )
    return Running(channel, _service(session, options, planned, channel, observers), lambda: None)


def _max_unfinished(options: Options) -> int:
    return options.core.queue_limit + options.core.max_sequences


def _service(
    session: Session,
    options: Options,
    planned: Planned,
    channel: GenerationChannel,
    observers: Sequence[Observer],
) -> GenerationService:
    from luce_core.server.service import GenerationService

    face = _face(options, planned, session.registry)
    if face.template.notice and not face.chat.renders:
        warn(face.template.notice)
    finished = Observers.of(session.registry).request_finished
    return GenerationService(
        channel,
        face,
        (*observers, finished),
        heartbeat_s=options.core.keepalive or None,
        max_answers=_max_unfinished(options),
    )


def template_kwargs(options: Options, chat: ChatFormat) -> Mapping[str, Any]:
    """What the option `thinking` tells the chat template."""
    wish = {"auto": None, "on": True, "off": False}[options.core.thinking]
    return chat.template_kwargs(Thinking(wish))


def _face(options: Options, planned: Planned, registry: Registry) -> ModelFace:
    from luce_core.compose_chat import compose_chat
    from luce_core.server.service import ModelFace
    from luce_core.text import ChatTemplate, Tokenizer

    core, spec = options.core, planned.plan.models[0].spec
    tokenizer = Tokenizer.from_metadata(planned.header.metadata)
    template = ChatTemplate.from_metadata(template_metadata(planned.header.metadata, core.chat_template_file))
    chat = compose_chat(planned.plan, registry, tokenizer, template)
    return ModelFace(
        id=planned.name,
        context=planned.plan.number("context"),
        tokenizer=tokenizer,
        template=template,
        chat=chat,
        created=int(time.time()),
        defaults=evolve(
            SamplingParams(),
            temperature=core.temperature,
            top_p=core.top_p,
            top_k=core.top_k,
            min_p=core.min_p,
            repetition=core.repetition_penalty,
        ),
        parts=tuple(_part(key, found) for key, found in suppliers(planned.plan, registry).items()),
        max_tokens=core.max_tokens or None,
        images=image_reader(options, planned.plan, registry, tokenizer),
        template_kwargs=template_kwargs(options, chat),
        details={
            "architecture": spec.arch,
            "n_params": spec.parameters,
            "size": spec.weight_bytes,
            "n_ctx_train": spec.context,
            "n_vocab": spec.vocab,
        },
    )


def _part(key: str, found: Supplied[Any]) -> dict[str, str]:
    kind, _, name = key.partition(".")
    equivalence = getattr(found.value, "equivalence", None)
    answers = "the model itself" if equivalence is None else equivalence.value
    return {"kind": kind, "name": name, "plugin": found.plugin, "answers": answers}


def image_reader(
    options: Options, plan: BackendPlan, registry: Registry, tokenizer: Tokenizer
) -> ImageReader | None:
    """What reads the images of requests; None where the plan has no encoder."""
    processor = media_processor(plan, registry)
    if processor is None:
        return None
    from luce_core.media.fetch import Fetcher
    from luce_core.media.reader import ImageReader

    core = options.core
    placeholder = tokenizer.token_id(processor.placeholder)
    if placeholder is None:
        raise AssertionError(f"planned with a tokenizer that has no {processor.placeholder!r}")
    rules = image_hosts(core)
    return ImageReader(
        processor,
        placeholder,
        max_images=core.max_images,
        fetcher=Fetcher(rules) if rules else None,
    )


def image_hosts(core: CoreOptions) -> tuple[Rule, ...]:
    """Hosts images may be fetched from. UsageError for what is none."""
    from luce_core.media.fetch import OPTION, Rule

    try:
        return tuple(Rule.parse(text) for text in core.allow_image_urls)
    except ValueError as error:
        raise UsageError(f"{OPTION}: {error}.") from None


def template_metadata(metadata: Mapping[str, Any], chosen: Path | None) -> Mapping[str, Any]:
    """The file's metadata, with the user's template in place of every variant of its own."""
    if chosen is None:
        return metadata
    rest = {key: metadata[key] for key in metadata if not key.startswith("tokenizer.chat_template")}
    return {**rest, "tokenizer.chat_template": _read_template(chosen)}


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"Chat template file {str(path)!r} cannot be read: {error}.") from error


@contextmanager
def loading(name: str) -> Iterator[Callable[[int, int], None] | None]:
    """A status line while the model loads; nothing where nobody watches."""
    shown = errors()
    if not shown.is_terminal:
        yield None
        return
    with shown.status(f"Loading {name} ...") as status:
        yield lambda done, total: status.update(f"Loading {name}: {100 * done // max(total, 1)} %")
