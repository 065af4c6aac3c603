"""Options + model header + devices -> `BackendPlan`: all is decided and explained, nothing allocated.

Fields start as what the options say. Plugins answer with patches, applied in `after` order; each field
remembers who set it and why. Then memory is divided, and what does not fit together is reported in one error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve

from luce_core.cache.layout import joined, misfits
from luce_core.contracts import (
    BackendPlan,
    DeviceInfo,
    ModelPlan,
    ModelSpec,
    OpLayer,
    PlanPatch,
    Problem,
    StateSizes,
    StepBytes,
)
from luce_core.errors import PlanError, PluginError
from luce_core.op_layers import without
from luce_core.option_fields import show_size
from luce_core.options import Options
from luce_core.plan_cache import as_asked, check_cache, note_compact, settle_types
from luce_core.plan_fields import MODELS, PART_KINDS, REPORT, Fields
from luce_core.plan_layers import OFF, check_layers
from luce_core.plan_media import add_projector
from luce_core.plan_memory import (
    MEMORY_SHARE,
    MEMORY_SIZES,
    Demand,
    Fit,
    Room,
    fit,
    rooms,
    step_bytes,
    strides_block,
    weight_bytes,
)
from luce_core.plan_models import TARGET, Companions, Described
from luce_core.registry import Registry, Supplied, choices, declarations, resolve

if TYPE_CHECKING:
    from luce_core.gguf import FormatRegistry, GgufHeader

REQUIRED_KINDS = frozenset({"scheduler", "executor"})
MIN_HELD_ROWS = 8
"""Rows of one sequence a held batch can carry without drafters: the anchor, a prompt tail, forced tokens."""
CAPABILITIES = frozenset({"loader", "taps"})
"""What every plan offers to parts; the model and the device add theirs."""
NEXTN = "nextn"
"""The capability of a model with an MTP block; its state is allocated for drafters that need it."""


def make_plan(
    options: Options,
    header: GgufHeader,
    registry: Registry,
    devices: Sequence[DeviceInfo] | None = None,
) -> BackendPlan:
    """Decide everything for one model. Allocates nothing and touches no device.

    devices: what there is, by default asked of the hardware plugins. Raises PlanError with every fatal
    problem found; what is not fatal is in the plan's `problems`.
    """
    draft = make_draft(options, header, registry, devices)
    draft.check_memory()
    plan, fields = draft.freeze(), draft.fields
    answers, failures = registry.ask("luce_check_plan", Problem, plan=plan)
    fields.problems += [*failures, *(problem for _, found in answers for problem in found)]
    fields.raise_fatal()
    return evolve(plan, problems=tuple(fields.problems))


def what_fits(
    options: Options,
    header: GgufHeader,
    registry: Registry,
    devices: Sequence[DeviceInfo] | None = None,
    memory: Sequence[int] = MEMORY_SIZES,
) -> tuple[str, tuple[Room, ...]]:
    """The plan's device, and what one sequence would get on it, had it so many bytes of memory.

    Raises PlanError as `make_plan` does, but never for want of memory.
    """
    draft = make_draft(options, header, registry, devices)
    draft.fields.raise_fatal()
    as_asked(draft.fields)
    return draft.device.id, rooms(draft.demand(), draft.device, memory)


def make_draft(
    options: Options,
    header: GgufHeader,
    registry: Registry,
    devices: Sequence[DeviceInfo] | None = None,
) -> Draft:
    """A plan with everything decided and the memory not yet judged. Raises PlanError without a device or an
    architecture.
    """
    fields = Fields(options, registry)
    fields.problems += registry.problems
    if devices is None:
        found, problems = registry.find_devices(options.plugins)
        fields.problems += problems
        devices = [item.value for item in found]
    device = choose_device(fields, devices)
    model = describe_model(fields, header)
    if device is None or model is None:
        check_parts(fields, None)
        check_layers(fields, device)
        raise PlanError([problem for problem in fields.problems if problem.fatal])
    add_projector(fields, model, _reader(registry), Described)
    draft = Draft(fields, tuple(devices), device, model)
    draft.ask_patches()
    if fields.values["device"] != draft.device.id:
        draft.device = choose_device(fields, devices) or device
    check_parts(fields, draft.capabilities())
    check_layers(fields, draft.device)
    draft.settle_companions()
    check_cache(fields, draft.demand().layouts)
    return draft


# --- device, architecture, parts, ops: each looks at its fields and reports what is wrong


def choose_device(fields: Fields, devices: Sequence[DeviceInfo]) -> DeviceInfo | None:
    """The device the field names, or the best of those it allows.

    A device that is not there is reported, and the best one stands in for it so that the rest can be checked.
    """
    wanted = str(fields.values["device"])
    ranked = sorted(devices, key=lambda item: (-item.rank, item.id))
    allowed = [item for item in ranked if wanted in ("auto", item.id, item.id.partition(":")[0])]
    everything = choices(item.id for item in ranked)
    if allowed:
        fields.refine("device", allowed[0].id, f"the best of {everything}")
        return allowed[0]
    if ranked:
        fields.problem(
            f"Device {wanted!r} is not there. {fields.registry.missing_for(f'device.{wanted}')}",
            f"Choose one of {everything}, or --device auto.",
        )
        fields.refine("device", ranked[0].id, f"stands in for {wanted}")
        return ranked[0]
    else:
        missing = fields.registry.missing_for("device.cpu" if wanted == "auto" else f"device.{wanted}")
        fields.problem(f"No device was found. {missing}", "Install the plugin of this machine's hardware.")
    return None


def describe_model(fields: Fields, header: GgufHeader) -> Described | None:
    """Find the architecture of the file; None after reporting what to install."""
    name, registry = header.family, fields.registry
    try:
        model = Described(fields, header)
        model.spec(0)
    except PluginError as error:
        # A missing architecture names its package already; a broken one is its authors' business.
        fix = REPORT if registry.declared.get(f"arch.{name}") else "`luce-core plugins` lists what is there."
        fields.problem(f"{str(header.path)!r} holds a model of architecture {name!r}. {error}", fix)
        return None
    if model.encoder:
        fields.problem(
            f"{str(header.path)!r} holds an encoder of images ({name!r}), which answers nothing by itself.",
            "Give the file of the model it was made for, and this one with --mmproj.",
        )
        return None
    if fields.by_default("parts.chat"):
        suited = tuple(part for part in model.chat if part in registry.names("chat"))
        if suited:
            fields.decide("parts.chat", suited, f"suits architecture {name}")
    return model


def check_parts(fields: Fields, capabilities: frozenset[str] | None) -> None:
    """Every named part exists and gets what it needs. One that nobody asked for by name steps aside.

    capabilities: what the plan offers; None as long as nobody knows.
    """
    for kind in PART_KINDS:
        field = f"parts.{kind}"
        kept = tuple(part for part in fields.values[field] if _part_fits(fields, kind, part, capabilities))
        if not kept and kind in REQUIRED_KINDS and not fields.values[field]:
            fields.problem(f"The plan has no {kind}.", f"Choose one with --{kind}.")
        fields.values[field] = kept


def _part_fits(fields: Fields, kind: str, part: str, capabilities: frozenset[str] | None) -> bool:
    field = f"parts.{kind}"
    fatal = fields.by_user(field) or kind in REQUIRED_KINDS
    try:
        found = fields.registry.part(kind, part)
    except PluginError as error:
        asked = f"{fields.origin[field].by} asks for the {kind} {part!r}. {error}"
        fields.problem(asked, f"Or name another{fields.setter(field)}.", fatal=fatal)
        return False
    missing = [] if capabilities is None else sorted(found.value.needs - capabilities)
    if missing and capabilities is not None:
        fields.problem(
            f"{kind.capitalize()} {part!r} of {fields.registry.title(found.plugin)} needs "
            f"{choices(missing)}; this plan offers {choices(capabilities)}.",
            f"Choose another {kind}{fields.setter(field)}, another device or another model.",
            fatal=fatal,
        )
    return not missing


# --- patches and memory


class Draft:
    """A plan that has a model and a device, and is still being decided."""

    def __init__(
        self, fields: Fields, devices: tuple[DeviceInfo, ...], device: DeviceInfo, model: Described
    ) -> None:
        self.fields = fields
        self.devices = devices
        self.device = device
        self.model = model
        self.spec = model.spec(0)
        self.companions = Companions(fields, model, _reader(fields.registry))
        self.fitted: Fit | None = None

    def ask_patches(self) -> None:
        """Let every plugin patch; each sees the plan with the patches of the plugins before it."""
        registry = self.fields.registry
        for bound in registry.hooks.get("luce_extend_plan", ()):
            self.divide_memory()
            try:
                patches = declarations(bound, (PlanPatch,), plan=self.freeze(), devices=self.devices)
            except PluginError as error:
                self.fields.problems.append(registry.failure(bound.plugin, error))
                continue
            for patch in patches:
                self.fields.apply(bound.plugin, patch)

    def capabilities(self) -> frozenset[str]:
        """What the plan offers to parts."""
        shapes = {"any": {"tree", "chain"}, "chain": {"chain"}, "none": set()}[self.spec.tree]
        own = {NEXTN} if self.spec.nextn_layout is not None else set()
        return CAPABILITIES | shapes | own | self.device.features

    def _layers(self, names: Sequence[str]) -> list[OpLayer]:
        """Those of the named op layers that exist."""
        registry = self.fields.registry
        known = set(registry.names("ops"))
        off = self.fields.values[OFF]
        return [without(registry.op_layer(name).value, off) for name in names if name in known]

    def settle_companions(self) -> None:
        """What does not fit beside the target goes; memory is divided among the rest."""
        self.divide_memory()
        if self.companions.settle():
            self.divide_memory()
        context = self._fit().context
        for name, spec in self.companions.specs.items():
            if spec.context < context and name not in self.companions.processors:
                self.fields.problem(
                    f"Model {name!r} was trained for {spec.context} tokens; the context is {context}.",
                    "Expect it to be of little use beyond, or choose a smaller --ctx-size.",
                    fatal=False,
                )

    def divide_memory(self) -> None:
        """Settle the context, the types of the cache and the sizes of all state. Does not judge: see
        `check_memory`.
        """
        settle_types(self.fields, self._wanted_context(), self._divide)

    def _divide(self) -> tuple[int, list[str]]:
        """What is missing, and what does not go into the cache's types."""
        fields = self.fields
        self.spec = self._target_spec()
        self.companions.update(self.spec, self._wanted_context())
        self._derive()
        self.fitted = fit(self.demand(), self.device, int(fields.values["memory.limit_bytes"]))
        if not self._wanted_context():
            fields.decide("context", self.fitted.context, self.fitted.reason)
        sizes = self.fitted.sizes
        fields.decide("state.sizes", sizes, f"for {sizes.num_slots} sequences, within the memory limit")
        wrong = [one for layout in self.demand().layouts.values() for one in misfits(layout, sizes)]
        return self.fitted.short_bytes, wrong

    def _target_spec(self) -> ModelSpec:
        """With the state of its MTP block where a drafter of the plan runs that."""
        spec = self.model.spec(self._wanted_context())
        if spec.nextn_layout is None or not self._nextn_drafters():
            return spec
        return evolve(spec, layout=joined(spec.layout, spec.nextn_layout))

    def _nextn_drafters(self) -> list[str]:
        found = []
        for name in self.fields.values["parts.drafter"]:
            try:
                part = self.fields.registry.part("drafter", name).value
            except PluginError:  # `check_parts` says so
                continue
            found += [name] if NEXTN in part.needs else []
        return found

    def _wanted_context(self) -> int:
        """The context someone asked for; 0 = automatic."""
        return 0 if self.fields.by_default("context") else int(self.fields.values["context"])

    def _derive(self) -> None:
        """Fields that follow from others, as long as nobody set them."""
        fields, values = self.fields, self.fields.values
        if fields.by_default("memory.limit_bytes") or not values["memory.limit_bytes"]:
            reason = f"{MEMORY_SHARE:.0%} of {show_size(self.device.memory_bytes)} on {self.device.id}"
            fields.decide("memory.limit_bytes", int(MEMORY_SHARE * self.device.memory_bytes), reason)
        if fields.by_default("memory.weight_bytes"):
            fields.decide("memory.weight_bytes", *self._weight_bytes(self.spec, None))
        layouts = [self.spec.layout, *self.companions.layouts.values()]
        layouts += [spec.layout for spec in self.companions.specs.values()]
        groups = [group for layout in layouts for group in layout.groups]
        block_tokens = strides_block(values["cache.block_tokens"], groups)
        if block_tokens != values["cache.block_tokens"]:
            fields.decide("cache.block_tokens", block_tokens, "raised to a multiple of the model's strides")
        nodes = self._nodes()
        reason = f"the anchor and {nodes} candidates" if nodes >= MIN_HELD_ROWS else "the least of use"
        fields.decide("engine.max_held_rows", max(MIN_HELD_ROWS, 1 + nodes), reason)

    def _nodes(self) -> int:
        """Most candidates of a sequence."""
        values = self.fields.values
        return int(values["engine.draft_nodes"]) if values["parts.drafter"] else 0

    def _step_bytes(self, specs: Mapping[str, ModelSpec], layers: Mapping[str, Any]) -> StepBytes:
        """Of the model whose steps take most. layers: names, by model; None = the target's."""
        own, rows = self.fields.values["execution.op_layers"], self.fields.values["engine.row_budget"]
        found = []
        for name, spec in specs.items():
            chosen = layers.get(name)
            found.append(step_bytes(spec, self._layers(own if chosen is None else chosen), rows))
        return StepBytes(max(one.working for one in found), max(one.replayed for one in found))

    def _weight_bytes(self, spec: ModelSpec, op_layers: Sequence[str] | None) -> tuple[int, str]:
        """op_layers: None = the target's."""
        chosen = self.fields.values["execution.op_layers"] if op_layers is None else op_layers
        return weight_bytes(spec, self._layers(chosen))

    def _scratch(self) -> dict[str, int]:
        """What op layers and parts hold whatever the model."""
        values, registry = self.fields.values, self.fields.registry
        layers = self._layers(values["execution.op_layers"])
        held = {f"scratch of op layer {layer.name}": layer.scratch_bytes for layer in layers}
        for field in sorted(name for name in values if name.startswith("parts.")):
            kind = field.removeprefix("parts.")
            for name in values[field]:
                if name in registry.names(kind):
                    held[f"{kind} {name}"] = registry.part(kind, name).value.device_bytes
        return {owner: size for owner, size in held.items() if size}

    def demand(self) -> Demand:
        """What memory is divided among."""
        values, specs = self.fields.values, self.companions.specs
        layers = {request.name: request.op_layers for request in values[MODELS]}
        others = {name: self._weight_bytes(spec, layers[name])[0] for name, spec in specs.items()}
        models = {TARGET: self.spec, **specs}
        return Demand(
            models=models,
            weight_bytes={TARGET: values["memory.weight_bytes"], **others},
            drafters=self.companions.layouts,
            encoders={name: one.workspace_bytes for name, one in self.companions.processors.items()},
            scratch=self._scratch(),
            row_budget=values["engine.row_budget"],
            max_sequences=values["engine.max_sequences"],
            max_held_rows=values["engine.max_held_rows"],
            sampled_rows=1 + self._nodes(),
            context=self._wanted_context(),
            cache_bytes=values["cache.bytes"],
            checkpoint_bytes=values["cache.checkpoint_bytes"],
            swap_bytes=values["cache.swap_bytes"],
            block_tokens=values["cache.block_tokens"],
            k_type=values["cache.k_type"],
            v_type=values["cache.v_type"],
            step=self._step_bytes(models, layers),
        )

    def check_memory(self) -> None:
        """Report what does not fit, with the figures."""
        fitted, fields = self._fit(), self.fields
        note_compact(fields)
        if fitted.context > self.spec.context:
            fields.problem(
                f"The context of {fitted.context} tokens is beyond the {self.spec.context} the model was "
                "trained for.",
                "Expect poor answers there, or choose a smaller --ctx-size.",
                fatal=False,
            )
        what = f"a context of {fitted.context} tokens is short of {show_size(fitted.short_bytes)}"
        if fitted.short_bytes and fitted.cache_limited:
            fields.problem(
                f"With --cache-bytes {show_size(fields.values['cache.bytes'])} {what}.",
                "Raise it, lower --ctx-size, or choose a smaller --cache-type-k and --cache-type-v.",
            )
        elif fitted.short_bytes:
            own = [claim for claim in fitted.claims if claim.device == self.device.id and claim.num_bytes]
            table = ", ".join(f"{claim.owner} {show_size(claim.num_bytes)}" for claim in own)
            limit = show_size(fields.values["memory.limit_bytes"])
            fields.problem(
                f"Device {self.device.id!r} may lend {limit}, and {what} ({table}).",
                "Lower --ctx-size, --max-sequences or --chunk, take a smaller file, or raise --memory-limit.",
            )

    def _fit(self) -> Fit:
        if self.fitted is None:
            raise AssertionError("divide_memory comes first")
        return self.fitted

    def freeze(self) -> BackendPlan:
        """The plan as it stands."""
        values = self.fields.values
        op_layers = tuple(values["execution.op_layers"])
        target = ModelPlan(
            name=TARGET,
            role="target",
            path=self.model.path,
            spec=self.spec,
            arch_plugin=self.model.plugin,
            layer_device=(self.device.id,) * max(1, self.spec.num_layers),
            op_layers=op_layers,
        )
        return BackendPlan(
            models=(target, *self.companions.plans(self.device.id, op_layers)),
            parts={kind: values[f"parts.{kind}"] for kind in PART_KINDS},
            values=dict(values),
            origin=dict(self.fields.origin),
            claims=self._fit().claims,
            devices=self.devices,
            layouts=dict(self.companions.layouts),
        )


