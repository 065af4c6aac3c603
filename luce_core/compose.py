"""The only wiring place: plan -> `Pipeline`. Every factory is imported and called once, with a typed context.

Nothing here decides anything: the plan named the models, the parts and the sizes. What comes out holds no
registry, so a running engine reaches plugins only through the parts it was given.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import psutil
import torch
from attrs import evolve

from luce_core.cache.manager import PagedBlockManager
from luce_core.contracts import (
    BackendPlan,
    DeviceInfo,
    DrafterContext,
    EncoderContext,
    ExecutorContext,
    ExpertsContext,
    Ops,
    PartSpec,
    ReducerContext,
    ResidencyContext,
    SchedulerContext,
    StateLayout,
)
from luce_core.engine.broker import DeviceBroker
from luce_core.errors import PluginError
from luce_core.model.loader import Loader, Model
from luce_core.model.state import ModelState, TorchStateStore
from luce_core.op_layers import prepare, without
from luce_core.pipeline import Observers, Pipeline
from luce_core.plan import block_formats, state_sizes
from luce_core.plan_layers import OFF
from luce_core.plan_memory import CHECKPOINTS, MEMORY_SHARE
from luce_core.plan_models import plugin_options
from luce_core.registry import Registry, Supplied, guarded, resolve
from luce_core.text import Tokenizer

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")

NO_STATE = StateLayout((), (), best_effort=True)

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all) while weights are loaded."""

METHODS: Mapping[str, tuple[str, ...]] = {
    "scheduler": ("plan",),
    "executor": ("prepare", "submit"),
    "drafter": ("observe", "propose"),
    "reducer": ("reduce",),
    "residency": ("next_decision", "select"),
    "experts": ("bank", "hint", "rebalance"),
    "encoder": ("encode",),
}
"""What a part of each kind can do; checked once, so that a wrong factory fails here and by name."""


def compose(plan: BackendPlan, registry: Registry, progress: Progress | None = None) -> Pipeline:
    """Load the models, allocate the state, build the parts. Start-up thread.

    Raises PluginError when a factory fails or returns the wrong thing, ModelFormatError for a bad file,
    CapacityError when memory is short after all.
    """
    torch.set_num_threads(plan.number("threads") or physical_cores())
    wiring = Wiring(plan, registry, progress)
    models = wiring.models
    target = models[plan.models[0].name]
    states = [*(model.state for model in models.values()), *wiring.states.values()]
    store = TorchStateStore(state_sizes(plan), states)
    blocks = PagedBlockManager(
        store,
        {state.model: state.layout for state in states},
        identity=_identity(plan, models),
        cache_bytes=_pool_bytes(store) + _snapshot_bytes(plan),
        host_bytes=_snapshot_bytes(plan),
        swap_bytes=plan.number("cache.swap_bytes"),
    )
    return Pipeline(
        plan=plan,
        models=MappingProxyType(models),
        target=target,
        state=store,
        blocks=blocks,
        scheduler=wiring.one("scheduler"),
        executor=wiring.one("executor"),
        brokers=MappingProxyType(wiring.brokers),
        drafters=wiring.all("drafter"),
        reducers=wiring.all("reducer"),
        encoders=wiring.all("encoder"),
        residency=wiring.one("residency") if plan.parts["residency"] else None,
        experts=wiring.one("experts") if plan.parts["experts"] else None,
        observers=Observers.of(registry),
    )


def physical_cores() -> int:
    """Cores this process may use: hyper-threads counted once, affinity and a container's quota obeyed."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = psutil.cpu_count(logical=False) or usable
    return max(1, min(cores, usable, _quota(CGROUP_QUOTA, usable)))


def _quota(path: Path, otherwise: int) -> int:
    """Processors worth of time a control group gets: "200000 100000" is 2, "max 100000" is no limit."""
    try:
        quota, period = path.read_text(encoding="ascii").split()
    except (OSError, ValueError):  # no control groups here
        return otherwise
    return otherwise if quota == "max" else max(1, int(quota) // int(period))


def _identity(plan: BackendPlan, models: Mapping[str, Model]) -> str:
    """What a cached block was computed by, and how it is kept: state is reused under this name only."""
    sizes = state_sizes(plan)
    return "+".join([*(m.backend.spec.identity for m in models.values()), sizes.k_type, sizes.v_type])


def _pool_bytes(store: TorchStateStore) -> int:
    """Every block of the pool may be kept as a prefix; room is made when a sequence needs it."""
    return sum(count * store.block_bytes[group] for group, count in store.sizes.num_blocks.items())


def _snapshot_bytes(plan: BackendPlan) -> int:
    """What the plan claims in host memory for snapshots of slots and windows."""
    return sum(claim.num_bytes for claim in plan.claims if claim.owner == CHECKPOINTS)


def _broker(plan: BackendPlan, device: DeviceInfo) -> DeviceBroker:
    """Of the plan's own device within its limit; of any other with what may be used there."""
    own = device.id == plan.models[0].layer_device[0]
    capacity = plan.number("memory.limit_bytes") if own else int(MEMORY_SHARE * device.memory_bytes)
    return DeviceBroker(device.id, capacity, [claim for claim in plan.claims if claim.device == device.id])


