"""`luce-core devices`."""

from __future__ import annotations

import click

from luce_core.cli.console import console, print_json, say, table, warn
from luce_core.cli.session import Session
from luce_core.option_fields import show_size


def make(session: Session) -> click.Command:
    """The command."""

    @click.command("devices", help="List the devices the installed plugins see; the first is the default.")
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    def devices(as_json: bool) -> None:
        found, problems = session.registry.find_devices(session.given.plugins)
        for problem in problems:
            warn(f"{problem.message} {problem.fix}")
        if as_json:
            print_json(
                [
                    {
                        "id": device.value.id,
                        "name": device.value.name,
                        "memory_bytes": device.value.memory_bytes,
                        "bandwidth_bytes_s": device.value.bandwidth_bytes_s,
                        "bandwidth_provenance": device.value.provenance,
                        "features": sorted(device.value.features),
                        "links": dict(device.value.links),
                        "rank": device.value.rank,
                        "plugin": device.plugin,
                    }
                    for device in found
                ]
            )
        elif not found:
            say(session.registry.missing_for("device.cpu"))
        else:
            rows = [
                (
                    device.value.id,
                    device.value.name,
                    show_size(device.value.memory_bytes),
                    f"{device.value.bandwidth_bytes_s / 1e9:.0f} GB/s",
                    device.value.provenance,
                    " ".join(sorted(device.value.features)),
                    device.plugin,
                )
                for device in found
            ]
            columns = ["device", "name", "memory", "bandwidth", "bandwidth from", "features", "plugin"]
            console().print(table(columns, rows, right=("memory", "bandwidth")))

    return devices
