"""A fresh interpreter that finds what the test finds: for proofs about what an import drags in."""

from __future__ import annotations

import os
import subprocess
import sys


def run_fresh(code: str, *arguments: str) -> str:
    """Standard output of `code` in a new interpreter over this one's `sys.path`.

    The path is handed over as it is: plugins under test may be on it only because a test runner put them
    there. AssertionError with what it printed to standard error when it fails.
    """
    paths = [path or os.getcwd() for path in sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", code, *arguments]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
