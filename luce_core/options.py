"""From what the user said to validated options: command line > environment > file > profile > card > default.

Every value is read strictly, every option remembers who set it, and everything wrong is reported at once.
The same loader serves the core's options and those of plugins, which live in a namespace of their own:
`--NAME-FIELD`, `LUCE_NAME_FIELD`, and the table `[NAME]` of a config file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from attrs import Factory, define, field, frozen
from pydantic import BaseModel, ValidationError

from luce_core.contracts import Provenance, Source
from luce_core.core_options import CoreOptions
from luce_core.errors import PluginError, UsageError
from luce_core.option_fields import OptionField, model_fields, spellings
from luce_core.registry import CORE, Registry, closest

ENV_PREFIX = "LUCE_"
OLD_ENV_PREFIX = "DFLASH_"
"""What predecessors of this server read; accepted for options the core knows, with a notice."""
USER: frozenset[Source] = frozenset({"cli", "env", "file"})
"""Sources that are the user's own word: no plugin patches such a field."""


@frozen
class OptionRow:
    """One line of `config show`."""

    name: str
    value: str
    source: Source
    by: str


@frozen
class PluginChoice:
    """What must be known before plugins are discovered."""

    allow: tuple[str, ...]
    block: tuple[str, ...]
    named: tuple[str, ...]


@frozen
class Options:
    """Validated options of the core and of every loaded plugin, each with its origin."""

    core: CoreOptions
    plugins: Mapping[str, BaseModel]
    origin: Mapping[str, Provenance]
    """Option name ("ctx_size", "cpu.exact") -> who set it."""
    fields: tuple[OptionField, ...]
    notices: tuple[str, ...] = ()

    def plugin(self, name: str) -> BaseModel | None:
        """The options of one plugin; None if it has none."""
        return self.plugins.get(name)

    def value(self, item: OptionField) -> Any:
        """The value of one option."""
        return getattr(self.core if item.plugin == CORE else self.plugins[item.plugin], item.field)

    def set_by_user(self, name: str) -> bool:
        """Whether the user said it, rather than a profile, a model card or a default."""
        return self.origin[name].source in USER

    def masked(self) -> list[OptionRow]:
        """Every option as `config show` prints it: secrets masked, with its origin."""
        return [
            OptionRow(item.name, item.show(self.value(item)), origin.source, origin.by)
            for item in self.fields
            for origin in [self.origin[item.name]]
        ]


@define
class _Layer:
    """What one source says, by option name; already of the right type, not yet validated."""

    source: Source
    by: Callable[[OptionField], str]
    values: dict[str, Any] = Factory(dict)


