"""What discovery found: plugin records and everything they declare, each with the plugin that supplied it.

A registry is plain frozen data. It holds no plugin manager, and declarations are found by key, never by
order: "arch.qwen35", "drafter.dflash", "ops.cpu-c". The same keys stand in the static index
`luce_core.provides`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, Generic, Literal, TypeVar, get_type_hints

from attrs import Factory, frozen, has
from pydantic import ConfigDict, TypeAdapter, ValidationError

from luce_core.contracts import (
    ArchSpec,
    CatalogEntry,
    CommandSpec,
    DeviceInfo,
    OpLayer,
    PartSpec,
    PluginInfo,
    Problem,
    Profile,
    QuantFormat,
)
from luce_core.errors import ModelFormatError, PluginError, UsageError

T = TypeVar("T")
Status = Literal["loaded", "incompatible", "broken", "duplicate", "blocked"]

CORE = "core"
"""The name of the core's own plugin, `builtin.py`."""

FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""What names a lazily imported callable: "module:callable"."""

KIND_WORDS = {"arch": "architecture", "ops": "op layer", "quant": "block format", "model": "model"}
DISTRIBUTIONS = {"arch": "luce-arch-{}", "device": "luce-backend-{}"}
"""The naming scheme of packages, by kind; every other kind is `luce-{}`."""
ELSEWHERE = dict.fromkeys(
    ("device.cuda", "ops.triton", "ops.triton-portable", "executor.cuda-graphs"), "luce-backend-triton"
)
"""What is in a package of another name."""
FAMILIES = {
    "bailingmoe3": "bailing",
    "clip.qwen3vl_merger": "qwen35",
    "deepseek41": "deepseek4",
    "gemma3": "gemma",
    "gemma4": "gemma",
    "qwen2": "llama",
    "qwen35moe": "qwen35",
    "qwen3moe": "qwen3",
}
"""Architectures that come with a package named after the first of their family. Advice only: nothing is
looked up by it.
"""


def closest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """" Did you mean 'x'?" for the known word nearest to `word`, or nothing."""
    found = get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {found[0]!r}?" if found else ""


def choices(words: Iterable[str]) -> str:
    """The valid choices in a sentence: all when ten or fewer, else how many there are."""
    known = sorted(words)
    if not known:
        return "none"
    return ", ".join(known) if len(known) <= 10 else f"{', '.join(known[:10])} and {len(known) - 10} more"


@frozen
class PluginRecord:
    """One plugin that was found, whatever became of it."""

    name: str
    distribution: str
    """Empty for a plugin that was handed over as a module."""
    version: str
    status: Status
    reason: str = ""
    """Why it is not loaded, in words a user can act on."""
    info: PluginInfo | None = None

    @property
    def title(self) -> str:
        """How messages name it: "plugin 'dflash' (luce-dflash 0.2.0)"."""
        package = f" ({self.distribution} {self.version})" if self.distribution else ""
        return f"plugin {self.name!r}{package}"


@frozen
class Supplied(Generic[T]):
    """A declaration and the plugin it came from."""

    plugin: str
    value: T


@frozen
class BoundHook:
    """One plugin's implementation of one hook."""

    plugin: str
    hook: str
    function: Callable[..., Any]
    arguments: tuple[str, ...]
    """The hook's arguments the implementation takes; it may leave some out."""

    def __call__(self, **values: Any) -> Any:
        """Call the implementation with the arguments it takes."""
        return self.function(**{name: values[name] for name in self.arguments})


