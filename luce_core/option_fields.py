"""One option, however it is spelt: flag, environment variable, config key; and strict reading of its text.

Options are the fields of pydantic models: the core's (`core_options.py`) and one per plugin that has any.
All that a user sees of them (flags, help, `config show`, `docs/options.md`) is derived from the fields here.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping
from enum import Enum
from fractions import Fraction
from math import isfinite
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from attrs import frozen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from luce_core.errors import UsageError
from luce_core.paths import expand_home
from luce_core.registry import CORE, choices

TRUE = frozenset({"1", "true", "yes", "on"})
FALSE = frozenset({"0", "false", "no", "off"})
SIZE_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
}
"""Suffixes of a byte size; a bare letter is binary."""
SIZE = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?) ?(?P<unit>[A-Za-z]*)")


@frozen
class OptionInfo:
    """What an option says beside type, default and description: `Annotated[int, OptionInfo(unit="s")]`."""

    unit: str = ""
    """"tokens", "s", "bytes" (sizes like 8GiB are then accepted)."""
    group: str = ""
    """Heading in the help."""
    aliases: tuple[str, ...] = ()
    """Other spellings of the flag."""
    plan: str = ""
    """The field of the plan it becomes."""
    secret: bool = False
    """Masked wherever it is shown."""


@frozen
class OptionField:
    """One option as users meet it."""

    name: str
    """"ctx_size", "cpu.exact": the key of `Options.origin`."""
    field: str
    plugin: str
    flag: str
    env: str
    annotation: Any
    default: Any
    help: str
    info: OptionInfo

    @property
    def base(self) -> Any:
        """The annotation without `| None` and without the sequence around it."""
        inner = _without_none(self.annotation)
        return get_args(inner)[0] if self.multiple else inner

    @property
    def multiple(self) -> bool:
        """Whether it takes several values: the flag is repeated, text is split at commas."""
        return get_origin(_without_none(self.annotation)) in (tuple, list, frozenset, set)

    @property
    def is_flag(self) -> bool:
        """Whether it is a switch: `--x` and `--no-x`."""
        return self.base is bool and not self.multiple

    @property
    def choices(self) -> tuple[str, ...]:
        """The words it takes, if they are a closed list."""
        if get_origin(self.base) is Literal:
            return tuple(str(item) for item in get_args(self.base))
        if isinstance(self.base, type) and issubclass(self.base, Enum):
            return tuple(str(item.value) for item in self.base)
        return ()

    @property
    def key(self) -> str:
        """Where it stands in a config file: "ctx-size", "[cpu] exact"."""
        spelt = self.field.replace("_", "-")
        return spelt if self.plugin == CORE else f"[{self.plugin}] {spelt}"

    @property
    def metavar(self) -> str:
        """What the help shows in place of a value."""
        if self.choices:
            return "|".join(self.choices)
        word = {int: "N", float: "X", Path: "PATH"}.get(self.base, "TEXT")
        return {"bytes": "SIZE", "tokens": "TOKENS", "s": "SECONDS"}.get(self.info.unit, word)

    def parse(self, text: str) -> Any:
        """The value `text` spells; ValueError says what is wanted. Used for environment and command line.

        "none" is the empty value of an option that may be empty.
        """
        if text == "none" and (self.multiple or _without_none(self.annotation) is not self.annotation):
            return () if self.multiple else None
        if not self.multiple:
            return self._parse_one(text)
        return tuple(self._parse_one(part.strip()) for part in text.split(",") if part.strip())

    def _parse_one(self, text: str) -> Any:
        if self.choices and text not in self.choices:
            raise ValueError(f"wanted one of {choices(self.choices)}")
        if self.info.unit == "bytes" and self.base is int:
            return parse_size(text)
        reader = READERS.get(self.base)
        return reader(text) if reader else text

    def show(self, value: Any) -> str:
        """The value in words, masked if it is a secret."""
        if value is None or value == ():
            return "none"
        if self.info.secret:
            return ", ".join("****" for _ in value) if self.multiple else "****"
        if self.multiple:
            return ", ".join(str(getattr(item, "value", item)) for item in value)
        if isinstance(value, bool):
            return "on" if value else "off"
        if self.info.unit == "bytes" and isinstance(value, int):
            return show_size(value)
        return f"{getattr(value, 'value', value)}{' ' + self.info.unit if self.info.unit else ''}"


def model_fields(model: type[BaseModel], plugin: str) -> list[OptionField]:
    """The options of one model, in the order of its fields."""
    prefix = "" if plugin == CORE else f"{plugin}-"
    return [_option_field(name, info, plugin, prefix) for name, info in model.model_fields.items()]


def spellings(item: OptionField) -> list[str]:
    """Every flag the option answers to, the negative of a switch included."""
    negative = [f"--no-{item.flag[2:]}"] if item.is_flag else []
    return [item.flag, *negative, *item.info.aliases]


def _option_field(name: str, info: FieldInfo, plugin: str, prefix: str) -> OptionField:
    spelt = f"{prefix}{name}".replace("_", "-")
    return OptionField(
        name=name if plugin == CORE else f"{plugin}.{name}",
        field=name,
        plugin=plugin,
        flag=f"--{spelt}",
        env="LUCE_" + spelt.replace("-", "_").upper(),
        annotation=info.annotation,
        default=info.get_default(call_default_factory=True),
        help=info.description or "",
        info=next((item for item in info.metadata if isinstance(item, OptionInfo)), OptionInfo()),
    )


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        rest = [item for item in get_args(annotation) if item is not type(None)]
        if len(rest) == 1:
            return rest[0]
    return annotation


def parse_bool(text: str) -> bool:
    """A switch in words; anything else is refused rather than taken for "on"."""
    word = text.lower()
    if word in TRUE or word in FALSE:
        return word in TRUE
    raise ValueError("wanted one of 1, true, yes, on, 0, false, no, off")


def parse_int(text: str) -> int:
    """A whole number in decimal digits."""
    digits = text[1:] if text[:1] in ("-", "+") else text
    if not (digits.isascii() and digits.isdigit()):
        raise ValueError("wanted a whole number")
    return int(text)


def parse_float(text: str) -> float:
    """A number; neither nan nor inf."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError("wanted a number") from None
    if not isfinite(value) or "_" in text:
        raise ValueError("wanted a finite number")
    return value


def parse_size(text: str) -> int:
    """Bytes: "8GiB", "512 MB", "1048576"."""
    found = SIZE.fullmatch(text)
    scale = SIZE_UNITS.get(found["unit"].upper()) if found else None
    if not found or scale is None or (scale == 1 and "." in text):
        raise ValueError("wanted a size such as 8GiB, 512MiB or a number of bytes")
    return int(Fraction(found["number"]) * scale)


def show_size(num_bytes: float) -> str:
    """A size for people, in binary units."""
    if abs(num_bytes) < 2**10:
        return f"{num_bytes:.0f} B"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.{1 if num_bytes >= 10 * size else 2}f} {unit}"
    raise AssertionError(num_bytes)


def parse_path(text: str) -> Path:
    """A path, its home folder filled in."""
    try:
        return expand_home(text)
    except UsageError as error:
        raise ValueError(f"wanted a path; {str(error).rstrip('.')}") from error


READERS: Mapping[Any, Callable[[str], Any]] = {
    bool: parse_bool,
    int: parse_int,
    float: parse_float,
    Path: parse_path,
}