@define
class _Reader:
    """Collects layers, strongest first, and everything wrong with them."""

    fields: Sequence[OptionField]
    registry: Registry | None = None
    partial: bool = False
    """Only some options are known yet: say nothing about the others."""
    layers: list[_Layer] = field(factory=list)
    problems: list[str] = field(factory=list)
    notices: list[str] = field(factory=list)

    def add_cli(self, given: Mapping[str, Any]) -> None:
        known = {item.name: item for item in self.fields}
        layer = _Layer("cli", lambda item: item.flag)
        for name, value in given.items():
            if value is None or (isinstance(value, tuple) and value == ()):
                continue
            if name not in known:
                if not self.partial:
                    self.problems.append(unknown_flag("--" + name.replace("_", "-").replace(".", "-"), self))
                continue
            self._set(layer, known[name], value, known[name].flag)
        self.layers.append(layer)

    def add_env(self, environment: Mapping[str, str]) -> None:
        known = {item.env: item for item in self.fields}
        layer = _Layer("env", lambda item: item.env)
        for name in sorted(environment):
            if name.startswith(ENV_PREFIX):
                if name in known:
                    self._set(layer, known[name], environment[name], name)
                elif not self.partial:
                    self.problems.append(unknown_env(name, self))
        for name in sorted(environment):
            item = known.get(ENV_PREFIX + name.removeprefix(OLD_ENV_PREFIX))
            if name.startswith(OLD_ENV_PREFIX) and item is not None and item.name not in layer.values:
                self._set(layer, item, environment[name], name)
                self.notices.append(f"{name} is read as {item.env}; use that name.")
        self.layers.append(layer)

    def add_file(self, path: Path) -> None:
        layer = _Layer("file", lambda item: f"{path}: {item.key}")
        self.layers.append(layer)
        table = self._read_toml(path)
        known = {(item.plugin, item.field): item for item in self.fields}
        plugins = {item.plugin for item in self.fields} - {CORE}
        for key, value in table.items():
            if isinstance(value, dict):
                if key in plugins:
                    self._add_table(layer, path, key, value)
                elif not self.partial:
                    self.problems.append(self._unknown_table(path, key, plugins))
                continue
            item = known.get((CORE, key.replace("-", "_")))
            if item is not None:
                self._set(layer, item, value, f"{path}: {key}")
            elif not self.partial:
                names = [item.key for item in self.fields if item.plugin == CORE]
                self.problems.append(f"{path}: unknown option {key!r}.{closest(key, names)}")

    def _add_table(self, layer: _Layer, path: Path, plugin: str, table: Mapping[str, Any]) -> None:
        known = {item.field: item for item in self.fields if item.plugin == plugin}
        for key, value in table.items():
            item = known.get(key.replace("-", "_"))
            if item is None:
                names = [name.replace("_", "-") for name in known]
                self.problems.append(f"{path}: unknown option {key!r} in [{plugin}].{closest(key, names)}")
            else:
                self._set(layer, item, value, f"{path}: [{plugin}] {key}")

    def _unknown_table(self, path: Path, key: str, plugins: Iterable[str]) -> str:
        return f"{path}: table [{key}] belongs to no loaded plugin.{closest(key, plugins)} {self.owner(key)}"

    def _read_toml(self, path: Path) -> dict[str, Any]:
        try:
            return tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            self.problems.append(f"{path}: cannot be read ({error}).")
        except tomllib.TOMLDecodeError as error:
            self.problems.append(f"{path}: is not valid TOML ({error}).")
        return {}

    def add_defaults(self, source: Source, by: str, values: Mapping[str, Any]) -> None:
        """A profile or a model card: dotted names; a name of a plugin that is not installed is skipped."""
        known = {item.name: item for item in self.fields}
        plugins = {item.plugin for item in self.fields}
        layer = _Layer(source, lambda item: by)
        for name, value in values.items():
            item = known.get(name.replace("-", "_")) or known.get(name)
            owner = name.partition(".")[0] if "." in name else CORE
            if item is not None:
                self._set(layer, item, value, f"{by}: {name}")
            elif owner in plugins:
                self.problems.append(f"{by}: unknown option {name!r}.{closest(name, known)}")
            else:
                self.notices.append(f"{by} sets {name!r}, left out: {self.owner(owner)}")
        self.layers.append(layer)

    def owner(self, plugin: str) -> str:
        """Why options of `plugin` are unknown, and what to do."""
        for record in self.registry.records if self.registry else ():
            if record.name == plugin and record.status == "loaded":
                return f"{record.title} is loaded and has no such option."
            if record.name == plugin:
                return f"{record.title} is {record.status}: {record.reason}."
        return (
            f"No plugin {plugin!r} is installed; by the naming scheme it comes with one of: pip install "
            f"luce-{plugin}, luce-backend-{plugin}, luce-arch-{plugin}."
        )

    def _set(self, layer: _Layer, item: OptionField, value: Any, where: str) -> None:
        try:
            layer.values[item.name] = _read(item, value)
        except ValueError as error:
            shown = "****" if item.info.secret else repr(value)
            self.problems.append(f"{where} is {shown}: {error}.")

    def pick(self, item: OptionField) -> tuple[Any, Provenance]:
        for layer in self.layers:
            if item.name in layer.values:
                return layer.values[item.name], Provenance(layer.source, layer.by(item))
        return item.default, Provenance("default", "default")

    def raise_problems(self) -> None:
        if self.problems:
            raise UsageError("\n".join(self.problems))


