"""Discovery: every installed plugin becomes a record, and what the loaded ones declare becomes the registry.

Entry-point group `luce_core.plugins` names each plugin's module of hooks; `luce_core.provides` is a static
index that is read without importing anything. A plugin is checked before it is imported (allow and block
lists, unique name, the versions of luce-core it accepts), while it is imported, and after (API number, hooks
the core does not know, what its hooks return). A plugin that fails a check costs itself only. One the user
named is an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from graphlib import CycleError, TopologicalSorter
from typing import Any

import importlib_metadata as metadata
from attrs import evolve
from packaging.utils import canonicalize_name

import luce_core
from luce_core import builtin
from luce_core.contracts import PluginInfo, Problem
from luce_core.core_options import CoreOptions
from luce_core.errors import PluginError, UsageError
from luce_core.option_fields import model_fields, spellings
from luce_core.plugin_checks import (
    CORE_DISTRIBUTION,
    DECLARING,
    Candidate,
    Found,
    check_before_import,
    load,
    run_check,
)
from luce_core.registry import CORE, BoundHook, PluginRecord, Registry, Supplied, choices, closest

PLUGINS_GROUP = "luce_core.plugins"
PROVIDES_GROUP = "luce_core.provides"

# --- the two ways in


def discover(
    *,
    allow: Iterable[str] = (),
    block: Iterable[str] = (),
    named: Iterable[str] = (),
    distributions: Iterable[metadata.Distribution] | None = None,
    core_version: str = luce_core.__version__,
) -> Registry:
    """Find every installed plugin.

    allow: when not empty, the only plugins to load; block: plugins not to load; named: those that must load.
    distributions: where to look, by default everything installed. Raises PluginError when a named plugin
    did not load, UsageError when a list is absurd; whatever is wrong with another plugin is in its record.
    """
    allowed, blocked, wanted = frozenset(allow), frozenset(block), frozenset(named)
    if CORE in blocked:
        raise UsageError(f"Plugin {CORE!r} is the core itself: take it off --plugin-block.")
    candidates, provides = _read_entry_points(
        metadata.Distribution.discover() if distributions is None else distributions
    )
    finds = [Found(candidate, candidate.record("loaded")) for candidate in candidates]
    for find in finds:
        run_check(find, partial(check_before_import, candidates, (allowed, blocked, wanted), core_version))
    registry = _registry([_core_find(), *finds], provides, wanted)
    known = [record.name for record in registry.records]
    notices = [
        f"--plugin-{option} names {name!r}, which is not installed.{closest(name, known)}"
        for option, names in (("allow", allowed), ("block", blocked))
        for name in sorted(names - set(known))
    ]
    _require_named(registry, wanted)
    return evolve(registry, notices=tuple(notices))


def from_modules(
    modules: Sequence[Any], *, provides: Mapping[str, tuple[str, ...]] | None = None
) -> Registry:
    """A registry of exactly these modules of hooks and the core's own: for tests and embedding.

    The same checks apply, but here a module that fails one raises PluginError.
    """
    finds: list[Found] = []
    for module in modules:
        name = _name_of(module)
        candidate = Candidate(name, partial(_itself, module))
        find = Found(candidate, candidate.record("loaded"))
        if any(other.candidate.name == name for other in finds):
            find.refuse("duplicate", f"two modules of hooks are called {name!r}; names are unique")
        finds.append(find)
    registry = _registry([_core_find(), *finds], provides or {}, frozenset())
    for record in registry.records:
        if record.status != "loaded":
            raise PluginError(_not_loaded(record))
    return registry


def _itself(module: Any) -> Any:
    return module


def _name_of(module: Any) -> str:
    info = getattr(module, "luce_plugin_info", None)
    if info is None:
        return str(getattr(module, "__name__", module))
    return str(getattr(info(), "name", module))


def _core_find() -> Found:
    candidate = Candidate(CORE, lambda: builtin, CORE_DISTRIBUTION, luce_core.__version__)
    return Found(candidate, candidate.record("loaded"))


def _require_named(registry: Registry, named: frozenset[str]) -> None:
    sentences = []
    for name in sorted(named):
        try:
            record = registry.record(name)
        except KeyError:
            known = [record.name for record in registry.records]
            sentences.append(
                f"Plugin {name!r} was asked for and is not installed.{closest(name, known)} "
                f"Installed: {choices(known)}. Install the package that provides it, or take it off --plugin."
            )
            continue
        if record.status != "loaded":
            sentences.append(_not_loaded(record))
    if sentences:
        raise PluginError("\n".join(sentences))


def _not_loaded(record: PluginRecord) -> str:
    return f"P{record.title[1:]} was asked for and is {record.status}: {record.reason}."


# --- before import


def _read_entry_points(
    distributions: Iterable[metadata.Distribution],
) -> tuple[list[Candidate], dict[str, tuple[str, ...]]]:
    """Candidates and the static index, from metadata alone.

    The first distribution of a name wins, as its modules do in an import.
    """
    candidates: list[Candidate] = []
    provides: dict[str, tuple[str, ...]] = {}
    seen: set[str] = set()
    for distribution in distributions:
        entry_points = _entry_points(distribution)
        if entry_points == []:
            continue  # almost every distribution: its other metadata is not even read
        name, version, requires = _identity(distribution)
        if canonicalize_name(name) in seen:
            continue
        seen.add(canonicalize_name(name))
        if entry_points is None:
            candidates.append(Candidate(name, _malformed_entry_points, name, version))
            continue
        for entry_point in entry_points:
            if entry_point.group == PROVIDES_GROUP:
                provides[entry_point.name] = (*provides.get(entry_point.name, ()), name)
            else:
                candidates.append(Candidate(entry_point.name, entry_point.load, name, version, requires))
    return sorted(candidates, key=lambda item: (item.name, item.distribution)), provides


def _entry_points(distribution: metadata.Distribution) -> list[metadata.EntryPoint] | None:
    """Those of our groups; None when the distribution has some and its file cannot be read."""
    try:
        found = list(distribution.entry_points)
    except (TypeError, ValueError, KeyError, AttributeError):
        text = _entry_points_text(distribution)
        return None if PLUGINS_GROUP in text or PROVIDES_GROUP in text else []
    return [item for item in found if item.group in (PLUGINS_GROUP, PROVIDES_GROUP)]


def _entry_points_text(distribution: metadata.Distribution) -> str:
    try:
        return distribution.read_text("entry_points.txt") or ""
    except UnicodeDecodeError as error:
        return error.object.decode("utf-8", "replace")


def _malformed_entry_points() -> Any:
    raise PluginError("its entry_points.txt is malformed; reinstall the package")


def _identity(distribution: metadata.Distribution) -> tuple[str, str, tuple[str, ...]]:
    """Name, version and requirements; of a distribution whose metadata is damaged, what can be read."""
    try:
        return distribution.name, distribution.version, tuple(distribution.requires or ())
    except (metadata.MetadataNotFound, KeyError, TypeError, ValueError):
        return str(getattr(distribution, "_path", distribution)), "unknown version", ()


# --- the registry


def _registry(
    finds: Sequence[Found], provides: Mapping[str, tuple[str, ...]], named: frozenset[str]
) -> Registry:
    for find in finds:
        run_check(find, load)
    _check_flags(finds)
    loaded = {find.candidate.name: find for find in finds if find.record.status == "loaded"}
    order, problems = order_plugins({name: find.record.info for name, find in loaded.items()})
    declared: dict[str, list[Supplied[Any]]] = defaultdict(list)
    hooks: dict[str, list[BoundHook]] = defaultdict(list)
    for name in order:
        for key, item in loaded[name].declared:
            declared[key].append(Supplied(name, item))
        for bound in loaded[name].hooks:
            hooks[bound.hook].append(bound)
    rest = sorted((f.record for f in finds if f.record.status != "loaded"), key=lambda r: r.name)
    return Registry(
        records=(*(loaded[name].record for name in order), *rest),
        declared={key: tuple(items) for key, items in declared.items()},
        provides=dict(provides),
        hooks={hook: tuple(items) for hook, items in hooks.items() if hook not in DECLARING},
        problems=(*problems, *_conflicts([loaded[name].record for name in order])),
        named=named,
    )


def _check_flags(finds: Sequence[Found]) -> None:
    """No flag, and so no environment variable, may have two owners. All but the core lose it."""
    owners: dict[str, list[Found]] = defaultdict(list)
    core_flags = {spelling for item in model_fields(CoreOptions, CORE) for spelling in spellings(item)}
    for find in finds:
        for item in find.fields:
            owners[item.flag].append(find)
    for find in finds:
        if find.record.status != "loaded":
            continue
        for item in find.fields:
            others = [other.candidate.name for other in owners[item.flag] if other is not find]
            if item.flag in core_flags:
                others.append(CORE)
            if others:
                find.refuse("broken", f"its flag {item.flag} is also one of plugin {others[0]!r}")
                break


def _conflicts(records: Sequence[PluginRecord]) -> list[Problem]:
    names = {record.name: record for record in records}
    return [
        Problem(
            f"P{record.title[1:]} and {names[other].title} cannot work together: {reason}",
            f"Leave one out: --plugin-block {other} or --plugin-block {record.name}.",
        )
        for record in records
        if record.info is not None
        for other, reason in record.info.conflicts.items()
        if other in names
    ]


def order_plugins(infos: Mapping[str, PluginInfo | None]) -> tuple[list[str], list[Problem]]:
    """The core, then plugins after those they name in `after`, ties by name. A cycle is broken by name and
    reported.
    """
    graph = {
        name: sorted({other for other in (info.after if info else ()) if other in infos} - {CORE})
        for name, info in sorted(infos.items())
        if name != CORE
    }
    problems: list[Problem] = []
    while True:
        sorter = TopologicalSorter(graph)
        try:
            sorter.prepare()
            break
        except CycleError as error:
            circle: list[str] = error.args[1][:0:-1]
            first = min(circle)
            turned = circle[circle.index(first) :] + circle[: circle.index(first)]
            problems.append(
                Problem(
                    f"Plugins ask to come after one another in a circle: {' after '.join([*turned, first])}.",
                    f"Leave one out: --plugin-block {first}.",
                )
            )
            graph[first] = [other for other in graph[first] if other not in circle]
    order = [CORE] if CORE in infos else []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        order += ready
        sorter.done(*ready)
    return order, problems
