"""llama.cpp on the same tests: a worker, and what it is asked for one sample."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Protocol

from luce_core.bench.cases import Case, Prompt
from luce_core.bench.conditions import Conditions, read_conditions
from luce_core.bench.measure import Sample
from luce_core.bench.worker import Worker
from luce_core.errors import EngineError, UsageError

SCRIPT = Path(__file__).with_name("llama_cpp_worker.py")
NO_REPACK = (
    "Where its code for AMX dies (0.3.36 does, on some machines), keep it away from rearranged weights with "
    "--no-repack."
)


class Peer(Protocol):
    """Another engine, one sequence at a time."""

    name: str
    conditions: Conditions

    def sample(self, case: Case, prompt: Prompt) -> Sample:
        """The same test on the same tokens."""
        ...

    def memory(self) -> int:
        """Bytes its process holds now."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class LlamaCpp:
    """llama-cpp-python in the Python of another environment."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.name: str = worker.about["engine"]
        self.conditions = read_conditions(worker.about)

    def sample(self, case: Case, prompt: Prompt) -> Sample:
        """Contexts it holds already are kept, as ours are."""
        self.worker.ask("reset", tokens=prompt.context)
        if case.kind == "pp":
            return Sample(case.tokens, self.worker.ask("prefill", tokens=prompt.rest))
        times = self.worker.ask("decode", token=prompt.context[-1], count=case.tokens)
        return Sample(len(times), sum(times))

    def memory(self) -> int:
        """Resident bytes."""
        return int(self.worker.ask("memory")["rss"])

    def close(self) -> None:
        """End the process."""
        self.worker.close()


def start_llama_cpp(python: str, model: Path, *, repack: bool = True, **asked: Any) -> LlamaCpp:
    """asked: threads, k_type, v_type, context, chunk. UsageError when that Python cannot run it."""
    return LlamaCpp(llama_cpp_worker(python, model, repack=repack, **asked))


def llama_cpp_worker(python: str, model: Path, **asked: Any) -> Worker:
    """The process alone, for scripts that ask it for more."""
    import json

    title = f"llama.cpp in {python!r}"
    wanted = json.dumps({"model": str(model), **asked})
    try:
        # -I: neither this folder nor the user's own may shadow what the other environment imports.
        return Worker(title, [python, "-I", str(SCRIPT), wanted], hints={signal.SIGILL: NO_REPACK})
    except EngineError as error:
        if "No module named" in str(error):
            raise UsageError(
                f"--peer {python!r} has no llama-cpp-python. Install it there, or name the Python of an "
                "environment that has it."
            ) from error
        raise


def file_identity(path: Path) -> str:
    """What this process sees of a file; the worker says the same of its own."""
    real = os.path.realpath(path)
    seen = os.stat(real)
    return f"{real} ({seen.st_size} bytes, changed {seen.st_mtime_ns})"