def _reader(registry: Registry) -> Callable[[Path], GgufHeader]:
    from luce_core.gguf import read_header

    return partial(read_header, formats=block_formats(registry))


# --- around a plan


def block_formats(registry: Registry) -> FormatRegistry:
    """The block formats a model file may use: the core's and those of plugins, decoded when first needed."""
    from luce_core.gguf import FormatRegistry, declared

    formats = FormatRegistry()
    for supplied in registry.quants():
        subject = f"Block format {supplied.value.name!r} of {registry.title(supplied.plugin)}"
        formats.register(declared(supplied.value, partial(resolve, subject=subject)))
    return formats


def state_sizes(plan: BackendPlan) -> StateSizes:
    """How much state the plan allocates."""
    sizes = plan.values["state.sizes"]
    if not isinstance(sizes, StateSizes):
        raise TypeError(f"plan field 'state.sizes' holds {sizes!r}")
    return sizes


def suppliers(plan: BackendPlan, registry: Registry) -> Mapping[str, Supplied[Any]]:
    """Everything of the plan that a plugin supplied: "kind.name" -> plugin and declaration."""
    found: dict[str, Supplied[Any]] = {}
    for model in plan.models:
        found[f"arch.{model.spec.arch}"] = registry.arch(model.spec.arch)
        for layer in model.op_layers:
            found[f"ops.{layer}"] = registry.op_layer(layer)
    for kind, part_names in plan.parts.items():
        for name in part_names:
            found[f"{kind}.{name}"] = registry.part(kind, name)
    return found
