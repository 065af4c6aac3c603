"""The contract of every plugin, whatever it declares."""

from __future__ import annotations

import importlib
from typing import Any

import importlib_metadata
from pydantic import BaseModel

from luce_core.contracts import ArchSpec, CommandSpec, OpLayer, PartSpec, QuantFormat
from luce_core.plugins import from_modules
from luce_core.registry import Registry, resolve
from luce_core.testing.contract import Contract
from luce_core.testing.fresh import run_fresh

HEAVY = ("torch", "triton")
_PROBE = """
import importlib, sys
importlib.import_module(sys.argv[1])
from luce_core.plugins import from_modules
registry = from_modules([sys.modules[sys.argv[1]]])
registry.find_devices()
print(" ".join(name for name in sys.argv[2:] if name in sys.modules))
"""


def registry_of(*hooks: str) -> Registry:
    """A registry of exactly these modules of hooks, and the core's own: nothing installed is looked at."""
    return from_modules([importlib.import_module(name) for name in hooks])


class PluginContract(Contract):
    """A module of hooks that loads alone, cheaply, and declares what exists."""

    hooks: str
    """Dotted name of the module the entry point names."""
    distribution: str = ""
    """Its distribution; when given, the static index is compared with what the hooks declare."""

    def test_it_loads_beside_the_core_alone(self) -> None:
        records = {record.name: record for record in registry_of(self.hooks).records}
        assert [record.status for record in records.values()] == ["loaded", "loaded"], records

    def test_its_hooks_import_neither_torch_nor_triton(self) -> None:
        heavy = run_fresh(_PROBE, self.hooks, *HEAVY).split()
        assert not heavy, f"importing {self.hooks!r} and asking its hooks imported {heavy}"

    def test_every_callable_it_names_exists(self) -> None:
        registry = registry_of(self.hooks)
        for key, factory in _factories(registry, self._name()):
            assert callable(resolve(factory, key))

    def test_its_options_say_what_they_are(self) -> None:
        info = registry_of(self.hooks).record(self._name()).info
        model: Any = info.options if info else None
        if model is None:
            return
        assert issubclass(model, BaseModel), f"options are {model!r}, wanted a pydantic model"
        silent = [name for name, field in model.model_fields.items() if not field.description]
        assert not silent, f"options without a description: {silent}"
        required = [name for name, field in model.model_fields.items() if field.is_required()]
        assert not required, f"options without a default keep everyone else from starting: {required}"

    def test_the_static_index_lists_what_the_hooks_declare(self) -> None:
        if not self.distribution:
            return
        registry, own = registry_of(self.hooks), self._name()
        declared = {
            key for key, given in registry.declared.items() if any(item.plugin == own for item in given)
        }
        declared |= {f"device.{device.value.id.partition(':')[0]}" for device in registry.find_devices()[0]}
        entries = importlib_metadata.distribution(self.distribution).entry_points
        listed = {entry.name for entry in entries if entry.group == "luce_core.provides"}
        indexed = {key for key in declared if key.partition(".")[0] not in ("device", "profile", "model")}
        assert indexed <= listed, f"declared but not in 'luce_core.provides': {sorted(indexed - listed)}"
        assert listed <= declared or any(key.startswith("device.") for key in listed - declared), (
            f"in 'luce_core.provides' but not declared: {sorted(listed - declared)}"
        )

    def _name(self) -> str:
        return next(r.name for r in registry_of(self.hooks).records if r.name != "core")


def _factories(registry: Registry, plugin: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, given in registry.declared.items():
        for item in given:
            if item.plugin == plugin:
                found += [(key, factory) for factory in _named(item.value)]
    return found


def _named(value: Any) -> list[str]:
    if isinstance(value, ArchSpec):
        return [value.describe, value.build]
    if isinstance(value, OpLayer):
        return [named for named in (*(op.fn for op in value.ops), *value.self_checks, value.prepare) if named]
    if isinstance(value, PartSpec):
        return [named for named in (value.factory, value.layout, value.processor) if named]
    if isinstance(value, CommandSpec):
        return [value.factory]
    return [value.dequantize] if isinstance(value, QuantFormat) else []