@frozen
class Registry:
    """Everything installed, by name. Made by `plugins.discover`; read by options, plan and compose."""

    records: tuple[PluginRecord, ...]
    declared: Mapping[str, tuple[Supplied[Any], ...]]
    """"kind.name" -> suppliers; more than one is an error as soon as someone asks for it."""
    provides: Mapping[str, tuple[str, ...]]
    """The static index: "kind.name" -> distributions that say they provide it, loaded or not."""
    hooks: Mapping[str, tuple[BoundHook, ...]]
    """Hook -> implementations of the plan and observation hooks, in `after` order."""
    problems: tuple[Problem, ...] = ()
    """Cycles in `after`, conflicts between loaded plugins."""
    notices: tuple[str, ...] = ()
    named: frozenset[str] = Factory(frozenset)
    """Plugins the user asked for by name."""

    # --- records

    def loaded(self) -> tuple[PluginRecord, ...]:
        """The records of loaded plugins, in `after` order, the core first."""
        return tuple(record for record in self.records if record.status == "loaded")

    def record(self, plugin: str) -> PluginRecord:
        """The record of the plugin called `plugin`; of several, the loaded one. KeyError if there is none."""
        found = sorted((r for r in self.records if r.name == plugin), key=lambda r: r.status != "loaded")
        if not found:
            raise KeyError(plugin)
        return found[0]

    def title(self, plugin: str) -> str:
        """How messages name the plugin called `plugin`."""
        return self.record(plugin).title

    # --- declarations

    def names(self, kind: str) -> list[str]:
        """Everything declared of one kind, sorted."""
        return sorted(key.partition(".")[2] for key in self.declared if key.partition(".")[0] == kind)

    def _all(self, kind: str, of: type[T]) -> list[Supplied[T]]:
        return [self._one(kind, name, of) for name in self.names(kind)]

    def _one(self, kind: str, name: str, of: type[T]) -> Supplied[T]:
        found = self.declared.get(f"{kind}.{name}", ())
        if not found:
            known = self.names(kind)
            raise PluginError(
                f"{self.missing_for(f'{kind}.{name}')}{closest(name, known)} Installed: {choices(known)}."
            )
        if len(found) > 1:
            who = " and ".join(self.title(item.plugin) for item in found)
            raise PluginError(
                f"{_word(kind)} {name!r} is declared by {who}. Keep one: --plugin-block {found[-1].plugin}."
            )
        supplied: Supplied[T] = found[0]
        return supplied

    def arch(self, name: str) -> Supplied[ArchSpec]:
        """The architecture for a file's `general.architecture`. PluginError says what to install."""
        return self._one("arch", name, ArchSpec)

    def part(self, kind: str, name: str) -> Supplied[PartSpec]:
        """The part of that kind and name. PluginError says what to install."""
        return self._one(kind, name, PartSpec)

    def op_layer(self, name: str) -> Supplied[OpLayer]:
        """The op layer called `name`. PluginError says what to install."""
        return self._one("ops", name, OpLayer)

    def model(self, name: str) -> Supplied[CatalogEntry]:
        """The catalogue entry called `name`. PluginError lists what there is."""
        return self._one("model", name, CatalogEntry)

    def profile(self, name: str) -> Supplied[Profile]:
        """The launch profile called `name`. PluginError lists what there is."""
        return self._one("profile", name, Profile)

    def command(self, name: str) -> Supplied[CommandSpec]:
        """The command called `name`. PluginError says what to install."""
        return self._one("command", name, CommandSpec)

    def archs(self) -> list[Supplied[ArchSpec]]:
        """All architectures."""
        return self._all("arch", ArchSpec)

    def parts(self, kind: str) -> list[Supplied[PartSpec]]:
        """All parts of one kind."""
        return self._all(kind, PartSpec)

    def op_layers(self) -> list[Supplied[OpLayer]]:
        """All op layers."""
        return self._all("ops", OpLayer)

    def quants(self) -> list[Supplied[QuantFormat]]:
        """All block formats beyond the core's."""
        return self._all("quant", QuantFormat)

    def models(self) -> list[Supplied[CatalogEntry]]:
        """The catalogue."""
        return self._all("model", CatalogEntry)

    def profiles(self) -> list[Supplied[Profile]]:
        """All launch profiles."""
        return self._all("profile", Profile)

    def commands(self) -> list[Supplied[CommandSpec]]:
        """All commands plugins add."""
        return self._all("command", CommandSpec)

    # --- devices and other hooks

    def find_devices(
        self, options: Mapping[str, Any] | None = None
    ) -> tuple[list[Supplied[DeviceInfo]], list[Problem]]:
        """Ask every hardware plugin what it sees. One that fails costs its own devices only.

        options: by plugin, those that may bear on it.
        The order is by rank, then id; two plugins that claim one id are a problem naming both.
        """
        seen: dict[str, Supplied[DeviceInfo]] = {}
        answers, problems = self.ask("luce_register_devices", DeviceInfo, options=options or {})
        for plugin, devices in answers:
            for device in devices:
                other = seen.setdefault(device.id, Supplied(plugin, device))
                if other.plugin != plugin:
                    problems.append(
                        Problem(
                            f"Device {device.id!r} is registered by {self.title(other.plugin)} and by "
                            f"{self.title(plugin)}.",
                            f"Keep one: --plugin-block {plugin}.",
                        )
                    )
        return sorted(seen.values(), key=lambda item: (-item.value.rank, item.value.id)), problems

    def ask(
        self, hook: str, of: type[T], *, options: Mapping[str, Any] | None = None, **values: Any
    ) -> tuple[list[tuple[str, list[T]]], list[Problem]]:
        """Call `hook` of every plugin in `after` order -> (plugin, answers), and what failed.

        options: by plugin, of a hook that is told its own.
        """
        answers: list[tuple[str, list[T]]] = []
        problems: list[Problem] = []
        for bound in self.hooks.get(hook, ()):
            try:
                own = {} if options is None else {"options": options.get(bound.plugin)}
                answers.append((bound.plugin, declarations(bound, (of,), **own, **values)))
            except PluginError as error:
                problems.append(self.failure(bound.plugin, error))
        return answers, problems

    def failure(self, plugin: str, error: PluginError) -> Problem:
        """A plugin that failed in a hook of the plan: it stays out; fatal if the user named it."""
        return Problem(
            f"P{self.title(plugin)[1:]} stays out of the plan: {error}.",
            f"Report it to its authors, or leave it out: --plugin-block {plugin}.",
            fatal=plugin in self.named,
        )

    # --- what is missing

    def missing_for(self, key: str) -> str:
        """What to install, or to repair, so that "kind.name" exists: one sentence."""
        kind, _, name = key.partition(".")
        subject = f"{_word(kind)} {name!r}"
        family = name.partition(":")[0] if kind == "device" else name
        providers = self.provides.get(f"{kind}.{family}", ())
        for record in self.records:
            if record.status != "loaded" and (record.distribution in providers or record.name == name):
                return f"{subject} is part of {record.title}, which is {record.status}: {record.reason}."
        if kind == "device" and self.provides.get(f"device.{family}"):
            return f"{subject} was not found by its plugin; `luce-core devices` lists what there is."
        named = FAMILIES.get(family, family) if kind == "arch" else family
        package = DISTRIBUTIONS.get(kind, "luce-{}").format(named.lower().replace("_", "-"))
        package = ELSEWHERE.get(f"{kind}.{family}", package)
        return (
            f"No installed plugin provides {subject}. By the naming scheme it comes with: pip install "
            f"{package} (the package lists '{kind}.{family}' in entry-point group 'luce_core.provides')."
        )


