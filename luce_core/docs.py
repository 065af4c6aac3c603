"""Writes the reference pages that follow from the code: `python -m luce_core.docs [FOLDER]`.

docs/hooks.md comes from `hookspecs.py`, docs/options.md from the options of the core. A test compares the
files with what this module writes, so they cannot fall behind.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from luce_core import hookspecs
from luce_core.core_options import CoreOptions
from luce_core.option_fields import OptionField, model_fields
from luce_core.registry import CORE

HOOKS_HEAD = """# Hooks

Generated from `luce_core/hookspecs.py` by `python -m luce_core.docs`. In the order a start-up reaches them.

A plugin is a distribution with two groups of entry points:

```toml
[project.entry-points."luce_core.plugins"]
glimmer = "luce_glimmer.hooks"          # the plugin's name and its module of hooks

[project.entry-points."luce_core.provides"]
"arch.glimmer" = "luce_glimmer"         # what it provides, readable without importing anything
```

`register` hooks return declarations, `extend` returns patches, `check` returns problems, the rest observe.
An implementation takes those arguments of a hook that it needs. It is marked with `@hookimpl` from
`luce_core.hookspecs`; a misspelt hook or argument keeps the plugin out, with the nearest name in the reason.
Declarations and values are described in `luce_core/contracts/plugin.py`.
"""

OPTIONS_HEAD = """# Options

Generated from `luce_core/core_options.py` by `python -m luce_core.docs`.

The first of these that has an option wins: the command line, the environment, a config file (`./luce.toml`,
then `luce-core/config.toml` in `$XDG_CONFIG_HOME`), the profile named by `--profile`, the card of the model,
the default. `luce-core config show` prints every value with its origin.

Options of a plugin carry its name: `--NAME-FIELD`, `LUCE_NAME_FIELD`, and the table `[NAME]` of a config
file. `luce-core serve --help` lists them when the plugin is installed.

Sizes are written `8GiB`, `512MiB` or as bytes. An option that takes several values is given several times on
the command line and with commas elsewhere; `none` empties it. Switches read 1, true, yes, on, 0, false, no,
off.
"""


METRICS_HEAD = """# Metrics

Generated from `luce_core/server/metrics.py` by `python -m luce_core.docs`.

`GET /metrics` answers in Prometheus' text format. Units are in the names; counters end in `_total`, and a
histogram `x` has `x_bucket`, `x_sum` and `x_count`. `luce_requests_total` has labels `api` (chat, ...) and
`reason` (stop, length, cancelled, error); `luce_info` has `model` and `version`.

| metric | type | |
|---|---|---|"""


def hook_definitions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """(section, definition) of every hook, in order."""
    source = inspect.getsource(hookspecs)
    sections = {
        number: line.removeprefix("# --- ")
        for number, line in enumerate(source.splitlines(), 1)
        if line.startswith("# --- ")
    }
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("luce_"):
            yield sections[max(number for number in sections if number < node.lineno)], node


def signature(node: ast.FunctionDef) -> str:
    """The hook's signature as it stands in the source."""
    returns = ast.unparse(node.returns) if node.returns else "None"
    return f"{node.name}({ast.unparse(node.args)}) -> {returns}"


def hooks_page() -> str:
    """docs/hooks.md."""
    lines = [HOOKS_HEAD]
    section = ""
    for found, node in hook_definitions():
        if found != section:
            section = found
            lines.append(f"## {section.capitalize()}\n")
        text = ast.get_docstring(node) or ""
        lines.append(f"### {node.name}\n\n```python\n{signature(node)}\n```\n\n{text}\n")
    return "\n".join(lines)


def options_page() -> str:
    """docs/options.md."""
    groups: dict[str, list[OptionField]] = {}
    for item in model_fields(CoreOptions, CORE):
        groups.setdefault(item.info.group, []).append(item)
    lines = [OPTIONS_HEAD]
    for group, items in groups.items():
        lines.append(f"## {group}\n\n| flag | environment | config | default | |\n|---|---|---|---|---|")
        lines += [_option_row(item) for item in items]
        lines.append("")
    return "\n".join(lines)


def _option_row(item: OptionField) -> str:
    spelt = [*item.info.aliases, item.flag]
    if item.is_flag:
        spelt.append(f"--no-{item.flag[2:]}")
    flags = " ".join(f"`{flag}`" for flag in spelt)
    value = "" if item.is_flag else f" {item.metavar}".replace("|", "\\|")
    return f"| {flags}{value} | `{item.env}` | `{item.key}` | {item.show(item.default)} | {item.help} |"


def metrics_page() -> str:
    """docs/metrics.md."""
    from luce_core.server.metrics import families

    rows = [f"| `{name}` | {kind} | {text} |" for name, kind, text in families()]
    return "\n".join([METRICS_HEAD, *rows, ""])


def pages() -> dict[str, str]:
    """File name -> text."""
    return {"hooks.md": hooks_page(), "options.md": options_page(), "metrics.md": metrics_page()}


def main(folder: str = "docs") -> None:
    """Write the pages."""
    for name, text in pages().items():
        (Path(folder) / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:2])
