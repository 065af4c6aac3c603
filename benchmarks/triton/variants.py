"""A decode step of a whole model on one CUDA device, with one thing of the plugin set otherwise at a time.

    python benchmarks/triton/variants.py --model qwen3.5-0.8b:q8_0 attention_cuts.ALONE=64 \\
        shapes.SMALL_TILES=4,shapes.NARROW=0 define.IMMA=0 route.TILE=2

Each argument is one variant: names of `luce_backend_triton` modules with the values they get, or definitions
the CUDA C++ is compiled with. One engine is loaded; kernels are chosen, compiled and captured anew for every
variant. As it is comes first and last: what these two differ by, a variant has to gain. A variant with the
launches of as it is says so, is not timed, and makes the whole fail in the end: its setting reaches nothing.
Tokens: of a greedy answer, how many
are those of as it is before the first other one; where nothing is summed or rounded otherwise, all must be.
--profile: of as it is and of the best.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from decode import ANSWER, DEVICE, Bench, breakdown, model_file, of, prompt
from luce_backend_triton import executor, few_rows, kernels, nvrtc

from luce_core.bench import record

PACKAGE = "luce_backend_triton"
KEPT = frozenset({"workspace", "_scratch", "_table"})
"""Caches of memory on the device, which no setting changes."""
AS_IT_IS = "as it is"
STEP = "verify"
"""The program of decode steps."""


@contextmanager
def given(variant: str) -> Iterator[None]:
    """The settings of one variant; nothing of what was chosen before is remembered, within and after."""
    with ExitStack() as stack:
        for one in re.split(r",(?=[\w.]+=)", variant) if variant != AS_IT_IS else ():
            name, _, value = one.partition("=")
            where, _, attribute = name.rpartition(".")
            if where == "define":
                stack.enter_context(_defined(attribute, int(value)))
            else:
                module = importlib.import_module(f"{PACKAGE}.{where}")
                stack.enter_context(mock.patch.object(module, attribute, ast.literal_eval(value)))
        forget()
        stack.callback(forget)
        yield


@contextmanager
def _defined(name: str, value: int) -> Iterator[None]:
    plain = few_rows.defines

    def defines(*args: Any) -> dict[str, int]:
        return {**plain(*args), name: value}

    with mock.patch.object(few_rows, "defines", defines):
        yield


def forget() -> None:
    """Choices and loaded kernels."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == PACKAGE:
            for value in vars(module).values():
                if hasattr(value, "cache_clear") and value.__name__ not in KEPT:
                    value.cache_clear()


@contextmanager
def launches() -> Iterator[Counter[str]]:
    """Those of decode steps that are captured: kernel, its machine code, how it is cut -> how often."""
    found: Counter[str] = Counter()
    load, made, launch = few_rows.load, nvrtc.cubin, nvrtc.Kernel.launch
    capture, whose = executor.GraphExecutor._try_to_capture, type(kernels.prepare)
    run, capturing, images = whose.run, [], []

    def making(*args: Any, **given: Any) -> bytes:
        images[:] = [made(*args, **given)]
        return images[0]

    def loading(device: int, source: str, function: str, defined: Any, after: str = "") -> Any:
        kernel = load(device, source, function, defined, after)
        code = hashlib.sha256(images[0]).hexdigest()[:12]
        kernel.said = f"{function} {code}, overlaps {few_rows.OVERLAP}"
        return kernel

    def launching(self: Any, grid: Any, threads: int, shared_bytes: int, stream: int, args: Any) -> None:
        if capturing:
            found[f"{self.said}: {tuple(grid)} x {threads}, {shared_bytes} bytes"] += 1
        launch(self, grid, threads, shared_bytes, stream, args)

    def running(self: Any, *args: Any, grid: Any, **given: Any) -> Any:
        if capturing:
            plain = {k: v for k, v in given.items() if isinstance(v, int | float | str)}
            found[f"{self.fn.__name__} {plain}: {grid}"] += 1
        return run(self, *args, grid=grid, **given)

    def trying(self: Any, name: str, *given: Any) -> None:
        capturing.extend([True] if name == STEP else [])
        capture(self, name, *given)
        capturing.clear()

    with (
        mock.patch.object(nvrtc, "cubin", making), mock.patch.object(few_rows, "load", loading),
        mock.patch.object(nvrtc.Kernel, "launch", launching),
        mock.patch.object(whose, "run", running),
        mock.patch.object(executor.GraphExecutor, "_try_to_capture", trying),
    ):  # fmt: skip
        yield found


