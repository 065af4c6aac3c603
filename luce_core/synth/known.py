"""The geometries of all installed architecture plugins, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from luce_core.contracts import Geometry
from luce_core.errors import PluginError, UsageError
from luce_core.registry import Registry, Supplied, closest, guarded, resolve

NAME: Final = re.compile(r"[a-z0-9][a-z0-9.-]*")


def geometries(registry: Registry) -> list[Supplied[Geometry]]:
    """All of them, with the plugin each is from. Raises PluginError for a plugin that breaks its contract."""
    factories = {(item.plugin, item.value.geometries): None for item in registry.archs()}
    return [
        Supplied(plugin, geometry)
        for plugin, factory in factories
        if factory
        for geometry in _of(registry, plugin, factory)
    ]


def find(registry: Registry, name: str) -> Geometry:
    """The geometry called `name`, or with that alias. Raises UsageError saying what there is."""
    known = by_name(registry)
    if name not in known:
        raise UsageError(
            f"No installed plugin knows the geometry {name!r}.{closest(name, known)} "
            "`luce-core synth --list` shows what there is."
        )
    return known[name].value


def by_name(registry: Registry) -> Mapping[str, Supplied[Geometry]]:
    """Names and aliases. Raises PluginError for one that two geometries claim."""
    found: dict[str, Supplied[Geometry]] = {}
    for item in geometries(registry):
        for name in (item.value.name, *item.value.aliases):
            other = found.setdefault(name, item)
            if other is not item:
                raise PluginError(
                    f"Geometry {name!r} is declared by {registry.title(other.plugin)} and by "
                    f"{registry.title(item.plugin)}. Keep one: --plugin-block {item.plugin}."
                )
    return found


def _of(registry: Registry, plugin: str, factory: str) -> list[Geometry]:
    subject = f"P{registry.title(plugin)[1:]}: its geometries {factory!r}"
    found = guarded(subject, resolve(factory, subject))
    for item in found:
        if not isinstance(item, Geometry):
            raise PluginError(f"{subject} returned {item!r}, wanted a Geometry.")
        wrong = [name for name in (item.name, *item.aliases) if not NAME.fullmatch(name)]
        if wrong:
            raise PluginError(
                f"{subject} has the name {wrong[0]!r}, wanted lower-case letters, digits, '-' and '.'."
            )
    return list(found)
