"""Every check between an entry point and a loaded record, before and after the plugin's import."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pluggy
from attrs import define, evolve, field, frozen
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from pydantic import BaseModel

from luce_core import hookspecs
from luce_core.contracts import (
    API,
    ArchSpec,
    CatalogEntry,
    CommandSpec,
    OpLayer,
    PartSpec,
    PluginInfo,
    Profile,
    QuantFormat,
)
from luce_core.errors import LuceError
from luce_core.option_fields import OptionField, model_fields
from luce_core.registry import (
    CORE,
    FACTORY,
    BoundHook,
    PluginRecord,
    Status,
    check_types,
    closest,
    declarations,
    guarded,
)

CORE_DISTRIBUTION = "luce-core"

DECLARING: Mapping[str, tuple[type, ...]] = {
    "luce_register_archs": (ArchSpec,),
    "luce_register_ops": (OpLayer,),
    "luce_register_quants": (QuantFormat,),
    "luce_register_drafters": (PartSpec,),
    "luce_register_schedulers": (PartSpec,),
    "luce_register_parts": (PartSpec,),
    "luce_register_catalog": (CatalogEntry, Profile),
    "luce_register_commands": (CommandSpec,),
}
"""Hooks called while discovering, and what they return. Devices are looked for when a plan needs them."""

NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
KINDS_OF: Mapping[str, frozenset[str]] = {
    "luce_register_drafters": frozenset({"drafter"}),
    "luce_register_schedulers": frozenset({"scheduler"}),
    "luce_register_parts": frozenset({"executor", "reducer", "residency", "experts", "encoder", "chat"}),
}


class Refused(Exception):
    """A plugin failed a check; carries what becomes of its record."""

    def __init__(self, status: Status, reason: str) -> None:
        self.status = status
        super().__init__(reason)


@frozen
class Candidate:
    """A plugin before it is loaded."""

    name: str
    load: Callable[[], Any]
    distribution: str = ""
    version: str = ""
    requires: tuple[str, ...] = ()

    def record(self, status: Status, reason: str = "", info: PluginInfo | None = None) -> PluginRecord:
        return PluginRecord(self.name, self.distribution, self.version, status, reason, info)


@define
class Found:
    """A candidate on its way through the checks."""

    candidate: Candidate
    record: PluginRecord
    hooks: list[BoundHook] = field(factory=list)
    declared: list[tuple[str, Any]] = field(factory=list)
    fields: list[OptionField] = field(factory=list)

    def refuse(self, status: Status, reason: str) -> None:
        self.record = evolve(self.record, status=status, reason=reason)


def run_check(find: Found, check: Callable[[Found], None]) -> None:
    """Run one check on a plugin that passed all before it; a refusal goes into its record."""
    if find.record.status != "loaded":
        return
    try:
        check(find)
    except Refused as refused:
        find.refuse(refused.status, str(refused))


def check_before_import(
    candidates: Sequence[Candidate],
    lists: tuple[frozenset[str], frozenset[str], frozenset[str]],
    core_version: str,
    find: Found,
) -> None:
    """Everything that is known from metadata alone. lists: allowed, blocked and named plugins."""
    candidate = find.candidate
    allowed, blocked, named = lists
    if candidate.name in blocked:
        raise Refused("blocked", "--plugin-block names it")
    if allowed and candidate.name not in allowed | named:
        raise Refused("blocked", "--plugin-allow does not name it")
    if candidate.name == CORE:
        raise Refused("duplicate", "'core' is the name of the core's own plugin; its authors must rename it")
    twins = [c.distribution for c in candidates if c.name == candidate.name and c is not candidate]
    if twins:
        raise Refused(
            "duplicate",
            f"{' and '.join(sorted(twins))} has a plugin of the same name; uninstall all but one",
        )
    _check_requirements(candidate, core_version)


def _check_requirements(candidate: Candidate, core_version: str) -> None:
    for text in candidate.requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            raise Refused("broken", f"its metadata has the invalid requirement {text!r} ({error})") from None
        if canonicalize_name(requirement.name) != CORE_DISTRIBUTION:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if not requirement.specifier.contains(core_version, prereleases=True):
            raise Refused(
                "incompatible",
                f"it needs luce-core{requirement.specifier}; this is {core_version}. Upgrade luce-core or "
                f"install another version of {candidate.distribution}",
            )


# --- import, and after


def load(find: Found) -> None:
    """Import the module of hooks and check it; fills the find's hooks, declarations and info."""
    candidate = find.candidate
    module = _attempt("importing it", candidate.load)
    hooks = _hooks_of(module, candidate.name)
    find.hooks = hooks
    by_name = {bound.hook: bound for bound in hooks}
    info = _info_of(by_name, candidate.name)
    find.record = evolve(find.record, info=info)
    if info.options is not None:
        find.fields = _option_fields(info)
    for hook, of in DECLARING.items():
        if hook in by_name:
            for item in _declared(by_name[hook], of):
                find.declared += [(key, item) for key in _keys_of(hook, item)]
    repeated = [key for key, _ in find.declared if sum(key == other for other, _ in find.declared) > 1]
    if repeated:
        raise Refused("broken", f"it declares {repeated[0]!r} twice")


