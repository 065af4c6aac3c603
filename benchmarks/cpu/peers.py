"""This side of `compare.py` and `accuracy.py` as a process, and what a result of theirs was measured on."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, evolve
from luce_backend_cpu import compiler, machine

from luce_core.bench.conditions import differences, read_conditions
from luce_core.bench.facts import host_facts
from luce_core.bench.worker import Worker
from luce_core.catalog.store import file_sha256

SCRIPT = Path(__file__).with_name("worker_luce.py")


def luce(model: Path, layers: Sequence[str], **asked: Any) -> Worker:
    wanted = json.dumps({"model": str(model), "layers": list(layers), **asked})
    return Worker(f"luce-core with {layers}", [sys.executable, str(SCRIPT), wanted], keep_env=True)


def refuse_unless_same(*workers: Worker, flash_attention: bool = True) -> None:
    """A gain measured under other conditions is no gain. flash_attention: whether that counts."""
    sides = [read_conditions(worker.about) for worker in workers]
    if not flash_attention:
        sides = [evolve(side, flash_attention=True) for side in sides]
    for worker, side in zip(workers[1:], sides[1:], strict=True):
        different = differences(sides[0], side)
        if different:
            raise SystemExit(
                f"Conditions differ between {workers[0].title} and {worker.title}, so nothing is compared. "
                f"{'; '.join(different)}.",
            )


def file_facts(model: Path) -> dict[str, Any]:
    return {"model": model.name, "sha256": file_sha256(model), "file_bytes": model.stat().st_size}


def machine_facts() -> dict[str, Any]:
    return {
        **asdict(host_facts()),
        "device": f"{machine.cpu_name()}, {machine.physical_cores()} cores",
        "features": sorted(machine.features(machine.cpu_flags())),
        "compiler": compiler.library().reason,
    }
