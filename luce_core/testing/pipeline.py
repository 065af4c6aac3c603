"""Whole pipelines and engines for tests: discover → plan → compose as in `serve`, over modules named here
and nothing that happens to be installed.
"""

from __future__ import annotations

import importlib
import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from luce_core.compose import compose
from luce_core.contracts import (
    API,
    BackendPlan,
    Done,
    Drafter,
    DrafterContext,
    EngineEvent,
    Equivalence,
    GenerationRequest,
    PartSpec,
    PluginInfo,
    SamplingParams,
    TokenLogprob,
    Tokens,
)
from luce_core.engine.engine import LuceEngine
from luce_core.gguf import read_header
from luce_core.hookspecs import hookimpl
from luce_core.options import load_options
from luce_core.pipeline import Pipeline
from luce_core.plan import make_plan
from luce_core.plugins import from_modules
from luce_core.registry import Registry

TOY_HOOKS = "luce_core.testing.toy.hooks"
GREEDY = SamplingParams(temperature=0.0)


SCRIPTED = SimpleNamespace()
"""Factories of drafters that only exist in a test, by name: what their `PartSpec`s point at."""


def registry_of(*hooks: str) -> Registry:
    """A registry of these modules of hooks; with `functools.partial` one that another process can make."""
    return from_modules([importlib.import_module(name) for name in hooks or (TOY_HOOKS,)])


def make_test_plan(path: Path, *hooks: str, options: Mapping[str, Any] | None = None) -> BackendPlan:
    """The plan of `path` with these modules of hooks. options: by name, as on the command line."""
    registry = registry_of(*hooks)
    loaded = load_options(registry, {"model": str(path), **(options or {})}, {}, ())
    return make_plan(loaded, read_header(path), registry)


def make_pipeline(
    path: Path, *hooks: str, options: Mapping[str, Any] | None = None, drafters: Sequence[Drafter] = ()
) -> Pipeline:
    """A pipeline for `path` from these modules of hooks. options: by name, as on the command line.

    drafters: instances to use; they become parts of a plugin of their own, planned and composed like any.
    """
    modules = [importlib.import_module(name) for name in hooks or (TOY_HOOKS,)]
    options = {"threads": 1, **(options or {})}  # tiny tensors: more only wait for each other
    if drafters:
        modules.append(_plugin_of(drafters))
        options["drafter"] = tuple(drafter.name for drafter in drafters)
    registry = from_modules(modules)
    loaded = load_options(registry, {"model": str(path), **options}, {}, ())
    return compose(make_plan(loaded, read_header(path), registry), registry)


def _plugin_of(drafters: Sequence[Drafter]) -> Any:
    """A module of hooks that declares these instances."""
    specs = []
    for drafter in drafters:
        setattr(SCRIPTED, drafter.name, partial(_given, drafter))
        specs.append(
            PartSpec("drafter", drafter.name, f"{__name__}:SCRIPTED.{drafter.name}", Equivalence.BITS)
        )
    module: Any = ModuleType("luce_scripted_hooks")
    module.luce_plugin_info = hookimpl(lambda: PluginInfo(name="scripted-drafters", api=API))
    module.luce_register_drafters = hookimpl(lambda: specs)
    return module


def _given(drafter: Drafter, context: DrafterContext) -> Drafter:
    return drafter


class Answer:
    """What became of one request."""

    def __init__(self) -> None:
        self.events: list[EngineEvent] = []

    @property
    def ids(self) -> list[int]:
        return [token for event in self.events if isinstance(event, Tokens) for token in event.ids]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [entry for event in self.events if isinstance(event, Tokens) for entry in event.logprobs]

    @property
    def done(self) -> Done:
        """The one `Done`, which must be the last event."""
        ends = [event for event in self.events if isinstance(event, Done)]
        if len(ends) != 1 or self.events[-1] is not ends[0]:
            raise AssertionError(f"wanted one Done, at the end; events: {self.events}")
        return ends[0]

    @property
    def is_done(self) -> bool:
        return any(isinstance(event, Done) for event in self.events)


class Receiver(Answer):
    """What becomes of a request that a channel answers on a thread of its own: the sink to submit it with."""

    LIMIT_S = 60.0

    def __init__(self) -> None:
        super().__init__()
        self._begun = threading.Event()
        self._ended = threading.Event()

    def __call__(self, event: EngineEvent) -> None:
        self.events.append(event)
        if isinstance(event, Tokens):
            self._begun.set()
        elif isinstance(event, Done):
            self._ended.set()

    def wait_begun(self) -> None:
        """Until there are tokens."""
        self._wait(self._begun, "token")

    def wait(self) -> Done:
        """Until it is over."""
        self._wait(self._ended, "Done")
        return self.done

    def _wait(self, what: threading.Event, name: str) -> None:
        if not what.wait(self.LIMIT_S):
            raise AssertionError(f"no {name} within {self.LIMIT_S:g} s; events: {self.events}")


class EngineRig:
    """An engine stepped by the test, on the test's own thread."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.engine = LuceEngine(pipeline)
        self._ids = itertools.count()

    def submit(
        self, prompt: Iterable[int], max_tokens: int = 16, params: SamplingParams = GREEDY, **more: Any
    ) -> Answer:
        """Queue a request; its answer fills while the engine steps."""
        answer = Answer()
        request = GenerationRequest(f"r{next(self._ids)}", tuple(prompt), max_tokens, params, **more)
        self.engine.submit(request, answer.events.append)
        return answer

    def run(self, most_steps: int = 10_000) -> None:
        """Step until there is nothing to do, then check that nothing is left behind."""
        for _ in range(most_steps):
            if not self.engine.step():
                self.check_empty()
                return
        raise AssertionError(
            f"still busy after {most_steps} steps: {self.engine.running or self.engine.waiting}"
        )

    def generate(self, *prompts: Sequence[int], max_tokens: int = 16, **more: Any) -> list[list[int]]:
        """The answers to prompts that run together."""
        answers = [self.submit(prompt, max_tokens, **more) for prompt in prompts]
        self.run()
        for answer in answers:
            if answer.done.error:
                raise AssertionError(answer.done.error)
        return [answer.ids for answer in answers]

    def check_empty(self) -> None:
        """No sequence, slot or block is held, and the block manager's own books agree."""
        self.engine.blocks.check_integrity()
        stats: Any = self.engine.blocks.stats()
        if stats.sequences or any(stats.used_blocks.values()):
            raise AssertionError(f"idle, yet something is held: {stats}")
