"""Models beside the target, and the state drafters keep of their own: described and checked while planning.

Plugins ask for models with `ModelRequest`s on plan field "models". Each is read, described by the plugin of
its architecture and held against the target. One that does not fit takes the part that wanted it out of the
plan, or is an error where the user named that part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve

from luce_core.contracts import (
    CacheOptions,
    MediaProcessor,
    ModelPlan,
    ModelRequest,
    ModelSpec,
    Problem,
    Role,
    StateLayout,
)
from luce_core.errors import LuceError, PluginError
from luce_core.plan_fields import MODELS, REPORT, Fields
from luce_core.plan_media import make_processor
from luce_core.registry import Registry, choices, guarded, resolve

if TYPE_CHECKING:
    from luce_core.gguf import GgufHeader

TARGET = "target"
NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
PARTS_OF: Mapping[Role, tuple[str, ...]] = {
    "drafter": ("drafter",),
    "scorer": ("reducer", "residency"),
    "encoder": ("encoder",),
}
"""Role -> kinds of part that run such a model."""


class Described:
    """A model's header with the plugin that understands it."""

    def __init__(self, fields: Fields, header: GgufHeader) -> None:
        """Raises PluginError when no installed plugin does, saying what to install."""
        registry = fields.registry
        found = registry.arch(header.family)
        subject = f"Architecture {header.family!r} of {registry.title(found.plugin)}"
        self.fields = fields
        self.path = str(header.path)
        self.plugin = found.plugin
        self.chat = found.value.chat
        self.encoder = found.value.encoder
        self.header = header
        self._describe: Callable[..., Any] = resolve(found.value.describe, subject)

    def spec(self, context: int) -> ModelSpec:
        """The spec for a context (0 = as trained) and the cache types of the plan."""
        values = self.fields.values
        cache = CacheOptions(context, values["cache.k_type"], values["cache.v_type"])
        subject = f"P{self.fields.registry.title(self.plugin)[1:]}, describing {self.path!r},"
        spec = guarded(subject, lambda: self._describe(self.header, cache))
        if not isinstance(spec, ModelSpec):
            raise PluginError(f"{subject} returned {spec!r}, wanted a ModelSpec. {REPORT}")
        return spec


