"""`luce-core` in this process and as a program of its own; plugins are installed in a folder of the test."""

import io
import itertools
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import attrs
import pytest
from importlib_metadata import Distribution

import luce_core
from luce_core.cli import main
from luce_core.testing.toy import write_toy_model

NUMBERS = itertools.count()
HOME = Path(luce_core.__file__).parents[1]
"""Where this process found luce_core; programs are to find the same."""


@attrs.frozen
class Result:
    status: int
    out: str
    err: str


class Installed:
    """A folder on `sys.path` that plugins are installed into; nothing else of this environment is allowed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: list[str] = []
        folder.mkdir()

    def add(self, name: str, hooks: str, provides: tuple[str, ...] = (), requires: str = "luce-core") -> None:
        """Install a distribution `luce-NAME` whose entry point names the module `hooks`."""
        info = self.folder / f"luce_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: luce-{name}\nVersion: 1.0\nRequires-Dist: {requires}\n"
        )
        lines = [f"[luce_core.plugins]\n{name} = {hooks}", "[luce_core.provides]"]
        (info / "entry_points.txt").write_text("\n".join([*lines, *(f"{key} = {hooks}" for key in provides)]))
        self.names.append(name)

    def write(self, name: str, source: str) -> None:
        """Install a plugin given as the source of its module of hooks."""
        head = "from luce_core.contracts import *\nfrom luce_core.hookspecs import hookimpl\n"
        info = f"@hookimpl\ndef luce_plugin_info():\n    return PluginInfo({name!r}, API)\n"
        module = f"hooks_of_{name}_{next(NUMBERS)}"  # a module stays imported: no two tests may share a name
        (self.folder / f"{module}.py").write_text(head + info + source)
        self.add(name, module)

    def environment(self, base: Path) -> dict[str, str]:
        """Environment of a program that sees these plugins and no other."""
        ours = ("LUCE_", "DFLASH_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return {
            **kept,
            "PYTHONPATH": os.pathsep.join((str(self.folder), str(HOME))),
            "LUCE_PLUGIN_ALLOW": ",".join(self.names) or "core",
            "LUCE_CACHE": str(base / "models"),
            "XDG_CONFIG_HOME": str(base / "config"),
            "XDG_STATE_HOME": str(base / "state"),
            "TERM": "xterm",
        }


@pytest.fixture(autouse=True)
def _no_width(monkeypatch):
    """Tests that run side by side are told the width of a terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """No plugins; `add` and `write` install some."""
    made = Installed(tmp_path / "site")
    monkeypatch.syspath_prepend(str(made.folder))
    everything = Distribution.discover
    monkeypatch.setattr(Distribution, "discover", lambda: everything(path=[str(made.folder)]))
    return made


@pytest.fixture
def toy(installed):
    """The toy architecture and its device, installed."""
    installed.add("toy", "luce_core.testing.toy.hooks", provides=("arch.toy", "device.cpu", "ops.toy"))
    return installed


@pytest.fixture
def toy_model(tmp_path):
    return write_toy_model(tmp_path / "toy.gguf")


@pytest.fixture
def environment(installed, tmp_path):
    """What the environment of a program would be; a function, since plugins are installed later."""
    return lambda **extra: {**installed.environment(tmp_path), **extra}


@pytest.fixture
def luce(environment, tmp_path):
    """Run a command line in this process -> status, standard output, standard error."""

    def call(*argv: object, env: Mapping[str, str] | None = None) -> Result:
        out, err = io.StringIO(), io.StringIO()
        seen = {**environment(), **(env or {})}
        if "LUCE_PLUGIN_ALLOW" not in (env or {}):
            del seen["LUCE_PLUGIN_ALLOW"]  # in this process discovery itself sees the test's folder only
        with redirect_stdout(out), redirect_stderr(err):
            status = main.run([str(word) for word in argv], seen, tmp_path)
        return Result(status, out.getvalue(), err.getvalue())

    return call


@pytest.fixture
def program(environment, tmp_path):
    """Run a command line as a program of its own -> status, standard output, standard error."""

    def call(*argv: object, stdin: str = "", **extra: str) -> Result:
        done = subprocess.run(
            [sys.executable, "-m", "luce_core", *(str(word) for word in argv)],
            env=environment(**extra),
            cwd=tmp_path,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    return call