class Wiring:
    """What composing needs on the way; gone when the pipeline is there."""

    def __init__(self, plan: BackendPlan, registry: Registry, progress: Progress | None) -> None:
        self.plan = plan
        self.registry = registry
        self.device = next(item for item in plan.devices if item.id == plan.models[0].layer_device[0])
        self.brokers = {item.id: _broker(plan, item) for item in plan.devices}
        builds = {model.spec.arch: self._build(model.spec.arch) for model in plan.models}
        layers = {name: self._layer(name) for model in plan.models for name in model.op_layers}
        self.loader = Loader(
            builds.__getitem__,
            layers.__getitem__,
            state_sizes(plan),
            tokenizer_of=lambda header: Tokenizer.from_metadata(header.metadata),
            progress=progress,
            formats=block_formats(registry),
        )
        self.models = {model.name: self.loader.load(model) for model in plan.models}
        self.target = self.models[plan.models[0].name]
        sizes, device = state_sizes(plan), self.device.id
        self.states = {name: ModelState(name, own, sizes, device) for name, own in plan.layouts.items()}

    def _build(self, arch: str) -> Callable[..., Any]:
        found = self.registry.arch(arch)
        subject = f"Architecture {arch!r} of {self.registry.title(found.plugin)}"
        return resolve(found.value.build, subject)

    def _layer(self, name: str) -> Mapping[str, Callable[..., Any]]:
        found = self.registry.op_layer(name)
        title = self.registry.title(found.plugin)
        prepare(found.value, title, self.device, self._options(found.plugin))
        subject = f"of op layer {name!r} of {title}"
        used = without(found.value, self.plan.values[OFF])
        return {impl.op: resolve(impl.fn, f"Op {impl.op!r} {subject}") for impl in used.ops}

    def _options(self, plugin: str) -> Any:
        return plugin_options(self.registry, self.plan.values, plugin)

    # --- parts

    def one(self, kind: str) -> Any:
        """The occupant of a slot with one."""
        (name,) = self.plan.parts[kind]
        return self._part(kind, name)

    def all(self, kind: str) -> tuple[Any, ...]:
        """The occupants of an ordered list."""
        return tuple(self._part(kind, name) for name in self.plan.parts[kind])

    def _part(self, kind: str, name: str) -> Any:
        found = self.registry.part(kind, name)
        subject = f"{kind.capitalize()} {name!r} of {self.registry.title(found.plugin)}"
        factory = resolve(found.value.factory, subject)
        context = self._context(found)
        part = guarded(f"{subject}: its factory {found.value.factory!r}", partial(factory, context))
        lacking = [method for method in METHODS[kind] if not callable(getattr(part, method, None))]
        if part is None or lacking:
            wanted = f"an object with {' and '.join(lacking)}" if lacking else "a part"
            raise PluginError(f"{subject}: its factory returned {part!r}, wanted {wanted}.")
        if kind == "drafter":
            _check_drafter(part, subject, self.plan.layouts.get(name, NO_STATE))
        return part

    def _models_of(self, part: PartSpec) -> Mapping[str, Model]:
        key = f"{part.kind}.{part.name}"
        return MappingProxyType({m.name: self.models[m.name] for m in self.plan.models if m.part == key})

    def _drafter_context(self, part: Supplied[PartSpec], options: Any) -> DrafterContext:
        name, target = part.value.name, self.target
        return DrafterContext(
            options=options,
            target=target.target,
            loader=self.loader,
            broker=self.brokers[self.device.id],
            capacity=self.plan.number("engine.draft_nodes"),
            ops=cast("Ops", target.ops),
            state=self.states.get(name) or ModelState(name, NO_STATE, state_sizes(self.plan), self.device.id),
            models=self._models_of(part.value),
        )

    def _context(self, part: Supplied[PartSpec]) -> Any:
        """The typed context of the part's kind."""
        plan, broker, target = self.plan, self.brokers[self.device.id], self.target
        options, models = self._options(part.plugin), self._models_of(part.value)
        contexts: Mapping[str, Callable[[], Any]] = {
            "scheduler": lambda: SchedulerContext(
                options, plan.number("engine.max_sequences"), plan.number("engine.row_budget")
            ),
            "executor": lambda: ExecutorContext(options, self.device),
            "drafter": lambda: self._drafter_context(part, options),
            "reducer": lambda: ReducerContext(options, self.loader, broker, target.tokenizer, models),
            "residency": lambda: ResidencyContext(
                options, plan.number("context"), state_sizes(plan).block_tokens, models
            ),
            "experts": lambda: ExpertsContext(options, self.device, broker),
            "encoder": lambda: EncoderContext(options, part.value.name, self.loader, models),
        }
        return contexts[part.value.kind]()


def _check_drafter(part: Any, subject: str, planned: StateLayout) -> None:
    """A drafter's layout is the one its state was planned and allocated by."""
    layout = getattr(part, "layout", None)
    if not isinstance(layout, StateLayout):
        raise PluginError(f"{subject}: its layout is {layout!r}, wanted a StateLayout.")
    if evolve(layout, best_effort=True) != planned:
        raise PluginError(
            f"{subject} has a layout of {_words(layout)}, but {_words(planned)} was planned and allocated. "
            "A drafter with state of its own names a function in `PartSpec.layout`, and has the layout that "
            "returned."
        )


def _words(layout: StateLayout) -> str:
    named = [f"pages {pages.name!r}" for pages in layout.pages]
    named += [f"slot {slot.name!r}" for slot in layout.slots]
    return ", ".join(named) or "nothing"
