"""Plugins made up in a test: as a module of hooks in memory, or as an installed distribution in a folder."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

from luce_core.contracts import API, PluginInfo
from luce_core.hookspecs import hookimpl


def make_plugin(
    name: str,
    *,
    api: int = API,
    options: type | None = None,
    after: tuple[str, ...] = (),
    conflicts: Mapping[str, str] | None = None,
    **hooks: Any,
) -> types.ModuleType:
    """A module of hooks for `plugins.from_modules`.

    hooks: hook name -> the function that implements it, or the value it returns.
    """
    module = types.ModuleType(f"fake_{name.replace('-', '_')}")
    info = PluginInfo(name=name, api=api, options=options, after=after, conflicts=dict(conflicts or {}))
    for hook, given in {"luce_plugin_info": info, **hooks}.items():
        function: Callable[..., Any] = given if inspect.isfunction(given) else _returning(given)
        function.__name__ = hook
        setattr(module, hook, hookimpl(function))
    return module


def _returning(value: Any) -> Callable[[], Any]:
    def hook() -> Any:
        return value

    return hook


def install(
    folder: Path,
    distribution: str,
    *,
    version: str = "1.0",
    plugins: Mapping[str, str] | None = None,
    provides: Iterable[str] = (),
    requires: Iterable[str] = (),
    modules: Mapping[str, str] | None = None,
) -> None:
    """Write what an installed distribution looks like into `folder`, which the test puts on `sys.path`.

    plugins: entry points, name -> module; modules: module -> its source.
    """
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    needs = "".join(f"Requires-Dist: {text}\n" for text in requires)
    header = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{needs}"
    (info / "METADATA").write_text(header, encoding="utf-8")
    lines = ["[luce_core.plugins]", *(f"{name} = {value}" for name, value in (plugins or {}).items())]
    lines += ["[luce_core.provides]", *(f"{key} = somewhere" for key in provides)]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for module, source in (modules or {}).items():
        (folder / f"{module}.py").write_text(dedent(source), encoding="utf-8")
