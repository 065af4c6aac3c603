"""What importing a module drags in, found out in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable

HEAVY = ("torch", "triton", "transformers", "tensorflow", "jax")
"""What a module of hooks, and everything needed to plan, must not import."""

PROGRAM = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps([name for name in sys.argv[2:] if name in sys.modules]))
"""


def heavy_imports(module: str, heavy: Iterable[str] = HEAVY) -> list[str]:
    """Those of `heavy` that importing `module` imports. AssertionError if it cannot be imported."""
    command = [sys.executable, "-c", PROGRAM, module, *heavy]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise AssertionError(f"importing {module!r} failed:\n{done.stderr}")
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found
