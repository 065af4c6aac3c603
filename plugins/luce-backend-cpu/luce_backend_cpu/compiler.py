"""Compiles the C library with the system's compiler at first use and keeps the result.

The result lies under the user's cache in a folder named after everything that decides its bits: the sources,
the compiler, the flags and the processor. It appears there by renaming, so concurrent starts and interrupted
ones do no harm.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from attrs import frozen

from luce_backend_cpu.machine import cpu_flags

SOURCES = Path(__file__).parent / "csrc"
UNIT = "luce_cpu.c"
COMPILE_TIMEOUT_S = 300.0
"""The slowest compile seen took 10 s on one busy core; far beyond that a compiler hangs."""

CANDIDATES = ("cc", "gcc", "clang")
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-pthread",
    "-Wno-psabi",
)


@frozen
class Compiler:
    """A compiler that answered `--version`."""

    command: tuple[str, ...]
    version: str
    """First line of its answer."""


@frozen
class Library:
    """The compiled library, or why there is none; `reason` is a sentence either way."""

    path: Path | None
    reason: str


def native_flags() -> tuple[str, ...]:
    """What makes the compiler use all this processor has."""
    return ("-mcpu=native",) if platform.machine() in ("aarch64", "arm64") else ("-march=native",)


def find_compiler(env: Mapping[str, str]) -> Compiler | str:
    """`CC` where it is set (then nothing else), else the usual names. A sentence where none answers."""
    if env.get("CC"):
        asked = tuple(shlex.split(env["CC"]))
        found = _version(asked)
        return found if isinstance(found, Compiler) else f"the compiler that CC names does not run: {found}"
    tried = []
    for name in CANDIDATES:
        found = _version((name,))
        if isinstance(found, Compiler):
            return found
        tried.append(found)
    return f"no C compiler: {'; '.join(tried)}"


def _version(command: tuple[str, ...]) -> Compiler | str:
    program = shutil.which(command[0])
    if program is None:
        return f"{command[0]!r} is not there"
    try:
        answer = subprocess.run(
            [program, *command[1:], "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]!r} cannot be run ({error})"
    if answer.returncode or not answer.stdout.strip():
        return f"{command[0]!r} --version ended with status {answer.returncode}"
    return Compiler((program, *command[1:]), answer.stdout.splitlines()[0].strip())


@lru_cache(maxsize=1)
def library() -> Library:
    """The library for this machine; compiled once per process at most, and once per machine usually."""
    return build(os.environ, cache_folder(os.environ), native_flags())


def build(env: Mapping[str, str], cache: Path, target: Sequence[str]) -> Library:
    """Find a compiler and the compiled library in `cache`, compiling it if it is not there yet."""
    if platform.system() == "Windows":
        return Library(None, "the C tier is not built on Windows")
    compiler = find_compiler(env)
    if isinstance(compiler, str):
        return Library(None, compiler)
    folder = cache / _key(compiler, target)
    path = folder / "luce_cpu.so"
    if path.is_file():
        return Library(path, f"compiled by {compiler.version}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        failure = _compile(compiler, target, folder, path)
    except (OSError, subprocess.TimeoutExpired) as error:
        failure = str(error)
    if failure:
        return Library(None, f"{compiler.version} did not compile the C library: {failure}")
    return Library(path, f"compiled by {compiler.version}")


def cache_folder(env: Mapping[str, str]) -> Path:
    """`$XDG_CACHE_HOME/luce-core/cpu`, by default under `~/.cache`."""
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "luce-core" / "cpu"


def _compile(compiler: Compiler, target: Sequence[str], folder: Path, path: Path) -> str:
    """Empty on success, else what the compiler said last."""
    handle, name = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    scratch = Path(name)
    try:
        command = [*compiler.command, *FLAGS, *target, str(SOURCES / UNIT), "-o", str(scratch), "-lm"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False, errors="replace"
        )
        if done.returncode:
            return _complaint(done.stderr or done.stdout, done.returncode)
        if not scratch.stat().st_size:
            return "it ended well but wrote nothing"
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    return ""


def _complaint(output: str, status: int) -> str:
    """The first line that says error, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines[-1:] or [f"it ended with status {status} and said nothing"])[0]


def _key(compiler: Compiler, target: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    for part in (
        *compiler.command, compiler.version, *FLAGS, *target, platform.machine(), *sorted(cpu_flags()),
    ):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]
