"""Both sides as processes that answer commands; what they have in common is checked here."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SAME = ("threads", "kv", "context", "model")


class Worker:
    """A process that runs one engine on one model."""

    def __init__(self, python: str, script: str, **asked: Any) -> None:
        self.process = subprocess.Popen(
            [python, str(HERE / script), json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.about = self._read()

    def ask(self, do: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args!r} ended with status {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def luce(model: Path, layers: Sequence[str], **asked: Any) -> Worker:
    return Worker(sys.executable, "worker_luce.py", model=str(model), layers=list(layers), **asked)


def llama_cpp(python: str, model: Path, **asked: Any) -> Worker:
    return Worker(python, "worker_llama_cpp.py", model=str(model), **asked)


def refuse_unless_same(*workers: Worker) -> None:
    """A gain measured under other conditions is no gain."""
    first = workers[0].about
    for worker in workers[1:]:
        other = worker.about
        different = [f"{key}: {first[key]!r} and {other[key]!r}" for key in SAME if first[key] != other[key]]
        if different:
            raise SystemExit(
                f"Conditions differ between the engines, so nothing is compared. {'; '.join(different)}.",
            )


def file_facts(model: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with model.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return {"model": model.name, "sha256": digest.hexdigest(), "file_bytes": model.stat().st_size}


def machine_facts() -> dict[str, Any]:
    from luce_backend_cpu import compiler, machine

    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], capture_output=True, text=True, cwd=ROOT, check=False)
        return done.stdout.strip() or "unknown"

    dirty = " with changes" if git("status", "--porcelain", "--untracked-files=no") != "unknown" else ""
    with open("/proc/loadavg") as file:
        load = file.read().split()[0]
    return {
        "device": f"{machine.cpu_name()}, {machine.physical_cores()} cores",
        "features": sorted(machine.features(machine.cpu_flags())),
        "compiler": compiler.library().reason,
        "python": sys.version.split()[0],
        "commit": git("rev-parse", "--short", "HEAD") + dirty,
        "load_at_start": load,
    }
