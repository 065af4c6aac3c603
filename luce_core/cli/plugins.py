"""`luce-core plugins`."""

from __future__ import annotations

from typing import Any

import click

from luce_core.cli.console import console, print_json, say, table
from luce_core.cli.session import Session
from luce_core.registry import PluginRecord, Registry


def make(session: Session) -> click.Command:
    """The command."""

    @click.command("plugins", help="List the installed plugins, what they provide, why one is not loaded.")
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    def plugins(as_json: bool) -> None:
        registry = session.registry
        if as_json:
            print_json([as_data(record, registry) for record in registry.records])
            return
        rows = [_row(record, registry) for record in registry.records]
        console().print(table(["plugin", "package", "version", "status", "provides"], rows))
        for record in registry.records:
            if record.status != "loaded":
                say(f"P{record.title[1:]} is {record.status}: {record.reason}.")
        for problem in registry.problems:
            say(f"{problem.message} {problem.fix}")

    return plugins


def provided(record: PluginRecord, registry: Registry) -> list[str]:
    """The keys a plugin declared: "arch.llama", "ops.cpu-c"; hooks that answer later as "hook"."""
    if record.status != "loaded":
        return sorted(key for key, names in registry.provides.items() if record.distribution in names)
    declared = [
        key for key, suppliers in registry.declared.items() if any(s.plugin == record.name for s in suppliers)
    ]
    lookers = {bound.plugin for bound in registry.hooks.get("luce_register_devices", ())}
    return sorted(declared) + ["devices"] * (record.name in lookers)


def as_data(record: PluginRecord, registry: Registry) -> dict[str, Any]:
    """One plugin for `--json`."""
    return {
        "name": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "status": record.status,
        "reason": record.reason,
        "api": record.info.api if record.info else None,
        "provides": provided(record, registry),
    }


def _row(record: PluginRecord, registry: Registry) -> tuple[str, ...]:
    return (
        record.name,
        record.distribution,
        record.version,
        record.status,
        ", ".join(provided(record, registry)),
    )
