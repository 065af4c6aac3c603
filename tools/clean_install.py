"""Proof that what is published works without this checkout: wheels, a clean environment, plugins in and out.

    python tools/clean_install.py                 # everything; what `make check` runs
    python tools/clean_install.py --suite none    # without the core's own tests

Builds the wheels of the core, of every plugin and of the example, and installs them into a new virtual
environment step by step: the core alone (its own tests must pass with zero plugins), then the CPU backend and
the llama plugin (the default model must answer the official client), then without the llama plugin (the
server must say what to install), then with the example, a stranger's architecture.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE_TESTS = ["luce-core[test]"]
SUITES = {"full": [], "quick": ["-m", "not slow and not model"], "none": None}
URL = re.compile(r"at (http://\S+/v1)")
START_S = 120
STOP_S = 30


class Failed(Exception):
    """A proof did not hold."""


class Rig:
    """A clean environment, and the wheels that go into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wheels = folder / "wheels"
        self.venv = folder / "venv"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("LUCE_", "PYTHON"))}
        # Safe path: the checkout we stand in must not be imported in place of what was installed.
        self.env = {**kept, "PYTHONSAFEPATH": "1", "XDG_CONFIG_HOME": str(folder / "config")}

    def bin(self, name: str) -> str:
        return str(self.venv / "bin" / name)

    def run(self, *command: str, status: int | None = 0, cwd: Path = ROOT, show: bool = False) -> str:
        """Standard output and error of a command that must end with `status`."""
        done = subprocess.run(
            command, cwd=cwd, env=self.env, text=True, check=False,
            stdout=None if show else subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        if status is not None and done.returncode != status:
            words = " ".join(command)
            raise Failed(f"{words}\nended with {done.returncode}, wanted {status}:\n{done.stdout}")
        return done.stdout or ""

    def install(self, *packages: str) -> None:
        self.run(
            self.bin("python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
            "--constraint", str(ROOT / "constraints.txt"), "--find-links", str(self.wheels), *packages,
        )

    def uninstall(self, *packages: str) -> None:
        self.run(self.bin("python"), "-m", "pip", "uninstall", "--quiet", "--yes", *packages)

    def luce(self, *words: str, status: int = 0) -> str:
        return self.run(self.bin("luce-core"), *words, status=status, cwd=self.folder)


def projects() -> list[Path]:
    """The core, then every plugin and example."""
    return [ROOT, *(file.parent for group in ("plugins", "examples") for file in
                    sorted((ROOT / group).glob("*/pyproject.toml")))]


def build_wheels(rig: Rig) -> str:
    for project in projects():
        rig.run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(rig.wheels),
                str(project))
    names = []
    for wheel in sorted(rig.wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            members = archive.namelist()
        strays = [name for name in members if "/tests/" in f"/{name}" or "__pycache__" in name]
        if strays:
            raise Failed(f"{wheel.name} carries {strays[0]}")
        names.append(wheel.name.split("-")[0].replace("_", "-"))
    if len(names) != len(projects()):
        raise Failed(f"{len(projects())} projects gave {len(names)} wheels: {names}")
    return ", ".join(names)


def make_environment(rig: Rig) -> str:
    rig.run(sys.executable, "-m", "venv", str(rig.venv))
    rig.install("luce-core")
    where = rig.run(rig.bin("python"), "-c", "import luce_core; print(luce_core.__file__)").strip()
    if not Path(where).is_relative_to(rig.venv):
        raise Failed(f"the clean environment imports {where}")
    return rig.luce("--version").strip()


def core_alone(rig: Rig) -> str:
    listed = rig.luce("plugins", "--json")
    if listed.count('"name"') != 1:
        raise Failed(f"wanted the core alone, got {listed}")
    rig.luce("--help")
    wrong = rig.luce("serve", status=1)
    if "pip install luce-arch-llama" not in wrong or "Traceback" in wrong:
        raise Failed(f"the core alone should say what to install, and said: {wrong}")
    return "serve says what to install"


def core_suite(rig: Rig, choice: str) -> str:
    rig.install(*CORE_TESTS)
    start = time.monotonic()
    marks = SUITES[choice]
    options = ["-q", "-p", "no:cacheprovider", "-n", os.environ.get("WORKERS", "2"), *marks]
    rig.run(rig.bin("python"), "-m", "pytest", "tests", *options, show=True)
    return f"{time.monotonic() - start:.0f} s"


@contextmanager
def served(rig: Rig, *words: str) -> Iterator[tuple[str, Path]]:
    """A server that is ready: its URL, and the file its output goes to. It must end well when told to."""
    log = rig.folder / "serve.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [rig.bin("luce-core"), "serve", "--port", "0", *words],
            cwd=rig.folder, env=rig.env, stdout=output, stderr=subprocess.STDOUT,
        )
    try:
        yield wait_for_url(server, log), log
        server.terminate()
        if server.wait(STOP_S) != 0:
            raise Failed(f"the server ended with {server.returncode}:\n{log.read_text()}")
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def wait_for_url(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        found = URL.search(log.read_text())
        if found:
            return found[1]
        if server.poll() is not None:
            break
        time.sleep(0.2)
    raise Failed(f"no server after {START_S} s (status {server.poll()}):\n{log.read_text()}")


def chat(url: str, question: str) -> tuple[str, int]:
    """The streamed answer of the official client, and its number of chunks."""
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key="unused")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": question}]
    stream = client.chat.completions.create(
        model=model, messages=messages, stream=True, temperature=0, max_tokens=24
    )
    chunks = [chunk.choices[0].delta.content for chunk in stream if chunk.choices]
    return "".join(text for text in chunks if text), len(chunks)


def default_model(rig: Rig) -> str:
    rig.install("luce-backend-cpu", "luce-arch-llama")
    before = rig.luce("serve", "--help")
    if "--cpu-exact" not in before:
        raise Failed("the CPU backend is installed and its flags are not there")
    with served(rig) as (url, log):
        text, chunks = chat(url, "What is the capital of France? Answer in one word.")
        if "Paris" not in text or chunks < 3:
            raise Failed(f"got {text!r} in {chunks} chunks\n{log.read_text()}")
        if "luce-arch-llama" not in log.read_text():
            raise Failed(f"the banner does not name its plugins:\n{log.read_text()}")
    if not re.search(r"chat .*(stop|length)", log.read_text()):
        raise Failed(f"no row for the request:\n{log.read_text()}")
    return repr(text)


def without_llama(rig: Rig) -> str:
    rig.uninstall("luce-arch-llama")
    wrong = rig.luce("serve", status=1)
    if "pip install luce-arch-llama" not in wrong or "Traceback" in wrong:
        raise Failed(f"without the plugin the server said: {wrong}")
    return wrong.strip().splitlines()[-1][:100]


def without_backend(rig: Rig) -> str:
    rig.uninstall("luce-backend-cpu")
    if "--cpu-exact" in rig.luce("serve", "--help"):
        raise Failed("the flags of the uninstalled backend are still there")
    wrong = rig.luce("serve", "--cpu-exact", status=2)
    if "luce-backend-cpu" not in wrong:
        raise Failed(f"--cpu-exact without its plugin: {wrong}")
    rig.install("luce-backend-cpu")
    return "its flags are gone, and serve names the package"


def strangers(rig: Rig) -> str:
    """The example architecture: installed from its wheel, served by a core that has never heard of it."""
    example = ROOT / "examples" / "third-party-arch"
    name = next(line for line in (example / "pyproject.toml").read_text().splitlines()
                if line.startswith("name")).split('"')[1]
    rig.install(name)
    model = rig.folder / "stranger.gguf"
    rig.run(rig.bin("python"), str(example / "make_model.py"), str(model))
    with served(rig, str(model)) as (url, log):
        text, chunks = chat(url, "Hello")
        if chunks < 2:
            raise Failed(f"got {text!r} in {chunks} chunks\n{log.read_text()}")
    return name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=SUITES, default="quick", help="how much of the core's own tests")
    parser.add_argument("--keep", action="store_true", help="leave the environment where it is")
    choice = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="luce-clean-"))
    rig = Rig(folder)
    proofs: list[tuple[str, Callable[[], str]]] = [
        ("wheels build", lambda: build_wheels(rig)),
        ("the core installs into a clean environment", lambda: make_environment(rig)),
        ("the core alone", lambda: core_alone(rig)),
        ("the core's tests with zero plugins", lambda: core_suite(rig, choice.suite)),
        ("with plugins the default model answers the official client", lambda: default_model(rig)),
        ("without its plugin the server says what to install", lambda: without_llama(rig)),
        ("without its backend", lambda: without_backend(rig)),
        ("a stranger's architecture is served", lambda: strangers(rig)),
    ]
    if choice.suite == "none":
        del proofs[3]
    try:
        return prove(proofs)
    finally:
        if choice.keep:
            print(f"The environment is in {folder}")
        else:
            shutil.rmtree(folder)


def prove(proofs: list[tuple[str, Callable[[], str]]]) -> int:
    passed = 0
    for name, proof in proofs:
        start = time.monotonic()
        try:
            said = proof()
        except Failed as error:
            print(f"FAILED {name}: {error}", flush=True)
            print(f"{passed} passed, {len(proofs) - passed} failed")  # what comes after stands on this one
            return 1
        passed += 1
        print(f"ok {name} ({time.monotonic() - start:.1f} s): {said}", flush=True)
    print(f"{passed} passed, 0 failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
