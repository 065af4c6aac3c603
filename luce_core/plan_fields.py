"""The fields of a plan while it is decided: values, who set each, and how plugins may patch them."""

from __future__ import annotations

from typing import Any, get_args

from attrs import define, evolve, field
from pydantic import ValidationError

from luce_core.contracts import ModelRequest, PartKind, PlanPatch, Problem, Provenance
from luce_core.core_options import CoreOptions
from luce_core.errors import PlanError, PluginError
from luce_core.option_fields import OptionField
from luce_core.options import USER, Options
from luce_core.registry import CORE, Registry, check_types, closest

PART_KINDS: tuple[PartKind, ...] = get_args(PartKind)
SINGLE_KINDS = frozenset({"scheduler", "executor", "residency", "experts"})
"""Slots with one occupant; every other kind is an ordered list."""
DERIVED = frozenset({"state.sizes", "engine.max_held_rows"})
"""Fields nobody may patch: they follow from others."""
MODELS = "models"
"""The field of models beside the target. Patches add to it; field "models.NAME" tells who asked for which."""
REPORT = "Report it to the plugin's authors."


@define
class Fields:
    """Dotted field -> value and provenance. Starts as what the options say."""

    options: Options
    registry: Registry
    values: dict[str, Any] = field(factory=dict)
    origin: dict[str, Provenance] = field(factory=dict)
    problems: list[Problem] = field(factory=list)
    _of: dict[str, OptionField] = field(factory=dict)
    """Field -> the option it comes from."""

    def __attrs_post_init__(self) -> None:
        for item in self.options.fields:
            name = item.info.plan if item.plugin == CORE else item.name
            if name:
                value = self.options.value(item)
                self._of[name] = item
                self.values[name] = names(value) if name.startswith("parts.") else value
                self.origin[name] = self.options.origin[item.name]
        self.decide(MODELS, (), "the target alone")

    def problem(self, message: str, fix: str, *, fatal: bool = True) -> None:
        """Remember a problem; all are reported together."""
        self.problems.append(Problem(message, fix, fatal))

    def raise_fatal(self) -> None:
        """PlanError with all that is fatal, if anything is."""
        fatal = [problem for problem in self.problems if problem.fatal]
        if fatal:
            raise PlanError(fatal)

    def by_user(self, name: str) -> bool:
        """Whether the field is the user's own word."""
        return self.origin[name].source in USER

    def by_default(self, name: str) -> bool:
        """Whether nobody but the core has set the field."""
        return name not in self.origin or self.origin[name].source == "default"

    def decide(self, name: str, value: Any, reason: str) -> None:
        """A field the core itself sets."""
        self.values[name] = value
        self.origin[name] = Provenance("default", CORE, reason)

    def reset(self, name: str) -> None:
        """A field as the options say."""
        item = self._of[name]
        self.values[name], self.origin[name] = self.options.value(item), self.options.origin[item.name]

    def refine(self, name: str, value: Any, reason: str) -> None:
        """The same choice in other words ("auto" -> "cuda:0"): it stays whoever's it was."""
        self.values[name] = value
        self.origin[name] = evolve(self.origin[name], reason=self.origin[name].reason or reason)

    def setter(self, name: str) -> str:
        """How the user sets a field: " with --flag", or nothing if there is no way."""
        return f" with {self._of[name].flag}" if name in self._of else ""

    # --- patches

    def apply(self, plugin: str, patch: PlanPatch) -> None:
        """One plugin's wish for one field.

        It wins over defaults and over plugins it asked to come after. Over anything else it becomes a
        problem: a note where the user, a profile or a card has decided, fatal where two plugins disagree.
        """
        who = f"P{self.registry.title(plugin)[1:]}"
        if patch.field == MODELS:
            self._add_models(plugin, patch)
            return
        if patch.field not in self.values or patch.field in DERIVED or patch.field.startswith(f"{MODELS}."):
            known = sorted(name for name in set(self.values) - DERIVED if not name.startswith(f"{MODELS}."))
            near = closest(patch.field, known)
            self.problem(f"{who} patches {patch.field!r}, which is no field it may set.{near}", REPORT)
            return
        try:
            value = self._valid(patch)
        except ValueError as error:
            self.problem(f"{who} sets {patch.field} to {patch.value!r}: {error}.", REPORT)
            return
        now, source = self.values[patch.field], self.origin[patch.field]
        if now == value:
            return
        wish = f"{who} sets {patch.field} to {words(value)} ({patch.reason})"
        if source.source == "plugin" and not self._comes_after(plugin, source.by):
            other = self.registry.title(source.by)
            self.problem(
                f"{wish}, and {other} sets it to {words(now)} ({source.reason}).",
                f"Choose one yourself{self.setter(patch.field)}, or leave one out: --plugin-block {plugin}.",
            )
        elif source.source in ("default", "plugin"):
            self.values[patch.field] = value
            self.origin[patch.field] = Provenance("plugin", plugin, patch.reason)
        else:
            self.problem(
                f"{wish}; {source.by} keeps it at {words(now)}.",
                f"To let the plugin decide, remove {source.by}.",
                fatal=False,
            )

    def _add_models(self, plugin: str, patch: PlanPatch) -> None:
        """Requests of all plugins together; a name two of them use is a problem naming both."""
        who = f"P{self.registry.title(plugin)[1:]}"
        asked = patch.value if isinstance(patch.value, tuple) else (patch.value,)
        for item in asked:
            if not isinstance(item, ModelRequest):
                self.problem(f"{who} asks for the model {item!r}, wanted a ModelRequest.", REPORT)
                continue
            try:
                check_types(item, f"{who} asks for")
            except PluginError as error:
                self.problem(f"{error}.", REPORT)
                continue
            before = self.origin.get(f"{MODELS}.{item.name}")
            if before is not None:
                other = self.registry.title(before.by)
                self.problem(
                    f"{who} asks for the model {item.name!r} from {item.path!r}, and {other} for another of "
                    f"that name, from {self.values[f'{MODELS}.{item.name}']!r}.",
                    f"Leave one out: --plugin-block {plugin}.",
                )
                continue
            self.values[MODELS] = (*self.values[MODELS], item)
            self.values[f"{MODELS}.{item.name}"] = item.path
            origin = Provenance("plugin", plugin, patch.reason)
            self.origin[MODELS] = self.origin[f"{MODELS}.{item.name}"] = origin

    def drop_model(self, name: str) -> None:
        """A model that was asked for and is not loaded."""
        self.values[MODELS] = tuple(item for item in self.values[MODELS] if item.name != name)
        del self.values[f"{MODELS}.{name}"], self.origin[f"{MODELS}.{name}"]

    def _valid(self, patch: PlanPatch) -> Any:
        """The value in the field's own type. ValueError says what is wrong with it."""
        value = patch.value
        if patch.field.startswith("parts."):
            value = names(value)
            kind = patch.field.removeprefix("parts.")
            if kind in SINGLE_KINDS and len(value) > 1:
                raise ValueError(f"a plan has one {kind}")
            return value
        item = self._of.get(patch.field)
        if item is None:
            wanted = type(self.values[patch.field])
            if type(value) is not wanted:
                raise ValueError(f"wanted {wanted.__name__}")
            return value
        model = CoreOptions if item.plugin == CORE else type(self.options.plugins[item.plugin])
        try:
            return getattr(model(**{item.field: value}), item.field)
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"].lower()) from None

    def _comes_after(self, later: str, earlier: str) -> bool:
        """Whether `later` asked, directly or through others, to come after `earlier`."""
        after = {r.name: r.info.after if r.info else () for r in self.registry.loaded()}
        seen: set[str] = set()
        queue = [later]
        while queue:
            for name in after.get(queue.pop(), ()):
                if name == earlier:
                    return True
                if name not in seen:
                    seen.add(name)
                    queue.append(name)
        return False


def names(value: Any) -> tuple[str, ...]:
    """The names of a field of parts: one, several or none. ValueError for anything else."""
    if value is None or value == "none":
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, (tuple, list)) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError("wanted names of parts")


def words(value: Any) -> str:
    """A value of the plan in a sentence."""
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in value) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
