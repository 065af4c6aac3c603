"""What one run of `luce-core` shares between its commands: arguments, plugins, options, models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from attrs import define

from luce_core import plugins
from luce_core.catalog import DEFAULT_MODEL, Catalog, Store, cache_folder, resolve_model
from luce_core.cli.console import pull_progress, warn
from luce_core.core_options import CoreOptions
from luce_core.errors import UsageError
from luce_core.option_fields import model_fields
from luce_core.options import (
    Options,
    choose_plugins,
    click_option,
    click_values,
    config_files,
    load_options,
    option_fields,
)
from luce_core.paths import expand_home
from luce_core.registry import CORE, Registry

if TYPE_CHECKING:
    from luce_core.option_fields import OptionField

EARLY = frozenset({"config", "plugin", "plugin_allow", "plugin_block"})
"""Options that decide which plugins load, and so which other options there are."""


@define
class Session:
    """Everything is found when first asked for, so that no command pays for what it does not use."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path

    @cached_property
    def files(self) -> list[Path]:
        """Config files, strongest first."""
        return config_files(self.env, self.cwd)

    @cached_property
    def make_registry(self) -> Callable[[], Registry]:
        """Finds the plugins this run uses, in any process of it."""
        chosen = choose_plugins(_early_values(self.argv), self.env, self.files)
        return partial(plugins.discover, allow=chosen.allow, block=chosen.block, named=chosen.named)

    @cached_property
    def registry(self) -> Registry:
        """All plugins. Raises PluginError when one the user named did not load."""
        registry = self.make_registry()
        for notice in registry.notices:
            warn(notice)
        return registry

    @cached_property
    def fields(self) -> list[OptionField]:
        """Every option of the core and the loaded plugins."""
        return option_fields(self.registry)

    def options(self, params: Mapping[str, Any]) -> Options:
        """Options out of what click parsed and the other sources; notices go to standard error."""
        options = load_options(
            self.registry,
            click_values(self.fields, _with_model(params)),
            self.env,
            self.files,
            default_model=DEFAULT_MODEL,
        )
        for notice in options.notices:
            warn(notice)
        return options

    @cached_property
    def given(self) -> Options:
        """The options of commands that take no flags for them: environment, files, defaults."""
        return self.options({})

    @cached_property
    def catalog(self) -> Catalog:
        """Models that can be named; a name two plugins claim is an error only when it is used."""
        names = self.registry.names("model")
        unique = [name for name in names if len(self.registry.declared[f"model.{name}"]) == 1]
        return Catalog.of(self.registry.model(name).value for name in unique)

    def store(self, options: Options) -> Store:
        """Where pulled models lie."""
        return Store(options.core.cache or cache_folder(self.env))

    def model_path(self, options: Options, model: str | None = None) -> Path:
        """The file of the model the options name (the default one if none), pulled if it is not here."""
        name = model or options.core.model or DEFAULT_MODEL
        if not expand_home(name).exists() and self.registry.declared.get(f"model.{name}"):
            self.registry.model(name)  # says who else claims the name
        with pull_progress(name) as progress:
            return resolve_model(name, self.catalog, self.store(options), progress)


def _early_values(argv: tuple[str, ...]) -> dict[str, Any]:
    """The options that must be known before plugins are, out of a command line that is otherwise unread."""
    items = [item for item in model_fields(CoreOptions, CORE) if item.name in EARLY]
    reader = click.Command(
        "luce-core",
        params=[click_option(item) for item in items],
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    return click_values(items, reader.make_context("luce-core", list(argv)).params)


def _with_model(params: Mapping[str, Any]) -> dict[str, Any]:
    """`MODEL` and `--model` are two spellings of one option."""
    said = dict(params)
    positional = said.pop("model_argument", None)
    if positional is not None:
        if said.get("model") not in (None, positional):
            raise UsageError(
                f"Two models were named: {positional!r} and --model {said['model']!r}. Name one of them."
            )
        said["model"] = positional
    return said