def _hooks_of(module: Any, name: str) -> list[BoundHook]:
    """The marked hooks of a module, all of them known and called with arguments the core has."""
    manager = _manager()
    known = {hook for hook in dir(hookspecs) if hook.startswith("luce_")}
    marked = {item for item in dir(module) if manager.parse_hookimpl_opts(module, item) is not None}
    for item in sorted(set(dir(module)) - marked):
        if item in known and inspect.isroutine(getattr(module, item)):
            raise Refused("broken", f"its function {item!r} is not marked with @hookimpl")
    for item in sorted(marked):
        options = manager.parse_hookimpl_opts(module, item)
        assert options is not None, item
        hook = options["specname"] or item
        if options["wrapper"] or options["hookwrapper"]:
            raise Refused("broken", f"its {item!r} is a hook wrapper; the core wraps nothing")
        if hook not in known and not options["optionalhook"]:
            raise Refused("broken", f"it implements {hook!r}, which is no hook.{closest(hook, known)}")
        if hook in known:
            _check_arguments(getattr(module, item), hook)
    try:
        manager.register(module, name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise Refused("broken", " ".join(str(error).split())) from error
    return [
        BoundHook(name, caller.name, impl.function, tuple(impl.argnames))
        for caller in manager.get_hookcallers(module) or ()
        for impl in caller.get_hookimpls()
        if caller.name in known
    ]


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def _check_arguments(function: Callable[..., Any], hook: str) -> None:
    wanted = list(inspect.signature(getattr(hookspecs, hook)).parameters)
    got = list(inspect.signature(function).parameters)
    extra = [name for name in got if name not in wanted]
    if extra:
        takes = f"takes {', '.join(wanted)}" if wanted else "takes no arguments"
        raise Refused("broken", f"its {hook!r} asks for {extra[0]!r}, but that hook {takes}")


def _info_of(hooks: Mapping[str, BoundHook], name: str) -> PluginInfo:
    if "luce_plugin_info" not in hooks:
        raise Refused("broken", "it does not implement luce_plugin_info, the one mandatory hook")
    info = _attempt("luce_plugin_info", hooks["luce_plugin_info"])
    if not isinstance(info, PluginInfo):
        raise Refused("broken", f"luce_plugin_info returned {info!r}, wanted a PluginInfo")
    _attempt("luce_plugin_info", partial(check_types, info, "luce_plugin_info returned"))
    if info.api != API:
        raise Refused(
            "incompatible",
            f"it was written for hook API {info.api}; this core speaks {API}. "
            f"Upgrade {'luce-core' if info.api > API else 'the plugin'}",
        )
    if info.name != name:
        raise Refused("broken", f"its entry point is called {name!r} and its PluginInfo {info.name!r}")
    if name != CORE and not NAME.fullmatch(name):
        raise Refused("broken", f"its name {name!r} is not kebab-case (letters, digits, single hyphens)")
    return info


def _option_fields(info: PluginInfo) -> list[OptionField]:
    model = info.options
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise Refused("broken", f"its options are {model!r}, wanted a pydantic model")
    required = [name for name, item in model.model_fields.items() if item.is_required()]
    if required:
        raise Refused("broken", f"its option {required[0]!r} has no default; every option needs one")
    return model_fields(model, info.name)


def _attempt(subject: str, call: Callable[[], Any]) -> Any:
    try:
        return guarded(subject, call)
    except LuceError as error:
        raise Refused("broken", str(error)) from error


def _declared(bound: BoundHook, of: tuple[type, ...]) -> list[Any]:
    try:
        return declarations(bound, of)
    except LuceError as error:
        raise Refused("broken", str(error)) from error


def _keys_of(hook: str, item: Any) -> list[str]:
    """The registry keys of one declaration; its factories are checked for form, not imported."""
    for attribute in ("factory", "describe", "build", "dequantize"):
        factory = getattr(item, attribute, None)
        if factory is not None and not FACTORY.fullmatch(factory):
            raise Refused("broken", f"{item.name if hasattr(item, 'name') else item.names}: {attribute} is "
                                     f"{factory!r}, wanted 'module:callable'")
    if isinstance(item, ArchSpec):
        if item.geometries and not FACTORY.fullmatch(item.geometries):
            raise Refused("broken", f"{item.names}: geometries is {item.geometries!r}, wanted "
                                     "'module:callable'")
        return [f"arch.{name}" for name in item.names]
    if isinstance(item, PartSpec):
        if item.layout and not (item.kind == "drafter" and FACTORY.fullmatch(item.layout)):
            raise Refused("broken", f"the {item.kind} {item.name!r} names the layout {item.layout!r}; wanted "
                                     "'module:fn', and for drafters only")
        if item.kind not in KINDS_OF[hook]:
            raise Refused("broken", f"{hook} returned the {item.kind} {item.name!r}; wanted "
                                     f"{' or '.join(sorted(KINDS_OF[hook]))}")
        return [f"{item.kind}.{item.name}"]
    kinds = {OpLayer: "ops", QuantFormat: "quant", CatalogEntry: "model", Profile: "profile"}
    return [f"{kinds.get(type(item), 'command')}.{item.name}"]