def _read(item: OptionField, value: Any) -> Any:
    """Text becomes a value; a list of texts becomes values. TOML types are taken as they are."""
    if isinstance(value, str):
        return item.parse(value)
    if isinstance(value, (list, tuple)):
        if not item.multiple:
            raise ValueError("wanted one value, not a list")
        return tuple(one for part in value for one in _read(item, part))
    if isinstance(value, bool) != (item.base is bool) or item.base in (str, Path):
        raise ValueError(f"wanted {'true or false' if item.base is bool else item.metavar}")
    return (value,) if item.multiple else value


def _closest_words(word: str, known: Iterable[str], prefix: str) -> str:
    """The nearest known word, judged without the prefix they all share; a distant one is no help."""
    near = closest(word.removeprefix(prefix), [item.removeprefix(prefix) for item in known], cutoff=0.75)
    return near.replace("'", f"'{prefix}", 1)


def _prefix(words: str) -> str:
    return words.partition("-")[0]


def unknown_flag(flag: str, reader: _Reader) -> str:
    """The sentence for a flag nobody has: the nearest one, or the plugin that would have it."""
    known = [spelling for item in reader.fields for spelling in spellings(item)]
    near = _closest_words(flag, known, "--")
    return f"No option {flag!r}.{near or ' ' + reader.owner(_prefix(flag.lstrip('-').removeprefix('no-')))}"


def unknown_env(name: str, reader: _Reader) -> str:
    """The sentence for a LUCE_ variable nobody reads."""
    near = _closest_words(name, [item.env for item in reader.fields], ENV_PREFIX)
    words = name.removeprefix(ENV_PREFIX).lower().replace("_", "-")
    return f"{name} is set and nothing reads it.{near or ' ' + reader.owner(_prefix(words))}"


# --- what others call


def option_fields(registry: Registry) -> list[OptionField]:
    """Every option there is: the core's, then those of loaded plugins in `after` order."""
    fields = model_fields(CoreOptions, CORE)
    for record in registry.loaded():
        model = record.info.options if record.info else None
        if model is not None and issubclass(model, BaseModel):
            fields += model_fields(model, record.name)
    return fields


def explain_flag(flag: str, registry: Registry) -> str:
    """What to tell a user whose `flag` no option has."""
    return unknown_flag(flag, _Reader(option_fields(registry), registry))


def config_files(env: Mapping[str, str], cwd: Path) -> list[Path]:
    """The config files that exist, strongest first: ./luce.toml, then the user's own."""
    home = Path(env["HOME"]) if env.get("HOME") else Path.home()
    base = Path(env["XDG_CONFIG_HOME"]) if env.get("XDG_CONFIG_HOME") else home / ".config"
    return [path for path in (cwd / "luce.toml", base / "luce-core" / "config.toml") if path.is_file()]


def choose_plugins(cli: Mapping[str, Any], env: Mapping[str, str], files: Sequence[Path]) -> PluginChoice:
    """Which plugins to load, before any is discovered. UsageError tells what is wrong with that alone."""
    wanted = {"config", "plugin", "plugin_allow", "plugin_block"}
    reader = _Reader([f for f in model_fields(CoreOptions, CORE) if f.name in wanted], partial=True)
    _add_user(reader, cli, env, files)
    reader.raise_problems()
    picked = {item.name: reader.pick(item)[0] for item in reader.fields}
    return PluginChoice(picked["plugin_allow"], picked["plugin_block"], picked["plugin"])