def _word(kind: str) -> str:
    return KIND_WORDS.get(kind, kind)


def guarded(subject: str, call: Callable[..., Any], **values: Any) -> Any:
    """Call a plugin's code at start-up. What it raises becomes a PluginError that keeps the cause; an error
    about the model file or the user's input passes as it is.
    """
    try:
        return call(**values)
    except (ModelFormatError, UsageError):
        raise
    except (Exception, SystemExit) as error:  # the named boundary: plugin code before the engine runs
        raise PluginError(f"{subject} raised {type(error).__name__}: {error}") from error


def declarations(bound: BoundHook, of: tuple[type, ...], **values: Any) -> list[Any]:
    """Call a hook that returns declarations and check what came back. PluginError names the hook."""
    returned = guarded(bound.hook, bound, **values)
    wanted = " or ".join(item.__name__ for item in of)
    if not isinstance(returned, Sequence) or isinstance(returned, (str, bytes)):
        raise PluginError(f"{bound.hook} returned {returned!r}, wanted a list of {wanted} (empty for none)")
    for item in returned:
        if not isinstance(item, of):
            raise PluginError(f"{bound.hook} returned {item!r} in its list, wanted {wanted}")
        check_types(item, f"{bound.hook} returned")
    return list(returned)


def check_types(item: Any, subject: str) -> None:
    """A declaration's fields hold what they are annotated with. PluginError names the first that does not."""
    declaration: type = type(item)
    for name, adapter in _adapters(declaration).items():
        value = getattr(item, name)
        try:
            adapter.validate_python(value, strict=True)
        except ValidationError as error:
            wrong = error.errors()[0]["msg"].lower()
            raise PluginError(f"{subject} {item!r}: its {name} is {value!r}; {wrong}") from None
        for part in value if isinstance(value, tuple) else ():
            if has(type(part)):
                check_types(part, subject)


@cache
def _adapters(declaration: type) -> dict[str, TypeAdapter[Any]]:
    """Strict checks by field; classes inside a hint are checked with isinstance."""
    config = ConfigDict(arbitrary_types_allowed=True)
    hints = get_type_hints(declaration)
    return {name: TypeAdapter(hint, config=config) for name, hint in hints.items()}


def resolve(factory: str, subject: str) -> Callable[..., Any]:
    """Import "module:callable" for `subject` ("drafter 'dflash'"). PluginError keeps the cause."""
    module_name, _, attributes = factory.partition(":")
    if not FACTORY.fullmatch(factory):
        raise PluginError(f"{subject} names the factory {factory!r}, wanted 'module:callable'.")
    found = guarded(f"{subject}: importing {module_name!r}", importlib.import_module, name=module_name)
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            raise PluginError(
                f"{subject} names the factory {factory!r}, but {module_name!r} has no {attributes!r}."
                f"{closest(attribute, vars(found))}"
            )
        found = getattr(found, attribute)
    if not callable(found):
        raise PluginError(f"{subject} names the factory {factory!r}, which is {found!r}, not a callable.")
    callable_found: Callable[..., Any] = found
    return callable_found
