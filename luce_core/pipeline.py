"""What compose made: one frozen object holding everything a running engine needs, and no way back to
plugins.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import Factory, frozen

if TYPE_CHECKING:
    from luce_core.contracts import (
        BackendPlan,
        BlockManager,
        Drafter,
        Encoder,
        Executor,
        ExpertStore,
        LoadedModel,
        MemoryBroker,
        PromptReducer,
        RequestRecord,
        ResidencyPolicy,
        Scheduler,
        StateStore,
    )
    from luce_core.registry import Registry

log = logging.getLogger(__name__)


@frozen
class Observer:
    """One plugin's implementation of one observing hook."""

    plugin: str
    call: Callable[..., None]


@frozen
class Observers:
    """Who is told about the engine's life. An exception of an observer is logged and fails nothing."""

    started: tuple[Observer, ...] = ()
    stopping: tuple[Observer, ...] = ()
    finished: tuple[Observer, ...] = ()

    @classmethod
    def of(cls, registry: Registry) -> Observers:
        """What the loaded plugins observe."""

        def hooked(hook: str) -> tuple[Observer, ...]:
            return tuple(Observer(bound.plugin, bound) for bound in registry.hooks.get(hook, ()))

        return cls(
            hooked("luce_engine_started"), hooked("luce_engine_stopping"), hooked("luce_request_finished")
        )

    def engine_started(self, pipeline: Pipeline) -> None:
        """Tell every plugin that requests are accepted from now on."""
        _notify(self.started, "luce_engine_started", pipeline=pipeline)

    def engine_stopping(self, pipeline: Pipeline) -> None:
        """Tell every plugin that the engine ends; the parts are still alive."""
        _notify(self.stopping, "luce_engine_stopping", pipeline=pipeline)

    def request_finished(self, record: RequestRecord) -> None:
        """Tell every plugin that a request ended."""
        _notify(self.finished, "luce_request_finished", record=record)


def _notify(observers: Sequence[Observer], hook: str, **arguments: Any) -> None:
    for observer in observers:
        try:
            observer.call(**arguments)
        except Exception:  # the named boundary: an observer must not take the server down
            log.exception("Plugin %r failed in %s; the server goes on without it.", observer.plugin, hook)


@frozen
class Pipeline:
    """Everything one engine runs, resolved once. A slot has one occupant or an ordered list; nothing is
    wrapped.
    """

    plan: BackendPlan
    models: Mapping[str, LoadedModel]
    """By name in the plan; all are alive at once unless parked."""
    target: LoadedModel
    state: StateStore
    blocks: BlockManager
    scheduler: Scheduler
    executor: Executor
    brokers: Mapping[str, MemoryBroker]
    """By device id."""
    drafters: tuple[Drafter, ...] = ()
    reducers: tuple[PromptReducer, ...] = ()
    encoders: tuple[Encoder, ...] = ()
    residency: ResidencyPolicy | None = None
    experts: ExpertStore | None = None
    observers: Observers = Factory(Observers)