class Companions:
    """What a plan holds beside its target. `update` describes without judging, `settle` judges, once."""

    def __init__(self, fields: Fields, target: Described, read: Callable[[Path], GgufHeader]) -> None:
        self.fields = fields
        self.specs: dict[str, ModelSpec] = {}
        """By model, in the order they were asked for; state is best effort."""
        self.processors: dict[str, MediaProcessor] = {}
        """By encoder's model: what makes images ready for it."""
        self.layouts: dict[str, StateLayout] = {}
        """By drafter with state of its own."""
        self._target = target
        self._read = read
        self._described: dict[str, Described] = {}
        self._wrong: list[tuple[str, Problem]] = []
        """(key of the part that cannot be, why)."""

    def update(self, target: ModelSpec, context: int) -> None:
        """Describe what is asked for by now, for a context (0 = as trained)."""
        self.specs, self.layouts, self.processors, self._wrong = {}, {}, {}, []
        for request in self.fields.values[MODELS]:
            problem = self._misfit(request)
            if problem is None:
                problem = self._describe(request, target, context)
            if problem is not None:
                self._wrong.append((request.part, problem))
        for name in self.fields.values["parts.drafter"]:
            self._lay_out(name, target)

    def settle(self) -> bool:
        """Report what does not fit and take it out, with the parts that wanted it. Whether anything went."""
        changed = False
        for key, problem in self._wrong:
            kind, _, part = key.partition(".")
            field = f"parts.{kind}"
            chosen = self.fields.values.get(field, ())
            asked = part in chosen and self.fields.by_user(field)
            self.fields.problems.append(evolve(problem, fatal=problem.fatal or asked))
            if part in chosen:
                self.fields.values[field] = tuple(name for name in chosen if name != part)
            changed = True
        lost = {key for key, _ in self._wrong}
        for request in self.fields.values[MODELS]:
            kind, _, part = request.part.partition(".")
            if part in self.fields.values.get(f"parts.{kind}", ()):
                continue
            if request.part not in lost:
                self.fields.problem(
                    f"Model {request.name!r} ({request.path!r}), which {self._asker(request)} asks for, is "
                    f"for the {kind} {part!r}, and that is not in this plan: the model is not loaded.",
                    f"Choose it{self.fields.setter(f'parts.{kind}')}, if you want it.",
                    fatal=False,
                )
            self.fields.drop_model(request.name)
            changed = True
        return changed

    def plans(self, device: str, op_layers: tuple[str, ...]) -> tuple[ModelPlan, ...]:
        """The models, as the plan lists them. op_layers: the target's."""
        return tuple(
            ModelPlan(
                name=request.name,
                role=request.role,
                path=request.path,
                spec=self.specs[request.name],
                arch_plugin=self._described[request.path].plugin,
                layer_device=(device,) * max(1, self.specs[request.name].num_layers),
                op_layers=op_layers if request.op_layers is None else request.op_layers,
                part=request.part,
            )
            for request in self.fields.values[MODELS]
            if request.name in self.specs
        )

    # --- one request

    def _asker(self, request: ModelRequest) -> str:
        return self.fields.registry.title(self.fields.origin[f"{MODELS}.{request.name}"].by)

    def _misfit(self, request: ModelRequest) -> Problem | None:
        """A request that makes no sense, whatever file it names."""
        kinds = PARTS_OF.get(request.role, ())
        kind, _, part = request.part.partition(".")
        wrong = ""
        if not NAME.fullmatch(request.name) or request.name == TARGET:
            wrong = "that name is the target's, or not made of lower-case letters, digits, '-', '_' and '.'"
        elif not kinds:
            wrong = f"its role is {request.role!r}, wanted one of {choices(PARTS_OF)}"
        elif kind not in kinds or not part:
            wanted = " or ".join(f"'{kind}.NAME'" for kind in kinds)
            wrong = f"a {request.role} is run by a part {wanted}, not by {request.part!r}"
        if not wrong:
            return None
        who = f"P{self._asker(request)[1:]}"
        return Problem(f"{who} asks for the model {request.name!r}: {wrong}.", REPORT)

    def _describe(self, request: ModelRequest, target: ModelSpec, context: int) -> Problem | None:
        """Its spec into `specs`, or what is wrong with the file."""
        who = f"Model {request.name!r} ({request.path!r}), which {self._asker(request)} asks for,"
        flag = self.fields.setter(f"parts.{request.part.partition('.')[0]}").removeprefix(" with ")
        by = self.fields.origin[f"{MODELS}.{request.name}"].by
        without = f"or go without it: {f'{flag} none' if flag else f'--plugin-block {by}'}."
        try:
            if request.path not in self._described:
                header = self._read(Path(request.path))
                self._described[request.path] = Described(self.fields, header)
            spec = self._described[request.path].spec(context)
            if request.role == "encoder":
                part = request.part.partition(".")[2]
                self.processors[request.name] = make_processor(
                    self.fields.registry,
                    self.fields.values,
                    part,
                    target=target,
                    encoder=spec,
                    path=request.path,
                )
        except LuceError as error:
            return Problem(f"{who} cannot be used. {error}", f"Name another file, {without}", fatal=False)
        if request.role == "drafter" and spec.vocab != target.vocab:
            return Problem(
                f"{who} has a vocabulary of {spec.vocab} tokens; the target {self._target.path!r} has "
                f"{target.vocab}. Token ids of one mean nothing to the other.",
                f"Use a draft model that was made for this target, {without}",
                fatal=False,
            )
        self.specs[request.name] = evolve(spec, layout=evolve(spec.layout, best_effort=True))
        return None

    # --- one drafter

    def _lay_out(self, name: str, target: ModelSpec) -> None:
        """The drafter's own layout into `layouts`; what fails costs the drafter its place."""
        registry = self.fields.registry
        try:
            found = registry.part("drafter", name)
        except PluginError:  # `check_parts` says so
            return
        if not found.value.layout:
            return
        subject = f"Drafter {name!r} of {registry.title(found.plugin)}: its layout {found.value.layout!r}"
        try:
            make = resolve(found.value.layout, subject)
            options = plugin_options(registry, self.fields.values, found.plugin)
            layout = guarded(subject, lambda: make(target, options))
            if not isinstance(layout, StateLayout):
                raise PluginError(f"{subject} returned {layout!r}, wanted a StateLayout.")
            if name in self.specs or name == TARGET:
                raise PluginError(
                    f"{subject} would be kept under the name {name!r}, which a model of this plan has."
                )
        except PluginError as error:
            self._wrong.append((f"drafter.{name}", Problem(str(error), REPORT, fatal=False)))
            return
        if layout.groups or layout.pages or layout.slots:
            self.layouts[name] = evolve(layout, best_effort=True)


def plugin_options(registry: Registry, values: Mapping[str, Any], plugin: str) -> Any:
    """The plugin's options as these fields have them, patches included; None if it has none."""
    info = registry.record(plugin).info
    if info is None or info.options is None:
        return None
    prefix = f"{plugin}."
    return info.options(**{k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)})
