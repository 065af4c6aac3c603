"""One run of a benchmark script as a file: every figure beside all it was measured on.

What `luce-core bench --json` is for models, for scripts that time kernels or steps: the same facts of the
host, those of the device, and a list of results.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from pathlib import Path
from types import TracebackType
from typing import Any

from attrs import asdict, define, field

from luce_core.bench.facts import device_facts, host_facts
from luce_core.errors import UsageError

FORMAT = "luce-core benchmark 1"
NEEDED = ("model", "quant", "context", "batch")
"""Without which a number is none, beside what the file says once."""


def add_option(parser: ArgumentParser) -> None:
    """`--out FILE`."""
    text = "keep the figures in FILE.json, with device, driver, commit and command"
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)


@define
class Record:
    """Prints what is measured, and writes it when the block ends: what there is by then, if it fails."""

    out: Path | None
    """UsageError for one that is there, or whose folder is not."""
    device: str
    shared: dict[str, Any] = field(factory=dict)
    """What all results have in common, such as the model."""
    results: list[dict[str, Any]] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        if self.out is None:
            return
        if self.out.suffix != ".json":
            raise UsageError(f"--out {str(self.out)!r}: wanted a file that ends in .json.")
        if self.out.exists():
            raise UsageError(f"--out {str(self.out)!r} is there already; a run has a file of its own.")
        if not self.out.absolute().parent.is_dir():
            raise UsageError(f"--out {str(self.out)!r}: the folder {str(self.out.parent)!r} is not there.")

    def say(self, text: str, test: str = "", **figures: Any) -> None:
        """Print a line; with a test, its figures are a result. ValueError where one cannot be placed."""
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
        if not test:
            return
        result = {"test": test, **self.shared, **figures}
        missing = [name for name in NEEDED if name not in result]
        if missing:
            raise ValueError(f"result {test!r} does not say its {', '.join(missing)}")
        self.results.append(result)

    def as_data(self, failed: str = "") -> dict[str, Any]:
        """The file. failed: how the run ended, if not well."""
        facts = {**asdict(host_facts()), **asdict(device_facts(self.device))}
        data: dict[str, Any] = {"format": FORMAT, **facts, "results": self.results}
        return {**data, "failed": failed} if failed else data

    def __enter__(self) -> Record:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.out is not None and self.results:
            failed = "" if error is None else f"{type(error).__name__}: {error}"
            self.out.write_text(json.dumps(self.as_data(failed), indent=1) + "\n", encoding="utf-8")
