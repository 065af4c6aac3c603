"""`luce-core plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
from attrs import evolve

from luce_core.cli import flags
from luce_core.cli.console import console, print_json
from luce_core.cli.session import Session
from luce_core.contracts import BackendPlan, DeviceInfo
from luce_core.errors import UsageError
from luce_core.option_fields import parse_size

if TYPE_CHECKING:
    from luce_core.options import Options
    from luce_core.plan_memory import Room


def make(session: Session) -> click.Command:
    """The command."""
    params: list[click.Parameter] = [
        flags.model_argument(),
        click.Option(["--memory"], metavar="SIZE", help="Plan as if every device had so much memory."),
        click.Option(["--fits"], is_flag=True, help="Show how much context devices of several sizes hold."),
        click.Option(["--json", "as_json"], is_flag=True, help="Print JSON."),
    ]
    text = "Show what would run where: parts, their plugins, memory, roofline, and what stayed out and why."
    return flags.command("plan", session, plan, text, params)


def plan(session: Session, params: dict[str, Any]) -> None:
    """Plan and print; nothing is loaded."""
    from luce_core.cli.starting import plan_model
    from luce_core.plan_render import render_plan

    options, memory = session.options(params), _memory(params["memory"])
    devices = _devices(session, options, memory) if memory else None
    if params["fits"]:
        _fits(session, params, (memory,) if memory else None)
        return
    planned = plan_model(session, options, devices)
    if params["as_json"]:
        print_json(as_data(planned.plan))
    else:
        console().print(render_plan(planned.plan, session.registry))


def _memory(text: str | None) -> int:
    """Bytes; 0 where nothing was said."""
    if text is None:
        return 0
    try:
        return parse_size(text)
    except ValueError as error:
        raise UsageError(f"--memory is {text!r}: {error}.") from error


def _devices(session: Session, options: Options, memory: int) -> list[DeviceInfo]:
    found, problems = session.registry.find_devices(options.plugins)
    for problem in problems:
        raise UsageError(f"{problem.message} {problem.fix}")
    return [evolve(item.value, memory_bytes=memory) for item in found]


def _fits(session: Session, params: dict[str, Any], memory: Sequence[int] | None) -> None:
    from luce_core.gguf import read_header
    from luce_core.plan import block_formats, what_fits
    from luce_core.plan_memory import MEMORY_SIZES
    from luce_core.plan_render import rooms_table

    options = session.options(params)
    header = read_header(session.model_path(options), block_formats(session.registry))
    device, rooms = what_fits(options, header, session.registry, memory=memory or MEMORY_SIZES)
    if params["as_json"]:
        print_json([_room_as_data(room, device) for room in rooms])
    else:
        console().print(rooms_table(rooms, device))


def _room_as_data(room: Room, device: str) -> dict[str, Any]:
    return {
        "device": device,
        "memory_bytes": room.memory_bytes,
        "limit_bytes": room.limit_bytes,
        "needed_bytes": room.needed_bytes,
        "context": room.context,
        "trained": room.trained,
        "state_bytes": room.state_bytes,
        "short_bytes": room.short_bytes,
    }


def as_data(plan: BackendPlan) -> dict[str, Any]:
    """The plan for `--json`; values that are not data are shown as text."""
    return {
        "models": [
            {
                "name": model.name,
                "role": model.role,
                "part": model.part,
                "path": model.path,
                "architecture": model.spec.arch,
                "plugin": model.arch_plugin,
                "devices": sorted(set(model.layer_device)),
                "op_layers": list(model.op_layers),
            }
            for model in plan.models
        ],
        "parts": {kind: list(names) for kind, names in plan.parts.items()},
        "fields": {
            name: {
                "value": value if isinstance(value, (int, float, str, bool, type(None))) else str(value),
                "source": plan.origin[name].source,
                "by": plan.origin[name].by,
                "reason": plan.origin[name].reason,
            }
            for name, value in plan.values.items()
        },
        "memory": [
            {
                "owner": claim.owner,
                "device": claim.device,
                "kind": claim.kind,
                "bytes": claim.num_bytes,
                "floor_bytes": claim.floor_bytes,
            }
            for claim in plan.claims
        ],
        "problems": [{"message": problem.message, "fix": problem.fix} for problem in plan.problems],
    }