def load_options(
    registry: Registry,
    cli: Mapping[str, Any],
    env: Mapping[str, str],
    files: Sequence[Path],
    *,
    card: Mapping[str, Any] | None = None,
    default_model: str | None = None,
) -> Options:
    """All options, validated. UsageError lists everything wrong with them.

    cli: option name -> value, None where the flag was not given; files: strongest first; card: recommended
    options of the model, by default those the catalogue has for the model's name. default_model: whose card
    counts when nobody names a model.
    """
    reader = _Reader(option_fields(registry), registry)
    _add_user(reader, cli, env, files)
    by_name = {item.name: item for item in reader.fields}
    profile = reader.pick(by_name["profile"])[0]
    if profile is not None:
        try:
            found = registry.profile(profile)
            reader.add_defaults("profile", f"profile {profile}", found.value.values)
        except PluginError as error:
            reader.problems.append(str(error))
    model = reader.pick(by_name["model"])[0] or default_model
    if card is None and isinstance(model, str) and registry.declared.get(f"model.{model}"):
        card = registry.model(model).value.card
    if card:
        reader.add_defaults("card", f"card of {model}", card)
    return _validate(reader)


def _add_user(
    reader: _Reader, cli: Mapping[str, Any], env: Mapping[str, str], files: Sequence[Path]
) -> None:
    reader.add_cli(cli)
    reader.add_env(env)
    config = reader.pick(next(item for item in reader.fields if item.name == "config"))[0]
    for path in files if config is None else [config]:
        reader.add_file(path)


def _validate(reader: _Reader) -> Options:
    values: dict[str, dict[str, Any]] = {CORE: {}}
    origin: dict[str, Provenance] = {}
    for item in reader.fields:
        value, source = reader.pick(item)
        origin[item.name] = source
        if source.source != "default":
            values.setdefault(item.plugin, {})[item.field] = value
    models: dict[str, BaseModel] = {}
    for plugin, model in _models(reader).items():
        try:
            models[plugin] = model(**values.get(plugin, {}))
        except ValidationError as error:
            for issue in error.errors():
                name = str(issue["loc"][0]) if issue["loc"] else ""
                known = next((f for f in reader.fields if (f.plugin, f.field) == (plugin, name)), None)
                where = origin[known.name].by if known else f"[{plugin}]"
                shown = "****" if known and known.info.secret else repr(issue["input"])
                reader.problems.append(f"{where} is {shown}: {issue['msg'].lower()}.")
    reader.raise_problems()
    core = models.pop(CORE)
    assert isinstance(core, CoreOptions), core
    return Options(core, models, origin, tuple(reader.fields), tuple(reader.notices))


def _models(reader: _Reader) -> dict[str, type[BaseModel]]:
    models: dict[str, type[BaseModel]] = {CORE: CoreOptions}
    for record in reader.registry.loaded() if reader.registry else ():
        model = record.info.options if record.info else None
        if model is not None and issubclass(model, BaseModel):
            models[record.name] = model
    return models


def _parameter(item: OptionField) -> str:
    return item.name.replace("-", "_").replace(".", "__")


def click_option(item: OptionField) -> click.Option:
    """The flag of one option. Its value is text (or None), so that one strict reader serves all sources."""
    shown = f"{item.help} [default: {item.show(item.default)}]" if item.help else ""
    if item.is_flag:
        negative = f"--no-{item.flag[2:]}"
        names = [_parameter(item), *item.info.aliases, f"{item.flag}/{negative}"]
        return click.Option(names, default=None, help=shown)
    return click.Option(
        [_parameter(item), *item.info.aliases, item.flag],
        default=None,
        multiple=item.multiple,
        metavar=item.metavar,
        type=str,
        help=shown,
    )


def click_values(fields: Iterable[OptionField], params: Mapping[str, Any]) -> dict[str, Any]:
    """What click parsed for these options -> the `cli` argument of `load_options`."""
    return {item.name: params[_parameter(item)] for item in fields if _parameter(item) in params}