def difference(one: Counter[str], other: Counter[str]) -> str:
    """In a few words."""
    gone, new = one - other, other - one
    names = {key.split()[0] for key in (*gone, *new)}
    return f"{gone.total()} launches for {new.total()}: {', '.join(sorted(names))}"


class Steps:
    """The decode steps of one model."""

    def __init__(self, path: Path, depth: int, rows: int, repeats: int) -> None:
        self.bench = Bench(path, max_sequences=max(4, rows))
        self.depth, self.rows, self.repeats = depth, rows, repeats
        self.plain: Counter[str] | None = None
        self.tokens: list[int] = []
        """Launches and an answer of as it is."""

    def run(self, variant: str) -> tuple[float, float, str] | None:
        """Seconds of a step by the engine, by the device, and what is other than as it is; None: nothing."""
        self.bench.engine.executor._programs[STEP].buckets.clear()
        with given(variant), launches() as found:
            took = self.bench.decode_s(self.depth, self.rows)
            if self.plain is None:
                self.plain = found.copy()
            if variant != AS_IT_IS and found == self.plain:
                return None
            for _ in range(self.repeats - 1):
                took = min(took, self.bench.decode_s(self.depth, self.rows))
            *_, (_, captured) = self.bench.graphs()
            device, other = self.bench.device_s(captured), difference(self.plain, found)
            _, answer = (self.bench.answer(prompt(9), ANSWER) for _ in range(2))  # the second finds a cache
            self.tokens = self.tokens or answer
            same = [a == b for a, b in zip(answer, self.tokens, strict=True)]
            alike = same.index(False) if False in same else len(same)
            return took, device, f"{other}; {alike} of {len(same)} tokens"

    def profile(self, variant: str) -> None:
        self.bench.engine.executor._programs[STEP].buckets.clear()
        with given(variant):
            self.bench.decode_s(self.depth, self.rows)
            *_, (bucket, captured) = self.bench.graphs()
            breakdown(captured.replay, f"{variant}, step {bucket}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("variants", nargs="+", metavar="NAME=VALUE[,NAME=VALUE ...]")
    parser.add_argument("--model", nargs="*", default=["qwen3.5-0.8b:q8_0"], help="GEOMETRY:QUANT")
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--rows", type=int, default=1, help="sequences of one row each")
    parser.add_argument("--repeats", type=int, default=2, help="the best counts")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "luce-models")
    parser.add_argument("--profile", action="store_true", help="a step as it is, and of the best variant")
    record.add_option(parser)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    idle = 0
    with record.Record(asked.out, DEVICE) as kept:
        for name in asked.model:
            steps = Steps(model_file(asked.folder, name), asked.depth, asked.rows, asked.repeats)
            best = (float("inf"), AS_IT_IS)
            for variant in (AS_IT_IS, *asked.variants, AS_IT_IS):
                found = steps.run(variant)
                if found is None:
                    idle += 1
                    print(f"{name}, {variant}: NOT TIMED, every launch of a step is as it is", flush=True)
                    continue
                took, device, other = found
                best = min(best, (device, variant))
                line = f"{name}, {variant}: {took * 1e6:.1f} us a step, device {device * 1e6:.1f}; {other}"
                placed = {"context": asked.depth, "batch": asked.rows, "variant": variant}
                seconds = {"seconds_per_step": took, "device_seconds": device}
                kept.say(line, "engine, variant", **of(name), **placed, **seconds)
            for variant in dict.fromkeys((AS_IT_IS, best[1])) if asked.profile else ():
                steps.profile(variant)
            del steps
    return 1 if idle else 0


if __name__ == "__main__":
    sys.exit(main())
