"""A decode step of a whole model on one CUDA device, with one thing of the plugin set otherwise at a time.

    python benchmarks/triton/variants.py --model qwen3.5-0.8b:q8_0 attention.ALONE=64 \\
        shapes.SMALL_TILES=4,shapes.NARROW=0 define.IMMA=0

Each argument is one variant: names of `luce_backend_triton` modules with the values they get, or definitions
the CUDA C++ is compiled with. One engine is loaded; kernels are chosen, compiled and captured anew for every
variant. As it is comes first and last: what these two differ by, a variant has to gain.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from decode import DEVICE, Bench, model_file, of
from luce_backend_triton import few_rows

from luce_core.bench import record

PACKAGE = "luce_backend_triton"
KEPT = frozenset({"workspace", "_scratch", "_table"})
"""Caches of memory on the device, which no setting changes."""
AS_IT_IS = "as it is"


@contextmanager
def given(variant: str) -> Iterator[None]:
    """The settings of one variant."""
    with ExitStack() as stack:
        for one in variant.split(",") if variant != AS_IT_IS else ():
            name, _, value = one.partition("=")
            where, _, attribute = name.rpartition(".")
            if where == "define":
                stack.enter_context(_defined(attribute, int(value)))
            else:
                module = importlib.import_module(f"{PACKAGE}.{where}")
                stack.enter_context(mock.patch.object(module, attribute, ast.literal_eval(value)))
        yield


@contextmanager
def _defined(name: str, value: int) -> Iterator[None]:
    plain = few_rows.defines

    def defines(*args: Any) -> dict[str, int]:
        return {**plain(*args), name: value}

    with mock.patch.object(few_rows, "defines", defines):
        yield


def forget(bench: Bench) -> None:
    """Choices, kernels and captured steps."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == PACKAGE:
            for value in vars(module).values():
                if hasattr(value, "cache_clear") and value.__name__ not in KEPT:
                    value.cache_clear()
    bench.engine.executor._programs["verify"].buckets.clear()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("variants", nargs="+", metavar="NAME=VALUE[,NAME=VALUE ...]")
    parser.add_argument("--model", nargs="*", default=["qwen3.5-0.8b:q8_0"], help="GEOMETRY:QUANT")
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--rows", type=int, default=1, help="sequences of one row each")
    parser.add_argument("--repeats", type=int, default=2, help="the best counts")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "luce-models")
    record.add_option(parser)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    with record.Record(asked.out, DEVICE) as kept:
        for name in asked.model:
            bench = Bench(model_file(asked.folder, name), max_sequences=max(4, asked.rows))
            for variant in (AS_IT_IS, *asked.variants, AS_IT_IS):
                with given(variant):
                    forget(bench)
                    took = min(bench.decode_s(asked.depth, asked.rows) for _ in range(asked.repeats))
                line = f"{name}, {variant}: {took * 1e6:.1f} us a step, {asked.rows / took:.1f} tokens/s"
                placed = {"context": asked.depth, "batch": asked.rows, "variant": variant}
                kept.say(line, "engine, variant", **of(name), **placed, seconds_per_step=took)
            del bench


if __name__ == "__main__":
    sys.exit(main())
