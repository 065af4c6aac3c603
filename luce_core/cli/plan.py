"""`luce-core plan`."""

from __future__ import annotations

from typing import Any

import click

from luce_core.cli import flags
from luce_core.cli.console import console, print_json
from luce_core.cli.session import Session
from luce_core.contracts import BackendPlan


def make(session: Session) -> click.Command:
    """The command."""
    params: list[click.Parameter] = [
        flags.model_argument(),
        click.Option(["--json", "as_json"], is_flag=True, help="Print JSON."),
    ]
    text = "Show what would run where: parts, their plugins, memory, roofline, and what stayed out and why."
    return flags.command("plan", session, plan, text, params)


def plan(session: Session, params: dict[str, Any]) -> None:
    """Plan and print; nothing is loaded."""
    from luce_core.cli.starting import plan_model
    from luce_core.plan_render import render_plan

    planned = plan_model(session, session.options(params))
    if params["as_json"]:
        print_json(as_data(planned.plan))
    else:
        console().print(render_plan(planned.plan, session.registry))


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
